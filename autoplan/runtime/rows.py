"""Shards of a tensor in, the rows of one buffer out: how shards travel in a reduce-scatter or all-gather.

A buffer is [shards, row length]; each row holds the pieces of one shard, padded where they are uneven.
"""

from __future__ import annotations

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
    """Elements that a tensor cut along ``dim`` takes of every row."""
    length = -(-shape[dim] // shards)
    for other, size in enumerate(shape):
        length *= size if other != dim else 1
    return length


def write_rows(rows: torch.Tensor, whole: torch.Tensor, dim: int) -> None:
    """Lay ``whole`` into ``rows`` [shards, row_length], each shard's piece in its row."""
    if whole.shape[dim] % len(rows) == 0:
        _pieces_in(rows, whole, dim).copy_(_pieces_of(whole, dim, len(rows)))
        return
    for row, piece in zip(rows, whole.chunk(len(rows), dim)):
        row[: piece.numel()].view(piece.shape).copy_(piece)


def read_rows(rows: torch.Tensor, whole: torch.Tensor, dim: int) -> None:
    """Fill ``whole`` from ``rows``: inverse of :func:`write_rows`."""
    if whole.shape[dim] % len(rows) == 0:
        _pieces_of(whole, dim, len(rows)).copy_(_pieces_in(rows, whole, dim))
        return
    for row, piece in zip(rows, whole.chunk(len(rows), dim)):
        piece.copy_(row[: piece.numel()].view(piece.shape))


def _pieces_of(whole: torch.Tensor, dim: int, shards: int) -> torch.Tensor:
    """A view [shards, sizes before, size of a piece, sizes after] of a tensor that divides evenly."""
    return whole.unflatten(dim, (shards, -1)).movedim(dim, 0)


def _pieces_in(rows: torch.Tensor, whole: torch.Tensor, dim: int) -> torch.Tensor:
    """The same view of the buffer."""
    shape = list(whole.shape)
    shape[dim] //= len(rows)
    return rows.unflatten(1, shape)
