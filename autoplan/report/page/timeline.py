"""The pipeline timeline: simulated tracks in, a zoomable chart of ranks over time and its table out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter

from autoplan.plan import Plan
from autoplan.report.markup import Markup, raw, tag
from autoplan.report.page.charts import (
    CAUSES,
    legend,
    picture,
    rect_path,
    seconds,
    section,
    table,
    ticks,
    time_axis,
    words,
)
from autoplan.report.timeline import Timeline, Track, direction
from autoplan_cost_models.schedule import Event

LEFT, WIDTH, TOP = 128.0, 960.0, 8.0
MOST_BOXES = 24_000  # beyond it boxes closer than a quarter of a pixel are drawn as one
_MERGED_BELOW = 0.25
_UNITS = 1_000_000  # times in the data for the script are in millionths of the step


def timeline_section(plan: Plan, lines: Sequence[Timeline], mark: str) -> Markup:
    """One chart a part; text for people without the picture is the table below it."""
    inside: list[Markup] = []
    for index, line in enumerate(lines):
        inside += _chart(f"timeline-{index}", line, mark, plan)
    if not inside:
        inside = [tag("p", "The plan carries no forecast, so there is nothing to simulate.")]
    return section("timeline", "Pipeline timeline", *inside)


def _chart(name: str, line: Timeline, mark: str, plan: Plan) -> Iterator[Markup]:
    part = line.part
    yield tag(
        "p",
        "Each row is one rank of the pipeline with all its replicas and tensor-parallel peers, which do "
        f"the same at the same time: {part.schedule}, {_count(part.microbatches)} a step. Inside a "
        "block the colours show what its seconds go to; in truth they alternate region by region. Drag to "
        "move, Ctrl and the wheel or the buttons to zoom, arrow keys to walk from block to block.",
    )
    yield legend(_causes(line))
    height = _row_height(line)
    bottom = TOP + height * len(line.tracks)
    rows = [_row(track, line, TOP + index * height, height) for index, track in enumerate(line.tracks)]
    clip = tag("clipPath", tag("rect", x=LEFT, y=0.0, width=WIDTH, height=bottom), id=f"{name}-clip")
    drawn = picture(
        name,
        f"Pipeline timeline of {part.name}",
        f"{len(line.tracks)} ranks over {seconds(line.step_s, mark)}; the table below has the numbers.",
        LEFT + WIDTH + 24,
        bottom + 26,
        tag("defs", clip),
        [tag("g", _row_label(t, TOP + i * height, height), class_="rows") for i, t in enumerate(line.tracks)],
        tag("g", tag("g", rows, class_="scaled"), clip_path=f"url(#{name}-clip)"),
        tag("g", class_="labels", clip_path=f"url(#{name}-clip)"),
        time_axis(line.step_s, LEFT, WIDTH, bottom),
    )
    data = raw("script", json.dumps(_data(line), separators=(",", ":")), type="application/json")
    readout = tag("p", class_="readout", aria_live="polite")
    controls = {"tabindex": "0", "role": "group", "data_zoom": "x"}
    yield tag("div", drawn, readout, data, aria_label=f"Timeline of {part.name}", class_="zoom", **controls)
    yield _table(line, mark)


def _count(microbatches: int) -> str:
    return f"{microbatches} micro-batch{'es' * (microbatches > 1)}"


def _row_height(line: Timeline) -> float:
    return 32.0 if len(line.tracks) <= 16 else 16.0


def _causes(line: Timeline) -> list[str]:
    """Legend entries in the order of the table of causes."""
    found = {cause for track in line.tracks for cause, spent in line.spent_s(track).items() if spent > 0}
    found |= {direction(event) for track in line.tracks for event in track.events}
    return [cause for cause in CAUSES if cause in found] + sorted(found - set(CAUSES) - {"compute"})


def _row_label(track: Track, y: float, height: float) -> Markup:
    stages = ", ".join(map(str, track.stages))
    text = f"stage{'s' * (len(track.stages) > 1)} {stages}"
    shown = text if len(text) <= 18 else f"{len(track.stages)} stages"
    middle = y + height / 2
    lines = [tag("text", shown, x=LEFT - 8, y=middle + (-2 if height > 20 else 4), text_anchor="end")]
    if height > 20:
        lines.append(tag("text", track.label, x=LEFT - 8, y=middle + 11, text_anchor="end", class_="small"))
    return tag("g", lines)


def _row(track: Track, line: Timeline, y: float, height: float) -> Markup:
    """The idle ground, then one path a cause."""
    scale = WIDTH / line.step_s
    idle = tag("rect", x=LEFT, y=y + 3, width=WIDTH, height=height - 6, class_="cause-bubble")
    boxes: dict[str, list[tuple[float, float]]] = {}
    for cause, start_s, end_s in pieces(track, line):
        boxes.setdefault(cause, []).append((LEFT + start_s * scale, (end_s - start_s) * scale))
    many = sum(len(one) for one in boxes.values()) * len(line.tracks) > MOST_BOXES
    paths = [
        tag("path", d=rect_path(_merged(one) if many else one, y + 3, height - 6), class_=f"cause-{cause}")
        for cause, one in boxes.items()
    ]
    return tag("g", idle, paths, data_rank=track.rank)


def pieces(track: Track, line: Timeline) -> list[tuple[str, float, float]]:
    """What a rank does, in order: (cause, start, end); compute is named after its direction."""
    found = [(one.kind, one.start_s, one.end_s) for one in track.once]
    for event in track.events:
        start_s = event.start_s
        parts = line.parts_s(event) or {"compute": event.end_s - event.start_s}
        for cause, part_s in parts.items():
            found.append((direction(event) if cause == "compute" else cause, start_s, start_s + part_s))
            start_s += part_s
    return sorted(found, key=itemgetter(1))


def _merged(boxes: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Boxes with hardly a gap between them as one."""
    merged: list[tuple[float, float]] = []
    for x, width in boxes:
        if merged and x - sum(merged[-1]) < _MERGED_BELOW:
            merged[-1] = (merged[-1][0], x + width - merged[-1][0])
        else:
            merged.append((x, width))
    return merged


def _data(line: Timeline) -> dict[str, object]:
    """What the script needs to say which block is under the pointer, small: times in millionths of the step,
    each start as the gap after the block before it."""
    return {
        "step_s": line.step_s,
        "left": LEFT,
        "width": WIDTH,
        "top": TOP,
        "row": _row_height(line),
        "ticks": len(ticks(line.step_s)),
        "tracks": [_track_data(track, line) for track in line.tracks],
    }


def _track_data(track: Track, line: Timeline) -> dict[str, object]:
    unit = line.step_s / _UNITS
    kinds = sorted({(event.kind, event.stage) for event in track.events}, key=str)
    number = {kind: index for index, kind in enumerate(kinds)}
    gaps: list[int] = []
    clock = 0.0
    for event in track.events:
        gaps.append(round((event.start_s - clock) / unit))
        clock = event.end_s
    first = {key: event for event in reversed(track.events) for key in [(event.kind, event.stage)]}
    return {
        "name": track.label,
        "kinds": [_kind_data(first[kind], line, unit) for kind in kinds],
        "k": [number[event.kind, event.stage] for event in track.events],
        "m": [event.microbatch for event in track.events],
        "g": gaps,
        "once": [[words(one.kind), round(one.start_s / unit), round(one.end_s / unit)] for one in track.once],
    }


def _kind_data(event: Event, line: Timeline, unit: float) -> list[object]:
    """[what, stage, length in units, [[cause, seconds], ...]]."""
    parts = [[words(cause), seconds(part_s)] for cause, part_s in line.parts_s(event).items()]
    return [words(event.kind), event.stage, round((event.end_s - event.start_s) / unit), parts]


def _table(line: Timeline, mark: str) -> Markup:
    """Seconds of the step by rank and cause: what the picture shows."""
    spent = [line.spent_s(track) for track in line.tracks]
    causes = [cause for cause in spent[0] if any(one.get(cause, 0.0) > 0 for one in spent)]
    causes = list(dict.fromkeys([*causes, *(c for one in spent for c, s in one.items() if s > 0)]))
    causes = [cause for cause in causes if cause != "bubble"] + ["bubble"]
    rows = [
        [
            f"stage {', '.join(map(str, track.stages))}",
            tag("span", track.label, class_="n"),
            *(seconds(one.get(cause, 0.0), mark) for cause in causes),
            f"{one['bubble'] / line.step_s:.1%}",
        ]
        for track, one in zip(line.tracks, spent)
    ]
    heads = ["pipeline rank", "devices", *(words(cause) for cause in causes), "waits"]
    return table(f"Seconds of one step by rank, {line.part.name}", heads, rows, numbers_from=2)
