"""The plans that lost beside the one that won: a plan in, bars and a table side by side out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoplan.plan import Plan
from autoplan.report.compare import fullest_bytes, recompute_counts
from autoplan.report.markup import Child, Markup, tag
from autoplan.report.page.charts import legend, picture, seconds, section, table, time_axis, words
from autoplan.units import bytes_text

_LEFT, _WIDTH, _ROW = 236.0, 740.0, 26.0


@dataclass(frozen=True)
class _Column:
    """One plan of the table."""

    name: str
    facts: Mapping[str, str]
    step_s: float
    breakdown_s: Mapping[str, float]


def runners_section(plan: Plan, mark: str) -> Markup:
    """A sentence where the search saw no other plan that fits."""
    title = "Runners-up"
    if plan.prediction is None or not plan.runners_up:
        said = "The plan carries no others: it was fixed by hand, or nothing else that fits was priced."
        return section("runners", title, tag("p", said))
    columns = [_chosen(plan, mark), *_others(plan, mark)]
    intro = (
        "The best plan found on each of the other meshes that the search priced, all by the same forecast. "
        "They are not proved best on their mesh; the certificate says how much better anything could be."
    )
    return section("runners", title, tag("p", intro), _bars(columns, mark), _table(columns, mark))


def _chosen(plan: Plan, mark: str) -> _Column:
    part, told = plan.parts[0], plan.prediction
    assert told is not None
    facts = {
        "mesh": str(part.mesh),
        "micro-batch": f"{part.micro_batch} x {part.microbatches}",
        "schedule": _schedule(part.schedule, part.vpp),
        "ZeRO": _zero(part.zero, part.zero_shard),
        "recompute": _recompute(recompute_counts(part)),
        "peak memory": bytes_text(fullest_bytes(part)),
        "MFU": f"{mark}{told.mfu:.1%}",
    }
    return _Column("this plan", facts, told.step_time_s, told.breakdown_s)


def _others(plan: Plan, mark: str) -> list[_Column]:
    return [
        _Column(
            f"runner-up {index}",
            {
                "mesh": str(one.mesh),
                "micro-batch": f"{one.micro_batch} x {one.microbatches}",
                "schedule": _schedule(one.schedule, one.vpp),
                "ZeRO": _zero(one.zero, one.zero_shard),
                "recompute": _recompute(one.recompute),
                "peak memory": bytes_text(one.memory_peak_bytes),
                "MFU": f"{mark}{one.mfu:.1%}",
            },
            one.step_time_s,
            one.breakdown_s,
        )
        for index, one in enumerate(plan.runners_up, 1)
    ]


def _schedule(name: str, vpp: int) -> str:
    return f"{name}, {vpp} stages a rank" if vpp > 1 else name


def _zero(stage: int, shard: int) -> str:
    return f"{stage} over {shard} replicas" if shard else str(stage)


def _recompute(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) or "none"


def _bars(columns: Sequence[_Column], mark: str) -> Markup:
    """Each plan's step as one bar by cause."""
    longest = max(column.step_s for column in columns)
    causes = [key for key in columns[0].breakdown_s if any(column.breakdown_s.get(key) for column in columns)]
    rows: list[Child] = []
    for i, column in enumerate(columns):
        y = 4 + i * _ROW
        rows.append(
            tag("text", f"{column.name}: {column.facts['mesh']}", x=_LEFT - 10, y=y + 17, text_anchor="end")
        )
        x = _LEFT
        for cause in causes:
            wide = _WIDTH * column.breakdown_s.get(cause, 0.0) / longest
            rows.append(
                tag("rect", x=x, y=y + 4, width=wide, height=_ROW - 8, class_=f"cause-{_colour(cause)}")
            )
            x += wide
        rows.append(tag("text", seconds(column.step_s, mark), x=x + 6, y=y + 17, class_="value"))
    bottom = 4 + len(columns) * _ROW
    text = "; ".join(f"{column.name} {seconds(column.step_s, mark)}" for column in columns)
    axis = time_axis(longest, _LEFT, _WIDTH, bottom)
    drawn = picture(
        "runners", "Steps of this plan and its runners-up", text, _LEFT + _WIDTH + 90, bottom + 26, rows, axis
    )
    return tag("div", legend([_colour(cause) for cause in causes]), drawn)


_COLOURS = {
    "compute": "compute",
    "tp_communication": "tp",
    "zero_gather": "zero",
    "pipeline_bubble": "bubble",
}


def _colour(cause: str) -> str:
    return _COLOURS.get(cause, cause)


def _table(columns: Sequence[_Column], mark: str) -> Markup:
    first = columns[0]
    rows: list[list[Child]] = [
        ["step", *(seconds(column.step_s, mark) for column in columns)],
        ["slower by", *(_slower(column.step_s, first.step_s) for column in columns)],
    ]
    rows += [
        [name, *(_changed(column.facts[name], first.facts[name]) for column in columns)]
        for name in first.facts
    ]
    for cause in first.breakdown_s:
        cells = [column.breakdown_s.get(cause, 0.0) for column in columns]
        if any(cells):
            rows.append([words(cause), *(seconds(cell, mark) for cell in cells)])
    return table("Plans side by side", ["", *(column.name for column in columns)], rows)


def _slower(step_s: float, best_s: float) -> str:
    return f"{step_s / best_s - 1:+.1%}" if step_s != best_s else "-"


def _changed(text: str, first: str) -> Child:
    return tag("strong", text) if text != first else text
