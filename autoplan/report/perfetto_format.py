"""Trace events as Perfetto's own file: the records of :mod:`autoplan.report.trace` in, protobuf bytes out.

Only the few messages that are needed are encoded, by hand, so that writing a trace needs no library. Field
numbers are those of Perfetto's trace_packet.proto, track_event.proto and track_descriptor.proto (Apache-2.0);
the tests read the result back with the ``perfetto`` package.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_SEQUENCE = 1  # all packets come from one writer
_BEGIN, _END, _COUNTER = 1, 2, 4  # TrackEvent.Type


def perfetto_bytes(events: Sequence[Mapping[str, Any]]) -> bytes:
    """A whole trace file; slices of one stream must nest."""
    packets = [*_descriptors(events), *_slices(events), *_counters(events)]
    return b"".join(_message(1, packet) for packet in packets)


# ---- what is traced ---------------------------------------------------------------------------------


def _descriptors(events: Sequence[Mapping[str, Any]]) -> Iterator[bytes]:
    """Processes, their streams, and a counter for the memory of each."""
    for event in events:
        pid, tid, name = event["pid"], event["tid"], event.get("args", {}).get("name", "")
        if event["name"] == "process_name":
            process = _message(3, _number(1, pid + 1) + _text(6, name))
            yield _descriptor(_process(pid), process)
            unit = _message(8, _text(6, "GiB"))
            yield _descriptor(_counter(pid), _text(2, "memory") + _number(5, _process(pid)) + unit)
        elif event["name"] == "thread_name":
            yield _descriptor(_stream(pid, tid), _text(2, name) + _number(5, _process(pid)))


def _process(pid: int) -> int:
    return 1 + 1000 * (pid + 1)


def _counter(pid: int) -> int:
    return 2 + 1000 * (pid + 1)


def _stream(pid: int, tid: int) -> int:
    return 3 + tid + 1000 * (pid + 1)


def _descriptor(uuid: int, body: bytes) -> bytes:
    return _message(60, _number(1, uuid) + body) + _number(10, _SEQUENCE)


def _slices(events: Sequence[Mapping[str, Any]]) -> Iterator[bytes]:
    """Begin and end of every slice, stream by stream, an inner slice before its outer one ends."""
    flows = _flows(events)
    by_stream: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for event in events:
        if event["ph"] == "X":
            by_stream.setdefault((event["pid"], event["tid"]), []).append(event)
    for (pid, tid), slices in by_stream.items():
        track, open_until = _stream(pid, tid), list[int]()
        for one in sorted(slices, key=lambda one: (one["ts"], -one["dur"])):
            start, end = _nanoseconds(one["ts"]), _nanoseconds(one["ts"] + one["dur"])
            while open_until and open_until[-1] <= start:
                yield _packet(open_until.pop(), track, _END)
            yield _packet(start, track, _BEGIN, one["name"], flows.get((pid, tid, one["ts"], one["dur"]), []))
            open_until.append(end)
        while open_until:
            yield _packet(open_until.pop(), track, _END)


def _flows(events: Sequence[Mapping[str, Any]]) -> dict[tuple[int, int, float, float], list[int]]:
    """The hops that start or end in each slice: the outermost of the compute stream round their time."""
    numbers: dict[str, int] = {}
    ends: dict[int, list[tuple[float, int]]] = {}
    for event in events:
        if event["ph"] in "sf":
            number = numbers.setdefault(event["id"], len(numbers) + 1)
            ends.setdefault(event["pid"], []).append((event["ts"], number))
    blocks = {
        pid: sorted(
            (e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["pid"] == pid and e["tid"] == 0
        )
        for pid in ends
    }
    found: dict[tuple[int, int, float, float], list[int]] = {}
    for pid, joins in ends.items():
        outer = _outermost(blocks[pid])
        index = 0
        for time, number in sorted(joins):
            while index + 1 < len(outer) and outer[index + 1][0] <= time:
                index += 1
            found.setdefault((pid, 0, *outer[index]), []).append(number)
    return found


def _outermost(blocks: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Slices that lie in no other."""
    outer: list[tuple[float, float]] = []
    for start, duration in sorted(blocks, key=lambda block: (block[0], -block[1])):
        if not outer or start >= sum(outer[-1]) - 1e-6:
            outer.append((start, duration))
    return outer


def _counters(events: Sequence[Mapping[str, Any]]) -> Iterator[bytes]:
    for event in events:
        if event["ph"] == "C":
            (value,) = event["args"].values()
            body = _number(9, _COUNTER) + _number(11, _counter(event["pid"])) + _double(44, value)
            yield _timed(_nanoseconds(event["ts"]), body)


def _packet(time_ns: int, track: int, kind: int, name: str = "", flows: Sequence[int] = ()) -> bytes:
    body = _number(9, kind) + _number(11, track) + (_text(23, name) if name else b"")
    return _timed(time_ns, body + b"".join(_fixed(47, flow) for flow in flows))


def _timed(time_ns: int, track_event: bytes) -> bytes:
    return _number(8, time_ns) + _message(11, track_event) + _number(10, _SEQUENCE)


def _nanoseconds(microseconds: float) -> int:
    return round(microseconds * 1000)


# ---- protobuf: https://protobuf.dev/programming-guides/encoding --------------------------------------


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _message(field: int, body: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(body)) + body


def _text(field: int, text: str) -> bytes:
    return _message(field, text.encode())


def _double(field: int, value: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", value)


def _fixed(field: int, value: int) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<Q", value)
