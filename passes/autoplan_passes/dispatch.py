"""Rows to the ranks that hold their experts and back, with gradients, in plain PyTorch.

Comes in: rows sorted by expert and the ends of every expert's rows. Goes out: the rows of this rank's
experts, from all ranks of the axis. Every rank issues the same collectives whatever the routing: experts and
ranks without a row exchange pieces of size 0. Generated stage modules carry a copy of what they use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autoplan_passes.collectives import GROUPS, DryGroup, Tensor, size_of


class DryExperts(DryGroup):
    """A group in which nothing is sent, seen from the rank whose experts get the most rows: ``imbalance``
    times the mean over the ranks."""

    def __init__(self, rank: int, size: int, imbalance: float = 1.0) -> None:
        super().__init__(rank, size)
        self.imbalance = imbalance

    def arriving(self, rows: int) -> int:
        """Rows that arrive where every rank sends ``rows``."""
        return -int(-rows * self.imbalance // 1)

    def leaving(self, rows: int) -> int:
        """Inverse of :meth:`arriving`."""
        return int((rows + 1e-9) // self.imbalance)


def route(ends: Tensor, rows: Tensor, axis: str) -> tuple[Tensor, Tensor, Tensor]:
    """Where sorted rows go: the counts of every expert's rows are exchanged.

    ``ends`` [experts] are the ends of the experts' groups among ``rows``, which are only counted. Returns
    ``splits`` [2, ranks] on the CPU (rows sent to and received from each rank), ``order`` [rows received]
    (the arrivals by expert) and the ends [experts / ranks] of this rank's experts' groups among them. Rows
    after the last end travel with the last expert.
    """
    group, size = GROUPS[axis], size_of(axis)
    if isinstance(group, DryExperts):
        splits = torch.empty(2, size, dtype=torch.int64)
        order = torch.empty(group.arriving(rows.shape[0]), dtype=torch.int64, device=ends.device)
        return splits, order, ends.new_empty(ends.shape[0] // size)
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    counts[-1] += rows.shape[0] - ends[-1]
    sent = counts.view(size, -1)
    came = _exchange(sent, [1] * size, [1] * size, axis)
    splits = torch.stack([sent.sum(1), came.sum(1)]).cpu()
    expert = torch.arange(came.shape[1], device=came.device).repeat(size).repeat_interleave(came.flatten())
    return splits, expert.argsort(stable=True), came.sum(0).cumsum(0).to(ends.dtype)


def own_experts(order: Tensor, ends: Tensor) -> Tensor:
    """Of every row that arrived (``order``, ``ends`` of :func:`route`), the number of its expert here."""
    return torch.bucketize(torch.arange(order.shape[0], device=ends.device), ends, right=True)


def dispatch(rows: Tensor, splits: Tensor, order: Tensor, axis: str) -> Tensor:
    """Rows sorted by expert [n, ...] to the rows of this rank's experts, sorted [m, ...]."""
    return _MoveRows.apply(rows, splits, order, axis, _send, _send_back)  # pyright: ignore[reportReturnType] - torch types apply as Any


def combine(rows: Tensor, splits: Tensor, order: Tensor, axis: str) -> Tensor:
    """Inverse of :func:`dispatch`: every row goes back to the rank and the place it came from."""
    return _MoveRows.apply(rows, splits, order, axis, _send_back, _send)  # pyright: ignore[reportReturnType] - torch types apply as Any


class _MoveRows(torch.autograd.Function):
    """``move(rows)``, whose gradient is ``back(gradient)``."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, splits: Tensor, order: Tensor, axis: str, move: Any, back: Any
    ) -> Tensor:
        ctx.save_for_backward(order)
        ctx.splits, ctx.axis, ctx.back = splits, axis, back
        return move(rows, splits, order, axis)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (order,) = ctx.saved_tensors
        return ctx.back(gradients[0], ctx.splits, order, ctx.axis), None, None, None, None, None


def _send(rows: Tensor, splits: Tensor, order: Tensor, axis: str) -> Tensor:
    if isinstance(GROUPS[axis], DryExperts):
        return rows.new_empty(order.shape[0], *rows.shape[1:])
    sent, came = splits.tolist()
    return _exchange(rows, sent, came, axis).index_select(0, order)


def _send_back(rows: Tensor, splits: Tensor, order: Tensor, axis: str) -> Tensor:
    group = GROUPS[axis]
    if isinstance(group, DryExperts):
        return rows.new_empty(group.leaving(order.shape[0]), *rows.shape[1:])
    sent, came = splits.tolist()
    return _exchange(torch.empty_like(rows).index_copy_(0, order, rows), came, sent, axis)


def _exchange(rows: Tensor, sent: Sequence[int], came: Sequence[int], axis: str) -> Tensor:
    """All-to-all of pieces of dim 0: ``sent[r]`` rows to rank r, ``came[r]`` rows from it."""
    if size_of(axis) == 1:
        return rows
    comm, name = torch.ops._c10d_functional, GROUPS[axis].group_name
    return comm.wait_tensor(comm.all_to_all_single(rows.contiguous(), came, sent, name))
