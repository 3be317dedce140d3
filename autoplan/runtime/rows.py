"""Shards of a tensor in, the rows of one buffer out: how shards travel in a reduce-scatter or all-gather.

A buffer is [shards, row length]; each row holds the pieces of one shard, padded where they are smaller.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def _first_known(*names: str) -> Any:
    return next(getattr(dist, name) for name in names if hasattr(dist, name))


# torch 2.13 renamed both.
REDUCE_SCATTER = _first_known("reduce_scatter_single", "reduce_scatter_tensor")
ALL_GATHER = _first_known("all_gather_single", "all_gather_into_tensor")


def start_reduce_scatter(rows: torch.Tensor, row: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Begin to sum a buffer over the group; this rank's ``row`` is there when the work is done."""
    return REDUCE_SCATTER(row, rows.view(-1), group=group, async_op=True)


def start_all_gather(rows: torch.Tensor, row: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Begin to fill a buffer with the ``row`` of every rank of the group."""
    return ALL_GATHER(rows.view(-1), row, group=group, async_op=True)


def row_length(shape: Sequence[int], dim: int, shards: int) -> int:
    """Elements that a tensor cut along ``dim`` takes of every row (a single number: one)."""
    return math.prod(-(-size // shards) if other == dim else size for other, size in enumerate(shape))


def matching(rows: torch.Tensor, whole: torch.Tensor, dim: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Views of ``rows`` [shards, row_length] and of ``whole``, cut along ``dim``, of the same elements.

    One pair where the pieces are even, a second one for the smaller piece at the end of dim 0 else.
    """
    if not whole.dim():
        return [(rows, whole.view(1, 1))]
    shards, size = len(rows), whole.shape[dim]
    if size % shards == 0:
        shape = list(whole.shape)
        shape[dim] //= shards
        return [(rows.unflatten(1, shape), whole.unflatten(dim, (shards, -1)).movedim(dim, 0))]
    assert dim == 0, "other dims are cut evenly"
    length = -(-size // shards)
    full = size // length
    pieces = rows.unflatten(1, (length, *whole.shape[1:]))
    pairs = [(pieces[:full], whole[: full * length].unflatten(0, (full, length)))] if full else []
    left = size - full * length
    return [*pairs, (pieces[full, :left], whole[full * length :])] if left else pairs
