"""Memory: curves over the step and the stages' peaks come in, charts and the tensors at the peak go out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autoplan.plan import Part, Plan, Stage, StagePrediction
from autoplan.report.markup import Markup, tag
from autoplan.report.memory_curve import Curve, memory_curve
from autoplan.report.page.charts import bar, byte_ticks, picture, section, table
from autoplan.report.summary import fullest_stage
from autoplan.report.timeline import Timeline
from autoplan.units import bytes_text, share_text

_WIDE, _HIGH, _GAP = 262.0, 96.0, 22.0
_COLUMNS = 4
_LEFT, _TOP = 58.0, 22.0
_DOWN = _HIGH + 36.0


def memory_section(plan: Plan, lines: Sequence[Timeline]) -> Markup:
    """Curves a rank, then what the peak of every stage is made of."""
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
        "in flight and, in a backward, its temporaries. The dashed line is what the chip can give.",
    )


def _curves(name: str, part: Part, curves: Sequence[Curve], step_s: float) -> Markup:
    columns = min(_COLUMNS, len(curves))
    rows = -(-len(curves) // columns)
    most = max(max(curve.highest_bytes, curve.limit_bytes) for curve in curves)
    wide = _WIDE if columns > 1 else 2 * _WIDE
    panels = [
        _panel(curve, _LEFT + i % columns * (wide + _GAP), _TOP + i // columns * _DOWN, wide, most, step_s)
        for i, curve in enumerate(curves)
    ]
    return picture(
        name,
        f"Memory of each rank over the step, {part.name}",
        "; ".join(f"stage {_stages(c)}: at most {share_text(c.peak_bytes, c.limit_bytes)}" for c in curves),
        _LEFT + columns * (wide + _GAP),
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
        tag("line", x1=left, x2=left + wide, y1=limit, y2=limit, class_="limit"),
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
    """An overview of the stages, then each stage's tensors; the fullest stage's are open."""
    told = [(s, stage, stage.prediction) for s, stage in enumerate(part.stages)]
    known = [(s, stage, one) for s, stage, one in told if one is not None]
    if not known:
        return
    rows = [
        [
            f"stage {s}",
            bytes_text(one.memory_peak_bytes),
            bytes_text(one.memory_limit_bytes),
            bar(one.memory_peak_bytes / one.memory_limit_bytes, "share of the limit"),
            f"{one.memory_peak_bytes / one.memory_limit_bytes:.1%}",
            bytes_text(one.saved_bytes),
            str(one.in_flight),
        ]
        for s, _, one in known
    ]
    heads = ["stage", "peak", "limit", "", "used", "a micro-batch keeps", "in flight"]
    yield table(f"Memory of one device by stage, {part.name}", heads, rows)
    for s, stage, one in known:
        title = (
            f"Tensors at the peak of stage {s}: {share_text(one.memory_peak_bytes, one.memory_limit_bytes)}"
        )
        inside = (tag("summary", title), _items(s, one))
        yield tag("details", inside, open=stage is fullest)


def _items(number: int, told: StagePrediction) -> Markup:
    peak = told.memory_peak_bytes or 1.0
    rows = [
        [item.name, bytes_text(item.bytes), bar(item.bytes / peak, item.name), f"{item.bytes / peak:.1%}"]
        for item in told.memory_items
    ]
    total = ["together", bytes_text(told.memory_peak_bytes), "", ""]
    return table(
        f"What stage {number} holds at its peak", ["tensor", "bytes", "", "share"], rows, total=total
    )
