"""The step as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing: simulated timelines in, JSON out.

The Trace Event Format: a process is one rank of the pipeline with the devices that do the same, a thread one
of its streams (compute, and a stream an axis for communication), a slice one block, a counter its memory,
an arrow a hop between stages. Times are microseconds.
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autoplan.errors import BadInputError
from autoplan.output_files import write_file
from autoplan.plan import Plan
from autoplan.plan_table import heading
from autoplan.report.memory_curve import memory_curve
from autoplan.report.perfetto_format import perfetto_bytes
from autoplan.report.timeline import Timeline, Track, timeline
from autoplan_cost_models.schedule import Event

NATIVE = (".pftrace", ".perfetto-trace")
COMPUTE = "compute"
# The stream that each cause of a block's seconds runs on; what is not here computes.
STREAMS = {
    "tp": "tp communication",
    "cp": "cp communication",
    "ep": "ep communication",
    "zero": "ZeRO communication",
    "weight_gather": "ZeRO communication",
    "gradient_sync": "gradient communication",
    "tied_sync": "gradient communication",
}
_STREAM_IDS = {name: i for i, name in enumerate(dict.fromkeys((COMPUTE, *STREAMS.values())))}
_COLOURS = {  # names that chrome://tracing knows; Perfetto colours by name
    "forward": "thread_state_running",
    "backward": "rail_response",
    "backward_input": "rail_response",
    "recompute": "rail_animation",
}


def write_trace(plan: Plan, path: str | Path) -> None:
    """Write the trace: Perfetto's own format for a name in ``NATIVE``, else JSON, which both viewers read.

    BadInputError where it cannot be written or the plan has no forecast to simulate.
    """
    found = plan_trace(plan)
    if Path(path).suffix in NATIVE:
        content = perfetto_bytes(found["traceEvents"])
    else:
        content = json.dumps(found, separators=(",", ":")).encode()
    write_file(path, content)


def plan_trace(plan: Plan) -> dict[str, Any]:
    """The trace as one JSON object; ranks that do the same at the same time are one process."""
    lines = [line for part in plan.parts if (line := timeline(plan, part)) is not None]
    if not lines:
        raise BadInputError("the plan carries no forecast to draw a trace of: search again to make one.")
    events: list[dict[str, Any]] = []
    first = 0
    for line in lines:
        for track in line.tracks:
            events += _process(first + track.rank, track, line)
        events += _hops(first, line)
        first += len(line.tracks)
    about = {"plan": heading(plan), "step_s": lines[0].step_s, "made by": "autoplan"}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _process(pid: int, track: Track, line: Timeline) -> Iterator[dict[str, Any]]:
    """A rank: its names, its slices stream by stream, its memory."""
    stages = ", ".join(map(str, track.stages))
    several = len(track.stages) > 1
    name = f"{line.part.name} stage{'s' * several} {stages}: {track.label}"
    yield _named("process_name", pid, 0, name=name)
    yield _named("process_sort_index", pid, 0, sort_index=pid)
    slices = list(_slices(pid, track, line))
    for tid in sorted({one["tid"] for one in slices}):
        yield _named("thread_name", pid, tid, name=list(_STREAM_IDS)[tid])
        yield _named("thread_sort_index", pid, tid, sort_index=tid)
    yield from slices
    for time_s, amount in memory_curve(line, track).points:
        yield _event("C", "memory", pid, 0, time_s, args={"GiB": round(amount / 2**30, 4)})


def _slices(pid: int, track: Track, line: Timeline) -> Iterator[dict[str, Any]]:
    """A block is a slice of the compute stream; what it waits for is a slice of the stream it waits on."""
    for event in track.events:
        about = {"stage": event.stage, "micro-batch": event.microbatch}
        yield _slice(
            pid, COMPUTE, f"{event.kind} {event.microbatch}", event.start_s, event.end_s, about, event.kind
        )
        start_s = event.start_s
        for cause, part_s in line.parts_s(event).items():
            end_s = min(start_s + part_s, event.end_s)  # rounding must not break the nesting
            stream = STREAMS.get(cause, COMPUTE)
            yield _slice(pid, stream, cause, start_s, end_s, about, cause)
            start_s = end_s
    for one in track.once:
        stream = STREAMS.get(one.kind, COMPUTE)
        yield _slice(pid, stream, one.kind.replace("_", " "), one.start_s, one.end_s, {}, one.kind)


def _slice(
    pid: int, stream: str, name: str, start_s: float, end_s: float, about: dict[str, Any], kind: str
) -> dict[str, Any]:
    more = {"cname": _COLOURS[kind]} if kind in _COLOURS else {}
    duration = {"dur": _microseconds(end_s) - _microseconds(start_s)}
    return _event("X", name, pid, _STREAM_IDS[stream], start_s, args=about, **duration, **more)


def _hops(first: int, line: Timeline) -> Iterator[dict[str, Any]]:
    """Arrows: a forward's output to the next stage, a backward's gradient to the one before."""
    blocks = {(e.kind, e.stage, e.microbatch): e for track in line.tracks for e in track.events}
    number = 0
    for (kind, stage, microbatch), event in blocks.items():
        onwards = {"forward": 1, "backward": -1, "backward_input": -1}.get(kind, 0)
        target = blocks.get((kind, stage + onwards, microbatch)) if onwards else None
        if target is not None:
            number += 1
            yield from _arrow(f"{first}.{number}", kind, event, target, first, line.part.mesh.pp)


def _arrow(
    flow: str, kind: str, source: Event, target: Event, first: int, ranks: int
) -> Iterator[dict[str, Any]]:
    name = "activations" if kind == "forward" else "gradients"
    ends = (("s", source, source.end_s, {}), ("f", target, target.start_s, {"bp": "e"}))
    for phase, event, time_s, more in ends:
        pid = first + event.stage % ranks
        # Inside the slices that it joins, or a viewer finds nothing to tie it to.
        inside_s = time_s - 1e-3 * (event.end_s - event.start_s) if phase == "s" else time_s
        yield _event(phase, name, pid, 0, inside_s, id=flow, cat="hop", **more)


def _event(phase: str, name: str, pid: int, tid: int, time_s: float, /, **more: Any) -> dict[str, Any]:
    return {
        "ph": phase,
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": _microseconds(time_s),
        "cat": "plan",
        **more,
    }


def _named(what: str, pid: int, tid: int, /, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def _microseconds(time_s: float) -> float:
    return round(time_s * 1e6, 3)
