"""Memory: curves over the step and the stages' peaks come in, charts and the tensors at the peak go out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autoplan.plan import Part, Plan, Stage, StagePrediction
from autoplan.report.markup import Child, Markup, tag
from autoplan.report.memory_curve import Curve, memory_curve
from autoplan.report.page.charts import bar, byte_ticks, picture, section, table
from autoplan.report.summary import fullest_stage
from autoplan.report.timeline import Timeline
from autoplan.units import bytes_text, share_text

_ALL, _HIGH, _GAP = 1104.0, 96.0, 22.0
_COLUMNS = 4
_LEFT, _TOP = 58.0, 22.0
_DOWN = _HIGH + 36.0


def memory_section(plan: Plan, lines: Sequence[Timeline]) -> Markup:
    """Curves a rank, then what the peak of every rank is made of."""
    inside: list[Markup] = []
    for index, line in enumerate(lines):
        curves = [memory_curve(line, track) for track in line.tracks]
        inside += [_explained(), _curves(f"memory-{index}", line.part, curves, line.step_s)]
    for part in plan.parts:
        inside += _peaks(part, fullest_stage(plan))
    if not inside:
        inside = [tag("p", "The plan carries no forecast of memory.")]
    return section("memory", "Memory", *inside)


def _explained() -> Markup:
    return tag(
        "p",
        "Each panel is one rank of the pipeline over the step. The dark ground is always there (weights, "
        "optimizer states, gradients, buffers); what stands on it are the saved tensors of the micro-batches "
        "in flight and, in a backward, its temporaries. The dashed line is what the chip can give, left "
        "out where it is far above.",
    )


def _curves(name: str, part: Part, curves: Sequence[Curve], step_s: float) -> Markup:
    columns = min(_COLUMNS, len(curves))
    rows = -(-len(curves) // columns)
    highest, limit = (
        max(getattr(curve, name) for curve in curves) for name in ("highest_bytes", "limit_bytes")
    )
    most = max(highest, limit) if highest > limit / 3 else 1.1 * highest  # far below it, its line is left out
    wide = (_ALL + _GAP) / columns - _GAP
    panels = [
        _panel(curve, _LEFT + i % columns * (wide + _GAP), _TOP + i // columns * _DOWN, wide, most, step_s)
        for i, curve in enumerate(curves)
    ]
    return picture(
        name,
        f"Memory of each rank over the step, {part.name}",
        "; ".join(f"stage {_stages(c)}: at most {share_text(c.peak_bytes, c.limit_bytes)}" for c in curves),
        _LEFT + _ALL + _GAP,
        _TOP + rows * _DOWN,
        panels,
    )


def _stages(curve: Curve) -> str:
    return ", ".join(map(str, curve.track.stages))


def _panel(curve: Curve, left: float, top: float, wide: float, most: float, step_s: float) -> Markup:
    def at(time_s: float, amount_bytes: float) -> str:
        return f"{left + wide * time_s / step_s:.1f} {top + _HIGH * (1 - amount_bytes / most):.1f}"

    points = " ".join(at(*point) for point in curve.points)
    ground, limit = (top + _HIGH * (1 - x / most) for x in (curve.always_bytes, curve.limit_bytes))
    title = f"stage {_stages(curve)}: {share_text(curve.peak_bytes, curve.limit_bytes)}"
    drawn = [
        tag("text", title, x=left, y=top - 7, class_="name"),
        tag("path", d=f"M{at(0, 0)} L{points} L{at(step_s, 0)}z", class_="held"),
        tag("rect", x=left, y=ground, width=wide, height=top + _HIGH - ground, class_="always"),
        tag("line", x1=left, x2=left + wide, y1=limit, y2=limit, class_="limit") if limit >= top else None,
        tag("line", x1=left, x2=left + wide, y1=top + _HIGH, y2=top + _HIGH, class_="base"),
    ]
    return tag("g", drawn, _bytes_axis(left, top, most) if left == _LEFT else None)


def _bytes_axis(left: float, top: float, most: float) -> Markup:
    marks: list[Markup] = []
    for value in byte_ticks(most, 3):
        y = top + _HIGH * (1 - value / most)
        marks.append(tag("line", x1=left - 4, x2=left, y1=y, y2=y))
        marks.append(tag("text", bytes_text(value), x=left - 7, y=y + 4, text_anchor="end"))
    return tag("g", marks, class_="axis")


# ---- the peaks --------------------------------------------------------------------------------------


def _peaks(part: Part, fullest: Stage | None) -> Iterator[Markup]:
    """An overview of the pipeline's ranks, then the tensors at each one's peak, the fullest's open."""
    devices = [_Device(rank, part) for rank in range(part.mesh.pp)]
    known = [device for device in devices if device.told]
    if not known:
        return
    heads = ["", "peak", "limit", "", "used", "a micro-batch keeps", "in flight"]
    yield table(f"Memory of one device, {part.name}", heads, [device.row() for device in known])
    first = next((device for device in known if fullest in device.stages), known[0])
    yield tag("details", tag("summary", f"Tensors at the peak of {first.peak}"), _items(first), open=True)
    others = [
        tag("details", tag("summary", f"Tensors at the peak of {device.peak}"), _items(device))
        for device in known
        if device is not first
    ]
    if others:
        title = f"Tensors at the peak of the other {len(others)}" if len(others) > 1 else None
        yield tag("details", tag("summary", title), others) if title else others[0]


@dataclass(frozen=True)
class _Device:
    """One pipeline rank's device: each of its stages tells the memory of the whole device."""

    rank: int
    part: Part

    @property
    def numbers(self) -> range:
        return range(self.rank, len(self.part.stages), self.part.mesh.pp)

    @property
    def stages(self) -> list[Stage]:
        return [self.part.stages[number] for number in self.numbers]

    @property
    def told(self) -> list[StagePrediction]:
        return [stage.prediction for stage in self.stages if stage.prediction is not None]

    @property
    def name(self) -> str:
        return f"stage{'s' * (len(self.numbers) > 1)} {', '.join(map(str, self.numbers))}"

    @property
    def peak(self) -> str:
        return f"{self.name}: {share_text(self.told[0].memory_peak_bytes, self.told[0].memory_limit_bytes)}"

    def row(self) -> list[Child]:
        one = self.told[0]
        share = one.memory_peak_bytes / one.memory_limit_bytes
        return [
            self.name,
            bytes_text(one.memory_peak_bytes),
            bytes_text(one.memory_limit_bytes),
            bar(share, "share of the limit"),
            f"{share:.1%}",
            ", ".join(bytes_text(stage.saved_bytes) for stage in self.told),
            ", ".join(str(stage.in_flight) for stage in self.told),
        ]


def _items(device: _Device) -> Markup:
    told = device.told[0]
    peak = told.memory_peak_bytes or 1.0
    rows = [
        [item.name, bytes_text(item.bytes), bar(item.bytes / peak, item.name), f"{item.bytes / peak:.1%}"]
        for item in told.memory_items
    ]
    total = ["together", bytes_text(told.memory_peak_bytes), "", ""]
    heads = ["tensor", "bytes", "", "share"]
    return table(f"What {device.name} holds at its peak", heads, rows, total=total)
