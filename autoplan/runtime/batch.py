"""A global batch in, its micro-batches out, checked against the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autoplan.errors import BadInputError
from autoplan.runtime.prepare import RunProgram, UserInput


def named_batch(batch: Any) -> dict[str, Any]:
    """A batch as a dict: keywords of a mapping, positions ``"0"``, ``"1"``... of a tuple or tensor."""
    if isinstance(batch, torch.Tensor):
        batch = (batch,)
    if isinstance(batch, Mapping) or hasattr(batch, "keys"):
        return {str(key): batch[key] for key in batch.keys()}  # noqa: SIM118 - a mapping by its keys alone
    if isinstance(batch, Sequence):
        return {str(index): value for index, value in enumerate(batch)}
    raise BadInputError(f"Expected a batch as a dict or tuple of tensors, got {type(batch).__name__}.")


def tensors_of(batch: Any) -> dict[str, torch.Tensor]:
    """The tensors of a batch by keyword or position."""
    return {name: value for name, value in named_batch(batch).items() if isinstance(value, torch.Tensor)}


def split_batch(program: RunProgram, batch: Any) -> list[dict[str, torch.Tensor]]:
    """All micro-batches of a global batch, replica by replica: tensors by the input's placeholder.

    A tensor whose first dim is that of the capture times (dp x micro-batches) is split; one with
    exactly the captured shape is given whole to every micro-batch; anything else is refused.
    """
    part = program.part
    pieces = part.mesh.dp * part.microbatches
    given = named_batch(batch)
    _check_names(program, given)
    split = {item.name: _split(_given(given, item), item, pieces, program) for item in program.inputs}
    return [{name: tensors[index] for name, tensors in split.items()} for index in range(pieces)]


def to_device(
    piece: Mapping[str, torch.Tensor], program: RunProgram, device: torch.device
) -> dict[str, torch.Tensor]:
    """One micro-batch on the rank's device, its floating-point tensors in the dtype of the trace."""
    dtypes = {item.name: item.dtype for item in program.inputs}
    return {
        name: value.to(device=device, dtype=dtypes[name] if value.is_floating_point() else None)
        for name, value in piece.items()
    }


def _given(given: Mapping[str, Any], item: UserInput) -> torch.Tensor:
    value = given[item.keyword]
    if not isinstance(value, torch.Tensor):
        raise BadInputError(
            f"Expected a tensor for {item.keyword!r} of the batch, got {type(value).__name__}."
        )
    return value


def _check_names(program: RunProgram, given: Mapping[str, Any]) -> None:
    wanted = {item.keyword for item in program.inputs}
    missing = sorted(wanted - given.keys())
    if missing:
        raise BadInputError(
            f"The batch lacks {', '.join(missing)}: expected {', '.join(sorted(wanted))}, "
            f"got {', '.join(given)}."
        )


def _split(value: torch.Tensor, item: UserInput, pieces: int, program: RunProgram) -> Sequence[torch.Tensor]:
    shape, captured = tuple(value.shape), item.shape
    if captured and shape == (captured[0] * pieces, *captured[1:]):
        return [piece.contiguous() for piece in value.chunk(pieces)]  # as traced: slices have other strides
    if shape == captured:
        return [value.contiguous()] * pieces
    part = program.part
    wanted = (captured[0] * pieces, *captured[1:]) if captured else ()
    raise BadInputError(
        f"The batch does not match the plan: {item.keyword!r} should have shape {list(wanted)} (a global "
        f"batch of {part.micro_batch * pieces} = micro-batch {part.micro_batch} x {part.microbatches} "
        f"micro-batches x dp {part.mesh.dp}), got {list(shape)}.\nFeed global batches of that size, or "
        "search again with --global-batch for the size you have."
    )
