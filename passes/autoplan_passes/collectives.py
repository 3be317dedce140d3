"""Collectives with their gradients, and ops on tensors cut along a mesh axis, in plain PyTorch.

A tensor in, a tensor out, differentiable. Imports torch alone: generated stage modules carry a copy of
this file. Call ``bind({"tp": group})`` first, with a process group or a :class:`DryGroup`.

``sections`` are the sizes of consecutive parts of the whole dim, each cut by itself (fused weights); in
``zigzag`` a rank holds piece r of 2n of each and its mirror image.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

Tensor = torch.Tensor
GROUPS: dict[str, Any] = {}


class DryGroup:
    """A group in which nothing is sent: shapes and memory are those of ``size`` ranks, values are not."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def bind(groups: dict[str, Any]) -> dict[str, Any]:
    """Name the group of each mesh axis; returns the names bound before, for binding them again."""
    before = dict(GROUPS)
    GROUPS.clear()
    GROUPS.update(groups)
    return before


def rank_of(axis: str) -> int:
    return GROUPS[axis].rank()


def size_of(axis: str) -> int:
    return GROUPS[axis].size()


# --- what the network does, without gradient ---------------------------------------------------


def _all_reduce(x: Tensor, axis: str, how: str = "sum") -> Tensor:
    group = GROUPS[axis]
    if isinstance(group, DryGroup):
        return x.clone()
    comm = torch.ops._c10d_functional
    return comm.wait_tensor(comm.all_reduce(x.contiguous(), how, group.group_name))


def reduced(x: Tensor, axis: str, how: str = "sum") -> Tensor:
    """The ``sum`` or ``max`` over all ranks, without gradient."""
    return _all_reduce(x, axis, how)


def gather_whole(
    x: Tensor, dim: int, axis: str, sections: Sequence[int] = (), zigzag: bool = False
) -> Tensor:
    """The whole of what every rank has a piece of, without gradient."""
    return _joined(_start_gather(x, axis), x, dim, axis, sections, zigzag)


def _start_gather(x: Tensor, axis: str) -> Tensor:
    group, size = GROUPS[axis], size_of(axis)
    if isinstance(group, DryGroup):
        return x
    flat = x.contiguous().reshape(1, *x.shape)
    return torch.ops._c10d_functional.all_gather_into_tensor(flat, size, group.group_name)


def _joined(
    sent: Tensor, x: Tensor, dim: int, axis: str, sections: Sequence[int] = (), zigzag: bool = False
) -> Tensor:
    if isinstance(GROUPS[axis], DryGroup):
        return _join([x] * size_of(axis), dim, sections, zigzag)
    return _join(torch.ops._c10d_functional.wait_tensor(sent).unbind(0), dim, sections, zigzag)


def scatter_sum(x: Tensor, dim: int, axis: str, sections: Sequence[int] = (), zigzag: bool = False) -> Tensor:
    """This rank's piece of the sum over ranks, without gradient."""
    return _summed(_start_scatter(x, dim, axis, sections, zigzag), axis)


def _start_scatter(
    x: Tensor, dim: int, axis: str, sections: Sequence[int] = (), zigzag: bool = False
) -> Tensor:
    group, size = GROUPS[axis], size_of(axis)
    pieces = torch.stack(_pieces(x, dim, size, sections, zigzag))
    if isinstance(group, DryGroup):
        return pieces[0].clone().unsqueeze(0)
    return torch.ops._c10d_functional.reduce_scatter_tensor(pieces, "sum", size, group.group_name)


def _summed(sent: Tensor, axis: str) -> Tensor:
    dry = isinstance(GROUPS[axis], DryGroup)
    summed = sent if dry else torch.ops._c10d_functional.wait_tensor(sent)
    return summed.squeeze(0)


def _all_to_all(
    x: Tensor,
    from_dim: int,
    to_dim: int,
    axis: str,
    sections: Sequence[int] = (),
    to_sections: Sequence[int] = (),
) -> Tensor:
    group, size = GROUPS[axis], size_of(axis)
    pieces = torch.stack(_pieces(x, to_dim, size, to_sections))
    if not isinstance(group, DryGroup):
        comm = torch.ops._c10d_functional
        pieces = comm.wait_tensor(comm.all_to_all_single(pieces, [1] * size, [1] * size, group.group_name))
    return _join(pieces.unbind(0), from_dim, sections)


def _pieces(
    x: Tensor, dim: int, size: int, sections: Sequence[int] = (), zigzag: bool = False
) -> list[Tensor]:
    if not sections and not zigzag:
        return list(x.chunk(size, dim))
    return [_cut(x, dim, rank, size, sections, zigzag) for rank in range(size)]


def _cut(
    x: Tensor, dim: int, rank: int, size: int, sections: Sequence[int] = (), zigzag: bool = False
) -> Tensor:
    parts = x.split(list(sections), dim) if sections else [x]
    held = (rank, 2 * size - 1 - rank) if zigzag else (rank,)
    own = [part.chunk(size * len(held), dim)[i] for part in parts for i in held]
    return torch.cat(own, dim) if len(own) > 1 else own[0].contiguous()


def _join(pieces: Sequence[Tensor], dim: int, sections: Sequence[int] = (), zigzag: bool = False) -> Tensor:
    if not sections and not zigzag:
        return torch.cat(list(pieces), dim)
    turns = 2 if zigzag else 1  # the second half of every section comes in reverse order of ranks
    whole = sections or [len(pieces) * pieces[0].shape[dim]]
    by_rank = [
        piece.split([n // len(pieces) // turns for n in whole for _ in range(turns)], dim) for piece in pieces
    ]
    joined = [part[::-1] if i % turns else part for i, part in enumerate(zip(*by_rank))]
    return torch.cat([piece for part in joined for piece in part], dim)


def _slice(x: Tensor, dim: int, axis: str, sections: Sequence[int] = (), zigzag: bool = False) -> Tensor:
    return _cut(x, dim, rank_of(axis), size_of(axis), sections, zigzag)


def _same(x: Tensor, *_: Any) -> Tensor:
    return x.view_as(x)


def _first(x: Tensor, axis: str) -> Tensor:
    return x.clone() if rank_of(axis) == 0 else torch.zeros_like(x)


class _Convert(torch.autograd.Function):
    """``forward(x, *arguments)``, whose gradient is ``backward(gradient, *back_arguments)``."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, forward: Any, arguments: Any, backward: Any, back_arguments: Any
    ) -> Tensor:
        ctx.backward_of, ctx.arguments = backward, back_arguments
        return forward(x, *arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.backward_of(gradients[0], *ctx.arguments), None, None, None, None


def _convert(
    x: Tensor, forward: Callable[..., Tensor], backward: Callable[..., Tensor], *arguments: Any
) -> Tensor:
    return _Convert.apply(x, forward, arguments, backward, arguments)  # pyright: ignore[reportReturnType] - torch types apply as Any


# --- conversions between placements --------------------------------------------------------------


def copy_to(x: Tensor, axis: str) -> Tensor:
    """Replicated, about to be used on shards: the same value; gradients are summed over ranks."""
    return _convert(x, _same, _all_reduce, axis)


def reduce_from(x: Tensor, axis: str) -> Tensor:
    """Partial sums to their sum on every rank; the gradient passes as it is."""
    return _convert(x, _all_reduce, _same, axis)


def gather_from(x: Tensor, dim: int, axis: str, sections: Sequence[int] = (), zigzag: bool = False) -> Tensor:
    """Pieces of ``dim`` to the whole on every rank; each rank keeps its piece of the gradient."""
    return _convert(x, gather_whole, _slice, dim, axis, sections, zigzag)


def scatter_to(x: Tensor, dim: int, axis: str, sections: Sequence[int] = (), zigzag: bool = False) -> Tensor:
    """Replicated to this rank's piece of ``dim``; the pieces of the gradient are gathered."""
    return _convert(x, _slice, gather_whole, dim, axis, sections, zigzag)


def gather_reduce(
    x: Tensor, dim: int, axis: str, sections: Sequence[int] = (), zigzag: bool = False
) -> Tensor:
    """Pieces to the whole, about to be used on shards: gradients are summed and scattered."""
    return _convert(x, gather_whole, scatter_sum, dim, axis, sections, zigzag)


def reduce_scatter(
    x: Tensor, dim: int, axis: str, sections: Sequence[int] = (), zigzag: bool = False
) -> Tensor:
    """Partial sums to this rank's piece of their sum; the pieces of the gradient are gathered."""
    return _convert(x, scatter_sum, gather_whole, dim, axis, sections, zigzag)


def all_to_all(
    x: Tensor,
    from_dim: int,
    to_dim: int,
    axis: str,
    sections: Sequence[int] = (),
    to_sections: Sequence[int] = (),
) -> Tensor:
    """Cut along ``from_dim`` to cut along ``to_dim``; the gradient goes back the same way."""
    there = (from_dim, to_dim, axis, sections, to_sections)
    back = (to_dim, from_dim, axis, to_sections, sections)
    return _Convert.apply(x, _all_to_all, there, _all_to_all, back)  # pyright: ignore[reportReturnType] - torch types apply as Any


def slice_of(x: Tensor, dim: int, axis: str, sections: Sequence[int] = (), zigzag: bool = False) -> Tensor:
    """This rank's piece of a replicated tensor whose gradient may differ by rank; nothing is sent."""
    return _slice(x, dim, axis, sections, zigzag)


def on_first_rank(x: Tensor, axis: str) -> Tensor:
    """Replicated to partial: the value on rank 0, zero elsewhere; every rank has the whole gradient."""
    return _convert(x, _first, _same, axis)


def once(x: Tensor, axis: str) -> Tensor:
    """The same value on every rank, the gradient counted on rank 0 alone; nothing is sent."""
    return _convert(x, _same, _first, axis)


def first_of(x: Tensor, axis: str) -> Tensor:
    """The value on rank 0, zero elsewhere, and the gradient likewise; nothing is sent."""
    return _convert(x, _first, _first, axis)


def embed_piece(x: Tensor, dim: int, axis: str, sections: Sequence[int] = (), zigzag: bool = False) -> Tensor:
    """A piece of ``dim`` to a partial sum: zeros where other ranks have their pieces."""
    rank, empty = rank_of(axis), torch.zeros_like(x)
    return _join([x if r == rank else empty for r in range(size_of(axis))], dim, sections, zigzag)


# --- products of gathered tensors ------------------------------------------------------------------


class _GatheredLinears(torch.autograd.Function):
    """Products of a gathered tensor; keeps this rank's piece, and gathers it again in the backward.

    The gather runs beside the product that makes the gradient of the tensor, and that gradient's sum over
    ranks beside the products that make those of the weights.
    """

    @staticmethod
    def forward(ctx: Any, piece: Tensor, place: Any, keeps_whole: bool, count: int, *held: Any) -> Any:
        whole = gather_whole(piece, *place)
        ctx.save_for_backward(whole if keeps_whole else piece, *held[:count])
        ctx.place, ctx.keeps_whole, ctx.biases = place, keeps_whole, [b is not None for b in held[count:]]
        return tuple(F.linear(whole, weight, bias) for weight, bias in zip(held[:count], held[count:]))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (kept, *weights), (dim, axis, *rest) = ctx.saved_tensors, ctx.place
        sent = kept if ctx.keeps_whole else _start_gather(kept, axis)
        towards: Any = sum(gradient @ weight for gradient, weight in zip(gradients, weights))
        summing = _start_scatter(towards, dim, axis, *rest)
        whole = kept if ctx.keeps_whole else _joined(sent, kept, dim, axis, *rest)
        rows = whole.reshape(-1, whole.shape[-1])
        made = [gradient.reshape(-1, gradient.shape[-1]) for gradient in gradients]
        needed, first = ctx.needs_input_grad, 4
        for_weights = [g.t() @ rows if needed[first + i] else None for i, g in enumerate(made)]
        first += len(weights)
        for_biases = [g.sum(0) if ctx.biases[i] and needed[first + i] else None for i, g in enumerate(made)]
        return _summed(summing, axis), None, None, None, *for_weights, *for_biases


def gathered_linears(
    piece: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    dim: int,
    axis: str,
    sections: Sequence[int] = (),
    zigzag: bool = False,
    keeps_whole: bool = False,
) -> tuple[Tensor, ...]:
    """``F.linear`` of the whole of a cut tensor with each weight; the gradient is summed and scattered.

    ``keeps_whole``: the whole is kept for the backward, where the forward runs again right before it.
    """
    place = (dim, axis, sections, zigzag)
    products: Any = _GatheredLinears.apply(piece, place, keeps_whole, len(weights), *weights, *biases)
    return products


# --- ops whose own dim is cut --------------------------------------------------------------------


def vocab_embedding(ids: Tensor, weight: Tensor, padding_idx: int, axis: str) -> Tensor:
    """Rows of a table cut along the vocabulary: a partial sum, zero where another rank has the row."""
    first, rows = rank_of(axis) * weight.shape[0], weight.shape[0]
    own = (ids >= first) & (ids < first + rows)
    padding = padding_idx - first if first <= padding_idx < first + rows else None
    found = F.embedding(torch.where(own, ids - first, 0), weight, padding)
    return found * own.unsqueeze(-1).to(found.dtype)


class _HideClasses(torch.autograd.Function):
    """Overwrites columns; a loss gives them no gradient, so what arrives passes as it is."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, first: int) -> Tensor:
        ctx.mark_dirty(logits)
        logits[..., max(first, 0) :] = torch.finfo(logits.dtype).min
        return logits

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


def hide_classes(logits: Tensor, classes: int, axis: str = "") -> Tensor:
    """Logits of more columns than there are classes, the others the least number there is, in place.

    ``axis``: the one along which the columns are cut.
    """
    first = classes - rank_of(axis) * logits.shape[-1] if axis else classes
    hidden: Any = _HideClasses.apply(logits, first) if first < logits.shape[-1] else logits.view_as(logits)
    return hidden


class _VocabCrossEntropy(torch.autograd.Function):
    """Loss per position of ``logits`` [N, C / ranks]; saves the logits and a number per position."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, smoothing: float, axis: str) -> Tensor:
        columns = logits.shape[1]
        classes, first = columns * size_of(axis), rank_of(axis) * columns
        x = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
        top = _all_reduce(x.detach().amax(1), axis, "max")
        own = (target >= first) & (target < first + columns)
        column = torch.where(own, target - first, 0)
        chosen = x.gather(1, column.unsqueeze(1)).squeeze(1) * own
        sums = [(x - top.unsqueeze(1)).exp().sum(1), chosen, x.sum(1) if smoothing else torch.zeros_like(top)]
        total, chosen, all_logits = _all_reduce(torch.stack(sums), axis).unbind(0)
        log_total = total.log() + top
        ctx.save_for_backward(logits, log_total, own, column)
        ctx.smoothing, ctx.classes = smoothing, classes
        return log_total - (1 - smoothing) * chosen - smoothing / classes * all_logits

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        logits, log_total, own, column = ctx.saved_tensors
        slope = (logits - log_total.unsqueeze(1)).exp() - ctx.smoothing / ctx.classes
        slope.scatter_add_(1, column.unsqueeze(1), ((ctx.smoothing - 1) * own.to(slope.dtype)).unsqueeze(1))
        return (slope * gradients[0].unsqueeze(1)).to(logits.dtype), None, None, None


class _CombinedLogSums(torch.autograd.Function):
    """Saves two numbers per position."""

    @staticmethod
    def forward(ctx: Any, log_sum: Tensor, target: Tensor, axis: str) -> tuple[Tensor, Tensor]:
        top = _all_reduce(log_sum, axis, "max")
        total, chosen = _all_reduce(torch.stack([(log_sum - top).exp(), target]), axis).unbind(0)
        whole = total.log() + top
        ctx.save_for_backward(log_sum, whole)
        return whole, chosen.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        log_sum, whole = ctx.saved_tensors
        return (log_sum - whole).exp() * gradients[0], gradients[1], None


def combined_log_sums(log_sum: Tensor, target: Tensor, axis: str) -> tuple[Tensor, Tensor]:
    """Log-sum-exp and label's logit over all classes, from those of each rank's classes (target 0 elsewhere).

    The cross-entropy of a position is their difference; both are the same on every rank, as their gradients.
    """
    return _CombinedLogSums.apply(log_sum, target, axis)  # pyright: ignore[reportReturnType] - torch types apply as Any


def vocab_cross_entropy(
    logits: Tensor, target: Tensor, reduction: int, ignore_index: int, smoothing: float, axis: str
) -> Tensor:
    """Cross-entropy of logits cut along the classes (``reduction``: 0 none, 1 mean, 2 sum), on every rank."""
    kept = target != ignore_index
    losses: Any = _VocabCrossEntropy.apply(logits, torch.where(kept, target, 0), smoothing, axis)
    losses = torch.where(kept, losses, 0).to(losses.dtype)
    if reduction == 0:
        return losses.to(logits.dtype)
    total = losses.sum()
    return (total / kept.sum() if reduction == 1 else total).to(logits.dtype)


def position_cross_entropy(
    logits: Tensor, target: Tensor, ignore_index: int, smoothing: float, axis: str
) -> Tensor:
    """Mean cross-entropy of cut positions: a partial sum, divided by all ranks' positions that count."""
    total = F.cross_entropy(
        logits, target, ignore_index=ignore_index, label_smoothing=smoothing, reduction="sum"
    )
    return total / _all_reduce((target != ignore_index).sum(), axis)


def vocab_position_cross_entropy(
    logits: Tensor, target: Tensor, ignore_index: int, smoothing: float, positions: str, axis: str
) -> Tensor:
    """Mean cross-entropy of logits cut along positions on one axis, along classes on another: a partial sum
    on the first, the same on all ranks of the second."""
    total = vocab_cross_entropy(logits, target, 2, ignore_index, smoothing, axis)
    return total / _all_reduce((target != ignore_index).sum(), positions)


def sliced_dropout(
    x: Tensor, p: float, dim: int, axis: str, sections: Sequence[int] = (), zigzag: bool = False
) -> tuple[Tensor, Tensor]:
    """Dropout of a cut tensor by this rank's piece of the mask that one process would draw."""
    shape = [n * size_of(axis) if d == dim else n for d, n in enumerate(x.shape)]
    full = torch.empty(shape, dtype=x.dtype, device=x.device).bernoulli_(1 - p)
    mask = _slice(full, dim, axis, sections, zigzag)
    return x * mask / (1 - p), mask.bool()
