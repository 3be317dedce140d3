"""The model as a zoomable picture: a plan in; stages as cards, their regions and what crosses them out.

Cards stand in rows and are read like text. A region's node links to the details of its layout below.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field

from autoplan.plan import AxisLayout, Layout, Part, Plan, Stage, StagePrediction
from autoplan.region_runs import RegionRun, fold_regions
from autoplan.report.markup import Markup, join, tag
from autoplan.report.page.charts import picture, seconds, section, table
from autoplan.report.palette import STAGE_STYLES
from autoplan.report.words import boundary, counted, layout_lines, ranks_text
from autoplan.units import bytes_text, count_text, share_text

_WIDE, _ACROSS, _DOWN = 264.0, 40.0, 46.0  # a card, and the room between cards
_PAD, _LINE = 12.0, 14.0
_CHARACTERS = 39  # of small text in a node


def graph_section(plan: Plan, mark: str) -> Markup:
    """A picture a part, the same as a table, and every layout's placements."""
    intro = (
        "A card is one pipeline stage with its devices; a node stands for consecutive regions that run "
        "alike, counted after x. On a mesh axis R is replicated, S(d) cut along dim d, P partial sums. "
        "Bytes are those of one micro-batch on one device. Follow a node to the placement of its tensors."
    )
    inside: list[Markup] = [tag("p", intro)]
    for index, part in enumerate(plan.parts):
        inside.append(_picture(f"graph-{index}", part, plan, mark))
        inside.append(_table(part, plan, mark))
    inside += [_layout(name, layout) for name, layout in plan.layouts.items()]
    return section("graph", "Model and stages", *inside)


def _picture(name: str, part: Part, plan: Plan, mark: str) -> Markup:
    cards = [_Card(s, stage, part, plan, mark) for s, stage in enumerate(part.stages)]
    columns = _columns(part)
    drawn: list[Markup] = []
    y = 4.0
    for first in range(0, len(cards), columns):
        row = cards[first : first + columns]
        bodies = [card.draw(4 + i * (_WIDE + _ACROSS), y) for i, card in enumerate(row)]
        high = max(card.bottom for card in row) - y
        drawn += [card.framed(body, high) for card, body in zip(row, bodies)]
        drawn += [_arrow_on(card, i) for i, card in enumerate(row[:-1])]
        if first + columns < len(cards):
            drawn.append(_arrow_down(row[-1], y, high))
        y += high + _DOWN
    wide = 8 + columns * (_WIDE + _ACROSS) - _ACROSS
    text = f"{len(cards)} stages; the table below says what each holds, takes and sends."
    inside = tag("g", drawn, class_="scaled")
    graph = picture(name, f"Stages of {part.name}", text, wide, y - _DOWN + 6, inside, links=True)
    return tag(
        "div", graph, class_="zoom", tabindex="0", role="group", data_zoom="xy",
        aria_label=f"Graph of {part.name}; arrow keys move, plus and minus zoom",
    )  # fmt: skip


def _columns(part: Part) -> int:
    """A row a turn of the pipeline where its ranks fit one row, else four cards a row."""
    return part.mesh.pp if 1 < part.mesh.pp <= 4 else min(4, len(part.stages))


@dataclass
class _Card:
    """One stage, drawn from the top down; ``bottom`` grows as it is drawn."""

    number: int
    stage: Stage
    part: Part
    plan: Plan
    mark: str
    left: float = 0.0
    top: float = 0.0
    bottom: float = 0.0
    _drawn: list[Markup] = field(default_factory=list[Markup])

    def draw(self, left: float, top: float) -> list[Markup]:
        """The card's inside, without its frame."""
        self.left, self.top, self.bottom = left, top, top + 22
        self._text(f"stage {self.number}", "name", left + _PAD)
        self._drawn.append(
            tag("text", ranks_text(self.part, self.number), x=left + _WIDE - _PAD, y=self.bottom,
                text_anchor="end", class_="small")
        )  # fmt: skip
        if self.stage.prediction is not None:
            self._forecast(self.stage.prediction)
        runs = fold_regions(self.stage.regions)
        for i, run in enumerate(runs):
            self.bottom += 8
            self._node(run)
            if i < len(runs) - 1:
                layout = self.plan.layouts.get(run.layout)
                self._crossing(bytes_text(layout.output_bytes) if layout else "", boundary(self.part, layout))
        self._leaving(runs[-1])
        return self._drawn

    def framed(self, body: list[Markup], high: float) -> Markup:
        """The card with a frame as high as its row."""
        colour = f"stage-{self.number % len(STAGE_STYLES)}"
        frame = tag("rect", x=self.left, y=self.top, width=_WIDE, height=high, rx=8.0, class_="card")
        return tag("g", frame, body, class_=colour)

    def _forecast(self, told: StagePrediction) -> None:
        forward, backward = (seconds(one, self.mark) for one in (told.forward_s, told.backward_s))
        self._line(f"forward {forward}, backward {backward}")
        if told.recompute_s:
            self._line(f"of it recompute {seconds(told.recompute_s, self.mark)}")
        share = told.memory_peak_bytes / told.memory_limit_bytes
        self._line(f"memory {share_text(told.memory_peak_bytes, told.memory_limit_bytes)} ({share:.0%})")
        y, whole = self.bottom + 5, _WIDE - 2 * _PAD
        for width, class_ in ((whole, "room"), (min(share, 1.0) * whole, "used")):
            self._drawn.append(
                tag("rect", x=self.left + _PAD, y=y, width=width, height=6.0, rx=3.0, class_=class_)
            )
        self.bottom = y + 6

    def _node(self, run: RegionRun) -> None:
        lines = [
            piece
            for line in layout_lines(run.layout, self.plan.layouts.get(run.layout))
            for piece in textwrap.wrap(line, _CHARACTERS, subsequent_indent="  ")
        ]
        if run.recompute != "none":
            lines.append(f"recompute {run.recompute}")
        left, top = self.left + _PAD, self.bottom
        high = 24 + _LINE * len(lines) + (4 if lines else 0)
        count = f" x{len(run.names)}" if len(run.names) > 1 else ""
        box = tag("rect", x=left, y=top, width=_WIDE - 2 * _PAD, height=high, rx=5.0, class_="node")
        name = tag("text", _shortened(run.label) + count, x=left + 8, y=top + 16, class_="name")
        texts = [
            tag("text", line, x=left + 8, y=top + 31 + i * _LINE, class_=_line_class(line))
            for i, line in enumerate(lines)
        ]
        link = {"href": f"#{_layout_id(run.layout)}"} if run.layout in self.plan.layouts else {}
        whole = tag("title", f"{run.label}{count}: layout {run.layout}, recompute {run.recompute}")
        self._drawn.append(tag("a", whole, box, name, texts, **link))
        self.bottom = top + high

    def _crossing(self, amount: str, placements: list[str]) -> None:
        """The arrow to the next node and what goes over it."""
        x, y = self.left + _PAD + 16, self.bottom
        self._drawn.append(tag("path", d=f"M{x:g} {y:g}v18m-4-6l4 6l4-6", class_="edge"))
        label = ", ".join([amount, *placements] if amount else placements)
        self._drawn.append(tag("text", label, x=x + 12, y=y + 13, class_="small"))
        self.bottom = y + 11

    def _leaving(self, run: RegionRun) -> None:
        told, layout = self.stage.prediction, self.plan.layouts.get(run.layout)
        last = self.number == len(self.part.stages) - 1
        words = [f"to stage {self.number + 1}"]
        if told is not None and told.sends_bytes:
            words.append(bytes_text(told.sends_bytes))
        text = "loss" if last else ", ".join([*words, *boundary(self.part, layout)])
        self.bottom += 4
        self._line(text)
        self.bottom += 12

    def _line(self, text: str) -> None:
        self.bottom += _LINE + 2
        self._text(text, "small", self.left + _PAD)

    def _text(self, text: str, class_: str, x: float) -> None:
        self._drawn.append(tag("text", text, x=x, y=self.bottom, class_=class_))


def _line_class(line: str) -> str:
    return f"small {line.replace(' ', '-')}" if line.startswith("recompute ") else "small"


def _shortened(label: str, most: int = 30) -> str:
    """Long names lose their middle."""
    return label if len(label) <= most else f"{label[: most // 2 - 1]}…{label[-(most // 2) :]}"


def _arrow_on(card: _Card, column: int) -> Markup:
    x, y = 4 + column * (_WIDE + _ACROSS) + _WIDE, card.top + 18
    return tag("path", d=f"M{x:g} {y:g}h{_ACROSS:g}m-8-5l8 5l-8 5", class_="edge across")


def _arrow_down(last: _Card, y: float, high: float) -> Markup:
    """From the end of a row to the start of the next."""
    x, turn = last.left + _WIDE / 2, _DOWN / 2
    back = x - (4 + _WIDE / 2)
    path = f"M{x:g} {y + high:g}v{turn:g}h-{back:g}v{turn:g}m-5-8l5 8l5-8"
    return tag("path", d=path, class_="edge across")


# ---- text for those who do not see it ---------------------------------------------------------------


def _table(part: Part, plan: Plan, mark: str) -> Markup:
    rows = [row for s, stage in enumerate(part.stages) for row in _stage_rows(s, stage, part, plan, mark)]
    heads = ["stage", "devices", "regions", "layout", "recompute", "forward", "backward", "sends", "memory"]
    return table(f"Stages of {part.name}", heads, rows, numbers_from=5)


def _stage_rows(s: int, stage: Stage, part: Part, plan: Plan, mark: str) -> Iterator[list[str | Markup]]:
    told = stage.prediction
    for i, run in enumerate(fold_regions(stage.regions)):
        count = f" x{len(run.names)}" if len(run.names) > 1 else ""
        known = run.layout in plan.layouts
        layout = tag("a", run.layout, href=f"#{_layout_id(run.layout)}") if known else run.layout
        numbers = ["", "", "", ""]
        if told is not None and i == 0:
            numbers = [
                seconds(told.forward_s, mark),
                seconds(told.backward_s, mark),
                bytes_text(told.sends_bytes) if told.sends_bytes else "",
                share_text(told.memory_peak_bytes, told.memory_limit_bytes),
            ]
        yield [
            f"stage {s}",
            ranks_text(part, s) if i == 0 else "",
            f"{run.label}{count}",
            layout,
            run.recompute,
            *numbers,
        ]


def _layout_id(name: str) -> str:
    """A layout's anchor: its name with what an address cannot hold replaced."""
    return "layout-" + "".join(c if c.isalnum() or c in "-_." else f"_{ord(c):x}_" for c in name)


def _layout(name: str, layout: Layout) -> Markup:
    """Everything the plan decided about one region class."""
    facts = [
        ("collectives forward", counted(layout.collectives_forward), layout.collective_bytes_forward),
        ("collectives backward", counted(layout.collectives_backward), layout.collective_bytes_backward),
        ("leaves the region", "output", layout.output_bytes),
    ]
    rows = [[label, kinds or "none", bytes_text(amount) if amount else "-"] for label, kinds, amount in facts]
    if layout.kernels:
        rows.append(["fused kernels", ", ".join(layout.kernels), ""])
    rows += [["not fused", reason, ""] for reason in layout.unfused]
    if layout.replicated_ops:
        rows.append(["run whole on every rank", ", ".join(layout.replicated_ops), ""])
    inside = [table(f"Layout {name}", ["", "what", "bytes"], rows, numbers_from=2)]
    for axis, placed in layout.axes.items():
        inside += _axis(name, axis, placed)
    cut = ", ".join(f"{axis} {placed.size}" for axis, placed in layout.axes.items()) or "not cut"
    return tag("details", tag("summary", f"Layout {name}: {cut}"), inside, id=_layout_id(name))


def _axis(name: str, axis: str, placed: AxisLayout) -> Iterator[Markup]:
    """Placements of parameters and boundary tensors, then of every op."""
    tensors = [
        *([key, "parameter", state] for key, state in placed.parameters.items()),
        *([key, "input", state] for key, state in placed.inputs.items()),
        *([f"output {key}", "output", state] for key, state in placed.outputs.items()),
    ]
    title = f"{name} on {axis}, {placed.size} ranks"
    if tensors:
        yield table(f"Tensors of {title}", ["tensor", "kind", "placement"], tensors, numbers_from=9)
    if placed.rules:
        rules = [[node, *_rule(rule)] for node, rule in placed.rules.items()]
        heads = ["operation", "inputs", "output"]
        inside = (tag("summary", f"{count_text(len(rules))} operations that are not replicated"),
                  table(f"Operations of {title}", heads, rules, numbers_from=9))  # fmt: skip
        yield tag("details", inside)


def _rule(rule: str) -> tuple[Markup, Markup]:
    """``R*,S(0)->S(2)`` as inputs and output."""
    inputs, _, output = rule.partition("->")
    return join(inputs.replace(",", ", ")), join(output)
