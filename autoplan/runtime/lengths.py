"""Batches of other sizes in, a program for each out: several graphs, one plan, one set of parameters.

A plan's code is written for one micro-batch and one length. For every further size the model is traced again,
cut as the plan says (sections that count tokens take the new length), type-checked, and run with the
parameters of the first. All micro-batches of a step have one size, on every stage.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autoplan.capture import capture_module
from autoplan.errors import BadInputError, BadPlanError
from autoplan.plan import AxisLayout, Layout, Plan
from autoplan.regions import find_regions
from autoplan.runtime.batch import named_batch, tensors_of
from autoplan.runtime.prepare import RunProgram, first_samples, low_precision, prepare
from autoplan.runtime.verify import verify_capture


def further_programs(
    model: nn.Module,
    plan: Plan,
    first: RunProgram,
    batches: Sequence[Any],
    loss_fn: Callable[[Any, Any], Any] | None = None,
) -> tuple[RunProgram, ...]:
    """A program for every global batch of ``batches`` whose sizes are none's before.

    Raises BadInputError for a batch that the mesh does not divide, BadPlanError where the plan's cuts do not
    fit its sizes.
    """
    if batches and first.part.zero > 1 and first.part.mesh.replicas > 1:
        raise BadPlanError(
            f"Expected a plan of ZeRO 0 or 1 for batches of several sizes, got ZeRO {first.part.zero}, whose "
            "parameters belong to the code of one size. Search again: autoplan search MODEL.py --pin zero=1"
        )
    programs = [first]
    for batch in batches:
        if not any(serves(program, batch) for program in programs):
            programs.append(_program(model, plan, first, batch, loss_fn))
    return tuple(programs[1:])


def serves(program: RunProgram, batch: Any) -> bool:
    """Whether a global batch has the sizes that a program was written for."""
    given, pieces = tensors_of(batch), program.part.mesh.dp * program.part.microbatches
    for item in program.inputs:
        shape = tuple(given[item.keyword].shape) if item.keyword in given else ()
        whole = (item.shape[0] * pieces, *item.shape[1:]) if item.shape else ()
        if shape not in (whole, item.shape):
            return False
    return True


def serving(programs: Sequence[RunProgram], batch: Any) -> int:
    """Which program a global batch is for; :class:`BadInputError` names the sizes that are served.

    Against one program alone the batch is checked where it is split.
    """
    found = next((i for i, program in enumerate(programs) if serves(program, batch)), None)
    if found is not None or len(programs) == 1:
        return found or 0
    given = {name: list(value.shape) for name, value in tensors_of(batch).items()}
    served = "; ".join(_sizes_text(program) for program in programs)
    raise BadInputError(
        f"No compiled size fits this batch ({_named(given)}). Served are global batches of {served}.\nPad "
        "the batch to one of them, or give parallelize() one of this size among its `batches`."
    )


def _sizes_text(program: RunProgram) -> str:
    pieces = program.part.mesh.dp * program.part.microbatches
    return _named({i.keyword: [i.shape[0] * pieces, *i.shape[1:]] for i in program.inputs if i.shape})


def _named(shapes: Mapping[str, Sequence[int]]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())


def _program(
    model: nn.Module, plan: Plan, first: RunProgram, batch: Any, loss_fn: Callable[[Any, Any], Any] | None
) -> RunProgram:
    micro_batch = _micro_batch(first, batch)
    inputs = first_samples(_as_given(batch), micro_batch)
    capture = capture_module(
        model,
        inputs,
        name=plan.model.name,
        dtype=plan.workload.dtype if low_precision(plan) else None,
        loss_fn=loss_fn,
        opaque=plan.workload.opaque,
    )
    changed = _changed_lengths(first, tensors_of(inputs))
    layouts = {name: _resized(layout, changed) for name, layout in plan.layouts.items()}
    own = replace(plan, parts=(replace(first.part, micro_batch=micro_batch),), layouts=layouts)
    regions = find_regions(capture)
    checked = verify_capture(capture, regions, own)
    sizes = _named({name: list(value.shape) for name, value in tensors_of(batch).items()})
    if checked.faults:
        raise BadPlanError(
            f"The plan's cuts do not fit a batch of {sizes}: {checked.faults[0]}.\nPad it to another size, "
            "or search for this one: autoplan search MODEL.py --sequence N"
        )
    program = replace(prepare(capture, regions, own), low_precision=first.low_precision)
    if program.homes != first.homes:
        raise BadPlanError(
            f"The model has other parameters, or uses them elsewhere, for a batch of {sizes}: one set cannot "
            "serve both. Pad the batch to the size that the plan was made for."
        )
    return program


def _as_given(batch: Any) -> Any:
    return named_batch(batch) if isinstance(batch, Mapping) or hasattr(batch, "keys") else batch


def _micro_batch(first: RunProgram, batch: Any) -> int:
    """Samples of a micro-batch of this batch: its first input's share."""
    part, given = first.part, tensors_of(batch)
    item = next((i for i in first.inputs if i.shape and i.keyword in given), None)
    if item is None:
        raise BadInputError(f"The batch has none of {', '.join(i.keyword for i in first.inputs)}.")
    pieces, rows = part.mesh.dp * part.microbatches, given[item.keyword].shape[0]
    unit = pieces * item.shape[0] // part.micro_batch
    if rows % unit:
        raise BadInputError(
            f"Expected {item.keyword!r} with a multiple of {unit} rows ({part.microbatches} micro-batches on "
            f"dp {part.mesh.dp}), got {rows}."
        )
    return rows // unit


def _changed_lengths(first: RunProgram, inputs: Mapping[str, torch.Tensor]) -> dict[int, int]:
    """Sizes of the first program's inputs, past dim 0, that are others here."""
    pairs = [
        pair
        for item in first.inputs
        if item.keyword in inputs and len(item.shape) == inputs[item.keyword].dim()
        for pair in zip(item.shape[1:], inputs[item.keyword].shape[1:])
    ]
    return {before: int(now) for before, now in pairs if before != now}


def _resized(layout: Layout, changed: Mapping[int, int]) -> Layout:
    """Sections that count tokens, in the new lengths."""

    def text(state: str) -> str:
        return re.sub(r"(?<=[:+])\d+(?=[+)])", lambda m: str(changed.get(int(m[0]), int(m[0]))), state)

    def texts(states: Mapping[str, str]) -> dict[str, str]:
        return {name: text(state) for name, state in states.items()}

    for axis, placed in layout.axes.items():
        own = AxisLayout(
            placed.size, placed.parameters, texts(placed.rules), texts(placed.inputs), texts(placed.outputs)
        )
        layout = layout.replace_axis(axis, own)
    return layout
