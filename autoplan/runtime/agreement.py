"""What each rank holds before training in, an error where ranks differ in what must be equal out.

Ranks that build other weights or feed other batches train wrongly without a word: a script without a seed
does both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist

from autoplan.errors import BadInputError

SAMPLED = 4096  # elements of each tensor that are looked at


def require_equal(tensors: Mapping[str, torch.Tensor], what: str, remedy: str, device: torch.device) -> None:
    """Raise :class:`BadInputError` on every rank if a tensor differs between ranks (*collective*)."""
    if dist.get_world_size() == 1 or not tensors:
        return
    digests = torch.stack([_digest(tensor) for tensor in tensors.values()])
    bounds = torch.cat([digests, -digests]).to(device=device, dtype=torch.float32)
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
    largest, smallest = bounds[: len(digests)], -bounds[len(digests) :]
    differs = _first(name for name, one, other in zip(tensors, largest, smallest) if one != other)
    if differs:
        raise BadInputError(
            f"Expected the same {what} on every rank, but {differs} differs between them.\n{remedy}"
        )


def _digest(tensor: torch.Tensor) -> torch.Tensor:
    """A number that changes with any of the first elements, or the shape."""
    values = tensor.detach().flatten()[:SAMPLED].to("cpu", torch.float64).nan_to_num()
    weights = torch.arange(1, values.numel() + 1, dtype=torch.float64).sin()
    return (values * weights).sum() + sum(size * (i + 1) for i, size in enumerate(tensor.shape))


def _first(names: Iterable[str]) -> str:
    return next(iter(names), "")
