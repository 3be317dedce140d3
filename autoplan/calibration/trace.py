"""A trace of the PyTorch profiler in, what its products, copies and collectives took out.

The format is the Chrome trace that ``torch.profiler`` exports (``export_chrome_trace``; kineto's
``output_json.cpp``): complete events (``ph`` X) with ``dur`` in microseconds; ``cat`` is ``cpu_op`` for
operators, whose ``args`` hold ``Input Dims`` and ``Input type`` where ``record_shapes=True``, and ``kernel``
for what ran on the device, joined to its operator by ``External id``. NCCL kernels carry ``Collective name``,
``In msg nelems``, ``Out msg nelems``, ``Group size`` and ``dtype``. On a CPU an operator is its own kernel.
"""

from __future__ import annotations

import gzip
import json
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autoplan.errors import BadInputError

# Types as the profiler writes them -> (name in profiles, bytes).
TYPES: Mapping[str, tuple[str, int]] = {
    "double": ("fp64", 8),
    "float": ("fp32", 4),
    "c10::BFloat16": ("bf16", 2),
    "c10::Half": ("fp16", 2),
    "Double": ("fp64", 8),
    "Float": ("fp32", 4),
    "BFloat16": ("bf16", 2),
    "Half": ("fp16", 2),
}
# Operators that multiply matrices -> the positions of both in their inputs.
PRODUCTS: Mapping[str, tuple[int, int]] = {"aten::mm": (0, 1), "aten::addmm": (1, 2), "aten::bmm": (0, 1)}
# Operators that only move what they read and write: tensors read -> each is as large as what is written.
MOVES: Mapping[str, int] = {
    **dict.fromkeys(("aten::add", "aten::add_", "aten::mul", "aten::mul_", "aten::sub", "aten::div"), 2),
    **dict.fromkeys(("aten::copy_", "aten::clone", "aten::neg", "aten::relu", "aten::gelu", "aten::silu"), 1),
}
COLLECTIVES: Mapping[str, str] = {
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all": "all_to_all",
    "all_to_allv": "all_to_all",
    "alltoall_base": "all_to_all",
}


@dataclass
class TraceTimes:
    """Seconds by what was done: products by (dtype, batch, m, n, k), moves by bytes, collectives by
    (kind, ranks, bytes); every list holds all occurrences."""

    products: dict[tuple[str, int, int, int, int], list[float]] = field(
        default_factory=lambda: defaultdict[tuple[str, int, int, int, int], list[float]](list)
    )
    moves: dict[int, list[float]] = field(default_factory=lambda: defaultdict[int, list[float]](list))
    collectives: dict[tuple[str, int, int], list[float]] = field(
        default_factory=lambda: defaultdict[tuple[str, int, int], list[float]](list)
    )


def read_trace(path: Path) -> TraceTimes:
    """The times in a trace (``.json`` or ``.json.gz``).

    Raises BadInputError where it is none, or has no shapes.
    """
    events = [event for event in _events(path) if event.get("ph") == "X"]
    found = TraceTimes()
    kernels: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "kernel":
            _note_collective(found, event)
            kernels[event.get("args", {}).get("External id")].append(event)
    on_device = bool(kernels)
    for event in events:
        args = event.get("args", {})
        if event.get("cat") != "cpu_op" or "Input Dims" not in args:
            continue
        if not on_device:
            _note_collective(found, event)
        ran = kernels.get(args.get("External id"), []) if on_device else [event]
        seconds = sum(float(one["dur"]) for one in ran) * 1e-6
        if seconds > 0:
            _note_operator(found, event["name"], args, seconds)
    if not (found.products or found.moves or found.collectives):
        raise BadInputError(
            f"{path} has no operator with the shapes of its inputs and no collective: profile with "
            "torch.profiler.profile(record_shapes=True), a few steps after the first ones."
        )
    return found


def _events(path: Path) -> list[dict[str, Any]]:
    try:
        raw = path.read_bytes()
        text = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
        trace = json.loads(text)
    except OSError as error:
        raise BadInputError(f"cannot read the trace {path}: {error.strerror or error}.") from None
    except (ValueError, EOFError) as error:
        raise BadInputError(f"{path} is no JSON trace: {error}.") from None
    events = trace.get("traceEvents") if isinstance(trace, dict) else trace
    if not isinstance(events, list):
        raise BadInputError(f"{path} has no `traceEvents`: expected what export_chrome_trace wrote.")
    return events


def _note_operator(found: TraceTimes, name: str, args: Mapping[str, Any], seconds: float) -> None:
    dims, types = args["Input Dims"], args.get("Input type", [])
    if name in PRODUCTS:
        one, other = PRODUCTS[name]
        if len(dims) > other and types[one : one + 1] and types[one] in TYPES:
            left, right = dims[one], dims[other]
            if len(left) == len(right) and len(left) in (2, 3):
                batch = left[0] if len(left) == 3 else 1
                key = (TYPES[types[one]][0], batch, left[-2], right[-1], left[-1])
                if all(size > 0 for size in key[1:]):
                    found.products[key].append(seconds)
    elif name in MOVES and dims and types and types[0] in TYPES:
        read = slice(1, MOVES[name] + (name == "aten::copy_"))  # what is copied comes second
        alike = all(other == dims[0] for other in dims[read]) and set(types[read]) <= {types[0]}
        moved = math.prod(dims[0]) * TYPES[types[0]][1] * (MOVES[name] + 1)
        if alike and moved:
            found.moves[moved].append(seconds)


def _note_collective(found: TraceTimes, event: Mapping[str, Any]) -> None:
    args = event.get("args", {})
    kind = COLLECTIVES.get(str(args.get("Collective name", "")))
    kind_type = TYPES.get(str(args.get("dtype", "")))
    ranks, dur = int(args.get("Group size", 0) or 0), float(event.get("dur", 0))
    if kind is None or kind_type is None or ranks < 2 or dur <= 0:
        return
    elements = max(int(args.get("In msg nelems", 0)), int(args.get("Out msg nelems", 0)))
    if elements:
        found.collectives[kind, ranks, elements * kind_type[1]].append(dur * 1e-6)
