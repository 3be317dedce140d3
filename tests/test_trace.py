"""The step as a trace: what Perfetto and chrome://tracing read, slice by slice against the forecast.

Native files are read back with the classes of the ``perfetto`` package; its trace processor is a program that
is downloaded when it is first used, which a test must not.
"""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent
from plan_fixture import llama_plan

from autoplan.cli import main
from autoplan.errors import BadInputError
from autoplan.plan import Plan
from autoplan.report.timeline import timeline
from autoplan.report.trace import STREAMS, plan_trace, write_trace

PLAN = llama_plan(stages=4)
TRACE = plan_trace(PLAN)
EVENTS: list[dict[str, Any]] = TRACE["traceEvents"]
# What each phase of the Trace Event Format needs beside ph, name, pid and tid.
NEEDED = {
    "X": {"ts", "dur", "cat"},
    "C": {"ts", "args"},
    "M": {"args"},
    "s": {"ts", "id"},
    "f": {"ts", "id", "bp"},
}
META = {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}


def slices(phase: str = "X") -> dict[tuple[int, int], list[dict[str, Any]]]:
    found: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in EVENTS:
        if event["ph"] == phase:
            found[event["pid"], event["tid"]].append(event)
    return found


def native(path: Path) -> Trace:
    write_trace(PLAN, path)
    trace = Trace()
    trace.ParseFromString(path.read_bytes())
    return trace


def test_every_event_is_in_the_format() -> None:
    """A viewer drops an event without a field that its phase needs, and says nothing."""
    assert set(TRACE) == {"traceEvents", "displayTimeUnit", "otherData"}
    for event in EVENTS:
        assert {"ph", "name", "pid", "tid"} | NEEDED[event["ph"]] <= set(event)
        assert all(type(event[key]) is int for key in ("pid", "tid"))
        assert event.get("ts", 0.0) >= 0 and event.get("dur", 0.0) >= 0
        assert event["ph"] != "M" or event["name"] in META
    assert json.loads(json.dumps(TRACE)) == TRACE


def test_slices_of_a_stream_nest_and_tell_the_forecast() -> None:
    """Slices that overlap without nesting are drawn anywhere; seconds that are not the plan's mislead."""
    line = timeline(PLAN, PLAN.parts[0])
    assert line is not None
    for events in slices().values():
        open_until: list[float] = []
        for one in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
            while open_until and open_until[-1] <= one["ts"] + 1e-3:
                open_until.pop()
            assert not open_until or one["ts"] + one["dur"] <= open_until[-1] + 1e-3
            open_until.append(one["ts"] + one["dur"])
    for track in line.tracks:
        seconds: dict[str, float] = defaultdict(float)
        for (pid, _), events in slices().items():
            for one in events if pid == track.rank else ():
                seconds[one["name"]] += one["dur"] / 1e6
        spent = line.spent_s(track)
        for cause in ("compute", "tp", "recompute", "optimizer"):
            assert seconds[cause] == pytest.approx(spent[cause], abs=1e-6), cause
        assert seconds["gradient sync"] == pytest.approx(spent["gradient_sync"], abs=1e-6)


def test_a_rank_is_a_process_and_a_stream_a_thread() -> None:
    """Communication drawn among the computation."""
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in EVENTS if e["name"] == "thread_name"}
    processes = {e["pid"]: e["args"]["name"] for e in EVENTS if e["name"] == "process_name"}
    assert processes == {s: f"model stage {s}: ranks {32 * s}-{32 * s + 31}" for s in range(4)}
    for place, events in slices().items():
        kinds = {one["name"] for one in events} & {cause.replace("_", " ") for cause in STREAMS}
        assert (names[place] == "compute" and not kinds) or {STREAMS[k.replace(" ", "_")] for k in kinds} == {
            names[place]
        }


def test_hops_join_blocks() -> None:
    """An arrow that starts in no slice is not drawn; a gradient that travelled forwards."""
    starts = {e["id"]: e for events in slices("s").values() for e in events}
    ends = {e["id"]: e for events in slices("f").values() for e in events}
    m, stages = PLAN.parts[0].microbatches, len(PLAN.parts[0].stages)
    assert set(starts) == set(ends) and len(starts) == 2 * m * (stages - 1)
    blocks = slices()
    for number, start in starts.items():
        end = ends[number]
        assert end["pid"] - start["pid"] == (1 if start["name"] == "activations" else -1)
        assert end["ts"] >= start["ts"]
        for one in (start, end):
            assert any(b["ts"] <= one["ts"] <= b["ts"] + b["dur"] for b in blocks[one["pid"], 0])


def test_memory_counter_reaches_the_peak() -> None:
    """A counter in bytes under a name that says GiB."""
    for s, stage in enumerate(PLAN.parts[0].stages):
        assert stage.prediction is not None
        values = [e["args"]["GiB"] for e in EVENTS if e["ph"] == "C" and e["pid"] == s]
        assert max(values) == pytest.approx(stage.prediction.memory_peak_bytes / 2**30, abs=1e-3)


def test_perfettos_own_file_says_the_same(tmp_path: Path) -> None:
    """Read back with Perfetto's own classes: the same tracks, slices, flows and counters as the JSON."""
    trace = native(tmp_path / "trace.pftrace")
    trace.DiscardUnknownFields()
    assert trace.ByteSize() == len(
        (tmp_path / "trace.pftrace").read_bytes()
    )  # nothing unknown, nothing twice
    tracks = {
        p.track_descriptor.uuid: p.track_descriptor for p in trace.packet if p.HasField("track_descriptor")
    }
    events = [packet for packet in trace.packet if packet.HasField("track_event")]
    assert all(packet.track_event.track_uuid in tracks for packet in events)
    assert all(not t.parent_uuid or t.parent_uuid in tracks for t in tracks.values())
    begun = [p for p in events if p.track_event.type == TrackEvent.TYPE_SLICE_BEGIN]
    ended = [p for p in events if p.track_event.type == TrackEvent.TYPE_SLICE_END]
    whole = [e for e in EVENTS if e["ph"] == "X"]
    assert len(begun) == len(ended) == len(whole)
    stream = {
        (tracks[t.parent_uuid].process.pid - 1, t.name): uuid for uuid, t in tracks.items() if t.parent_uuid
    }
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in EVENTS if e["name"] == "thread_name"}
    expected = sorted(
        (stream[e["pid"], threads[e["pid"], e["tid"]]], round(e["ts"] * 1000), e["name"]) for e in whole
    )
    assert sorted((p.track_event.track_uuid, p.timestamp, p.track_event.name) for p in begun) == expected
    flows = [flow for p in begun for flow in p.track_event.flow_ids]
    assert {flows.count(flow) for flow in flows} == {2}
    counted = [
        p.track_event.double_counter_value for p in events if p.track_event.type == TrackEvent.TYPE_COUNTER
    ]
    assert counted == [e["args"]["GiB"] for e in EVENTS if e["ph"] == "C"]


def test_every_slice_ends_what_it_began(tmp_path: Path) -> None:
    """An end before its begin, which Perfetto reports as an import error."""
    depth: dict[int, int] = defaultdict(int)
    last: dict[int, int] = defaultdict(int)
    for packet in native(tmp_path / "trace.perfetto-trace").packet:
        event = packet.track_event
        if event.type in (TrackEvent.TYPE_SLICE_BEGIN, TrackEvent.TYPE_SLICE_END):
            depth[event.track_uuid] += 1 if event.type == TrackEvent.TYPE_SLICE_BEGIN else -1
            assert depth[event.track_uuid] >= 0 and packet.timestamp >= last[event.track_uuid]
            last[event.track_uuid] = packet.timestamp
    assert set(depth.values()) == {0}


def without_forecast() -> Plan:
    part = PLAN.parts[0]
    stages = tuple(dataclasses.replace(stage, prediction=None) for stage in part.stages)
    return dataclasses.replace(PLAN, parts=(dataclasses.replace(part, stages=stages),))


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A traceback where there is nothing to draw or nowhere to write."""
    plan, target = tmp_path / "plan.yaml", tmp_path / "trace.json"
    PLAN.save(plan)
    assert main(["show", str(plan), "--trace", str(target), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["drawn"] == [str(target)]
    assert json.loads(target.read_text()) == TRACE
    assert main(["show", str(plan), "--trace", str(tmp_path / "none" / "t.json")]) == 2
    with pytest.raises(BadInputError, match="no forecast"):
        plan_trace(without_forecast())
