"""The plan as a picture's source: a :class:`Plan` in, Graphviz DOT text out, equal for equal plans.

One box a stage (its devices, times and memory), one node a run of regions that run alike, edges with what
crosses them; stages stand side by side and are read downwards.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape

from autoplan.plan import Layout, Part, Plan, Stage, StagePrediction
from autoplan.plan_table import estimate_mark, forecast, heading, part_line
from autoplan.region_runs import RegionRun, fold_regions
from autoplan.report.palette import RECOMPUTE_FILL, StageColours, stage_colours
from autoplan.report.words import boundary, layout_lines, ranks_text
from autoplan.units import bytes_text, seconds_text, share_text

_FONT = 'fontname="Arial"'
_GREY, _BLACK = "#666666", "#1A1A1A"
_PLAIN = f'shape=plain, style="", fontsize=10, fontcolor="{_GREY}"'
_BAR_POINTS = 150
_HEADER = f"""digraph plan {{
  graph [{_FONT}, fontsize=12, labelloc=t, labeljust=l, pad=0.3]
  graph [rankdir=TB, newrank=true, splines=ortho, nodesep=0.4, ranksep=0.3]
  node [{_FONT}, fontsize=11, shape=box, style="rounded,filled", margin="0.12,0.08", color="{_GREY}"]
  edge [{_FONT}, fontsize=9.5, color="{_GREY}", fontcolor="{_GREY}", arrowsize=0.7]"""


def plan_dot(plan: Plan) -> str:
    """DOT text of the whole plan; every name in it is escaped."""
    lines = [_HEADER, f"  label=<{_title(plan)}>"]
    for p, part in enumerate(plan.parts):
        lines += _part(p, part, plan)
    return "\n".join([*lines, "}", ""])


def _part(p: int, part: Part, plan: Plan) -> Iterator[str]:
    """Stages as boxes side by side, in order and level, then the edges between them."""
    mark = estimate_mark(plan)
    stages = [_Box(f"p{p}_s{s}", s, stage, part, plan.layouts, mark) for s, stage in enumerate(part.stages)]
    for stage in stages:
        yield from stage.lines()
    for before, after in itertools.pairwise(stages):
        line = stage_colours(before.number).line
        ends = f"{before.leaves} -> {after.nodes[0]}"
        yield f'  {ends} [constraint=false, color="{line}", penwidth=1.8, arrowsize=0.9]'
    top = f"p{p}_top"  # invisible: keeps the boxes level and in order
    yield f"  {top} [style=invis, shape=point, height=0, ordering=out]"
    yield from (f"  {top} -> {stage.head} [style=invis]" for stage in stages)


@dataclass(frozen=True)
class _Box:
    """One stage: its regions as nodes named after ``name``, and a last node that says what leaves it."""

    name: str
    number: int
    stage: Stage
    part: Part
    layouts: Mapping[str, Layout]
    mark: str

    @property
    def runs(self) -> tuple[RegionRun, ...]:
        return fold_regions(self.stage.regions)

    @property
    def nodes(self) -> list[str]:
        return [f"{self.name}_r{r}" for r in range(len(self.runs))]

    @property
    def head(self) -> str:
        return f"{self.name}_head"

    @property
    def leaves(self) -> str:
        return f"{self.name}_out"

    def lines(self) -> Iterator[str]:
        colours, told = stage_colours(self.number), self.stage.prediction
        yield f"  subgraph cluster_{self.name} {{"
        yield f'    style="rounded,filled"; fillcolor="{colours.box}"; color="{colours.line}"'
        yield '    margin=14; label=""'
        yield f"    {self.head} [label=<{_stage_label(self, colours)}>, {_PLAIN}]"
        yield f"    {self.head} -> {self.nodes[0]} [style=invis, weight=20]"
        for node, run in zip(self.nodes, self.runs):
            label = _region_label(run, self.layouts.get(run.layout))
            yield f'    {node} [label=<{label}>, fillcolor="{colours.region}", color="{colours.line}"]'
        for node, after, run in zip(self.nodes, self.nodes[1:], self.runs):
            layout = self.layouts.get(run.layout)
            label = "\\l".join(
                f"  {word}" for word in _crossing(layout.output_bytes if layout else 0.0, self.part, layout)
            )
            yield f'    {node} -> {after} [label="{label}\\l", weight=10]'
        last = self.number == len(self.part.stages) - 1
        leaving = self.layouts.get(self.runs[-1].layout)
        words = _crossing(told.sends_bytes if told else 0.0, self.part, leaving)
        text = "loss" if last else "\\n".join([f"to stage {self.number + 1}", *words])
        yield f'    {self.leaves} [label="{text}", {_PLAIN}]'
        yield f"    {self.nodes[-1]} -> {self.leaves} [weight=10]"
        yield "  }"


def _crossing(amount_bytes: float, part: Part, layout: Layout | None) -> list[str]:
    """What crosses: the bytes of one micro-batch on one device and how the tensor lies on each axis."""
    return [bytes_text(amount_bytes)] * (amount_bytes > 0) + boundary(part, layout)


# ---- labels -----------------------------------------------------------------------------------------


def _table(rows: list[str], align: str = "left") -> str:
    cells = "".join(f'<TR><TD ALIGN="{align}" BALIGN="left">{row}</TD></TR>' for row in rows)
    return f'<TABLE BORDER="0" CELLBORDER="0" CELLSPACING="0" CELLPADDING="2">{cells}</TABLE>'


def _small(text: str, colour: str = _BLACK) -> str:
    return f'<FONT POINT-SIZE="9.5" COLOR="{colour}">{text}</FONT>'


def _title(plan: Plan) -> str:
    rows = [f'<FONT POINT-SIZE="16" COLOR="{_BLACK}"><B>{escape(heading(plan))}</B></FONT>']
    rows += [escape(line) for line in (*forecast(plan), *(part_line(part) for part in plan.parts))]
    rows += [_small(escape(line), _GREY) for line in _legend(plan)]
    return _table(rows)


def _legend(plan: Plan) -> Iterator[str]:
    yield "a box: one stage and its devices; a node: consecutive regions that run alike, counted after x"
    yield "on a mesh axis: R replicated, S(d) cut along dim d, P partial sums; bytes: a micro-batch, a device"
    recomputes = {r.recompute for part in plan.parts for s in part.stages for r in s.regions}
    if recomputes - {"none"}:
        yield "recompute: full keeps a region's inputs alone, selective keeps what matrix products made"
    if estimate_mark(plan):
        yield f"~ rests on numbers that {plan.hardware}'s profile marks as estimated"
    for names in plan.model.tied_parameters:
        yield f"one parameter under several names: {' = '.join(names)}"


def _stage_label(box: _Box, colours: StageColours) -> str:
    s, mark, told = box.number, box.mark, box.stage.prediction
    span = ranks_text(box.part, s)
    rows = [f'<FONT POINT-SIZE="13" COLOR="{colours.line}"><B>stage {s}</B></FONT> {_small(span, _GREY)}']
    if told is not None:
        times = (
            f"forward {mark}{seconds_text(told.forward_s)}, backward {mark}{seconds_text(told.backward_s)}"
        )
        again = f" + {mark}{seconds_text(told.recompute_s)} recompute" if told.recompute_s else ""
        rows += [_small(times + again), _memory(told, colours)]
    return _table(rows)


def _memory(told: StagePrediction, colours: StageColours) -> str:
    """``31.0 of 86.2 GiB`` and a bar of that share."""
    share = min(max(told.memory_peak_bytes / told.memory_limit_bytes, 0.0), 1.0)
    full = round(share * _BAR_POINTS)
    cells = [(full, colours.line), (_BAR_POINTS - full, "#FFFFFF")]
    bar = "".join(
        f'<TD WIDTH="{points}" HEIGHT="9" FIXEDSIZE="TRUE" BGCOLOR="{fill}"></TD>'
        for points, fill in cells
        if points
    )
    used = f"{share_text(told.memory_peak_bytes, told.memory_limit_bytes)} ({share:.0%})"
    return (
        '<TABLE BORDER="0" CELLBORDER="0" CELLSPACING="0" CELLPADDING="0"><TR>'
        f'<TD><TABLE BORDER="1" COLOR="{colours.line}" CELLBORDER="0" CELLSPACING="0" CELLPADDING="0">'
        f'<TR>{bar}</TR></TABLE></TD><TD CELLPADDING="4">{_small(used)}</TD></TR></TABLE>'
    )


def _region_label(run: RegionRun, layout: Layout | None) -> str:
    count = f" x{len(run.names)}" if len(run.names) > 1 else ""
    name = f'<FONT POINT-SIZE="12" COLOR="{_BLACK}"><B>{escape(run.label)}</B>{count}</FONT>'
    rows = [name, *(_small(escape(line), "#444444") for line in layout_lines(run.layout, layout))]
    if run.recompute in RECOMPUTE_FILL:
        chip = f'<TD BGCOLOR="{RECOMPUTE_FILL[run.recompute]}">{_small(f"recompute {run.recompute}")}</TD>'
        rows.append(
            f'<TABLE BORDER="0" CELLBORDER="0" CELLSPACING="0" CELLPADDING="3"><TR>{chip}</TR></TABLE>'
        )
    return _table(rows)
