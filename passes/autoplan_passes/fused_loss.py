"""The output layer and its cross-entropy as one op: rows and weight in, the loss out, the logits never whole.

In plain PyTorch: generated stage modules carry a copy. ``chunk`` rows are multiplied at a time, forward for
the sum of exponentials of each row (in one pass, arXiv 1805.02867), and again backward for the gradients: one
product more than with logits that are kept, and none of their bytes. Rows may be cut along one mesh axis and
the classes along another (Megatron-LM's vocabulary-parallel loss, arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from autoplan_passes.collectives import Tensor, rank_of, reduced, size_of

SIXTEEN_BIT_LOGITS = (torch.bfloat16, torch.float16)


def _wide_logits(rows: Tensor, weight: Tensor, columns: int) -> Tensor:
    """Logits of the first ``columns`` classes, the others the least number there is."""
    logits = F.linear(rows, weight)
    if columns < weight.shape[0]:
        logits[:, columns:] = torch.finfo(logits.dtype).min
    return logits.float() if logits.dtype in SIXTEEN_BIT_LOGITS else logits


def _loss_kernel(name: str, rows: Tensor, smoothed: bool) -> Any:
    """The registered kernel of that name, for rows that lie on an accelerator; it knows no smoothing."""
    elsewhere = smoothed or rows.device.type in ("cpu", "meta")
    return None if elsewhere else getattr(torch.ops.autoplan, name, None)


def _sums_by_kernel(kernel: Any, rows: Tensor, weight: Tensor, target: Tensor, first: int) -> Tensor:
    """The sums of :func:`_sums`, relative to the log of the sum instead of the largest logit."""
    log_sum, chosen = kernel(rows, weight, None, target, first)
    return torch.stack([log_sum, torch.ones_like(log_sum), chosen, torch.zeros_like(log_sum)])


def _spans(count: int, chunk: int) -> Iterator[slice]:
    return (slice(start, start + chunk) for start in range(0, count, chunk))


def _sums(
    rows: Tensor, weight: Tensor, target: Tensor, chunk: int, first: int, columns: int, smoothed: bool
) -> Tensor:
    """[4, N]: of each row of logits the largest, the sum of exp(logit - largest), the target's (0 where it is
    another rank's) and, if smoothed, the sum."""
    kernel = _loss_kernel("linear_cross_entropy_pieces", rows, smoothed or columns < weight.shape[0])
    if kernel:
        return _sums_by_kernel(kernel, rows, weight, target, first)
    found: list[Tensor] = []
    for own in _spans(rows.shape[0], chunk):
        logits = _wide_logits(rows[own], weight, columns)
        top = logits.amax(1)
        column = target[own] - first
        held = (column >= 0) & (column < weight.shape[0])
        chosen = logits.gather(1, torch.where(held, column, 0).unsqueeze(1)).squeeze(1) * held
        whole = logits.sum(1) if smoothed else torch.zeros_like(top)
        found.append(torch.stack([top, (logits - top.unsqueeze(1)).exp().sum(1), chosen, whole]))
    return torch.cat(found, 1) if found else _like_sums(rows)


def _like_sums(rows: Tensor, *_: Any) -> Tensor:
    dtype = torch.float32 if rows.dtype in SIXTEEN_BIT_LOGITS else rows.dtype
    return rows.new_empty(4, rows.shape[0], dtype=dtype)


def _slopes(
    rows: Tensor,
    weight: Tensor,
    target: Tensor,
    log_total: Tensor,
    factor: Tensor,
    chunk: int,
    first: int,
    columns: int,
    smoothing: float,
    classes: int,
) -> tuple[Tensor, Tensor]:
    """Gradients of rows and weight, given the log of each row's sum and the gradient of each row's loss."""
    kernel = _loss_kernel("linear_cross_entropy_backward", rows, smoothing > 0 or columns < weight.shape[0])
    if kernel:
        return kernel(factor, -factor, rows, weight, None, target, log_total, first)[:2]
    of_rows = torch.empty_like(rows, memory_format=torch.contiguous_format)
    of_weight = torch.zeros_like(weight, dtype=log_total.dtype)
    for own in _spans(rows.shape[0], chunk):
        slope = (_wide_logits(rows[own], weight, columns) - log_total[own].unsqueeze(1)).exp_()
        column = target[own] - first
        held = (column >= 0) & (column < weight.shape[0])
        taken = ((smoothing - 1) * held.to(slope.dtype)).unsqueeze(1)
        slope.scatter_add_(1, torch.where(held, column, 0).unsqueeze(1), taken)
        if smoothing:
            slope -= smoothing / classes
        slope = (slope * factor[own].unsqueeze(1)).to(rows.dtype)
        of_rows[own] = slope @ weight
        of_weight += slope.t() @ rows[own]
    return of_rows, of_weight.to(weight.dtype)


def _like_slopes(rows: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows, memory_format=torch.contiguous_format), torch.empty_like(weight)


def _loss_operator(name: str, function: Callable[..., Any], fake: Callable[..., Any], schema: str) -> Any:
    if hasattr(torch.ops.autoplan, name):  # another stage's: a second one would take it away
        return getattr(torch.ops.autoplan, name).default
    made = torch.library.custom_op(f"autoplan::{name}", function, mutates_args=(), schema=schema)
    made.register_fake(fake)
    return made


LOGIT_SUMS = _loss_operator(
    "logit_sums",
    _sums,
    _like_sums,
    "(Tensor rows, Tensor weight, Tensor target, int chunk, int first, int columns, bool smoothed) -> Tensor",
)
LOGIT_SLOPES = _loss_operator(
    "logit_slopes",
    _slopes,
    _like_slopes,
    "(Tensor rows, Tensor weight, Tensor target, Tensor log_total, Tensor factor, int chunk, int first, "
    "int columns, float smoothing, int classes) -> (Tensor, Tensor)",
)


class _LinearCrossEntropy(torch.autograd.Function):
    """Loss of every row; keeps rows, weight, targets and one number a row."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        target: Tensor,
        chunk: int,
        smoothing: float,
        axis: str,
        classes: int,
    ) -> Tensor:
        ranks, first = (1, 0) if not axis else (size_of(axis), rank_of(axis) * weight.shape[0])
        classes = classes or weight.shape[0] * ranks
        columns = max(0, min(weight.shape[0], classes - first))
        sums = LOGIT_SUMS(rows, weight, target, chunk, first, columns, smoothing > 0)
        top, total, chosen, whole = sums.unbind(0)
        if axis:
            own, top = top, reduced(top, axis, "max")
            sums = torch.stack([total * (own - top).exp(), chosen, whole])
            total, chosen, whole = reduced(sums, axis).unbind(0)
        log_total = total.log() + top
        ctx.save_for_backward(rows, weight, target, log_total)
        ctx.facts = chunk, first, columns, smoothing, classes
        return log_total - (1 - smoothing) * chosen - smoothing / classes * whole

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        of_rows, of_weight = LOGIT_SLOPES(*ctx.saved_tensors, gradients[0].contiguous(), *ctx.facts)
        return of_rows, of_weight, *[None] * 5


def linear_cross_entropy(
    rows: Tensor,
    weight: Tensor,
    target: Tensor,
    ignore_index: int,
    smoothing: float,
    reduction: int,
    chunk: int,
    positions: str = "",
    vocabulary: str = "",
    classes: int = 0,
) -> Tensor:
    """``cross_entropy(rows @ weight.t(), target)`` (``reduction``: 0 none, 1 mean, 2 sum), ``chunk`` rows at
    a time, in single precision or better.

    Rows are cut along the axis ``positions``: a mean is a partial sum over all ranks' targets that count.
    The weight is cut along the classes on ``vocabulary``; only the first ``classes`` of its rows are classes
    (0: all).
    """
    kept = target != ignore_index
    losses: Any = _LinearCrossEntropy.apply(
        rows, weight, torch.where(kept, target, 0), chunk, smoothing, vocabulary, classes
    )
    losses = torch.where(kept, losses, 0).to(losses.dtype)
    if reduction == 0:
        return losses
    count = kept.sum()
    total = losses.sum()
    return total / (reduced(count, positions) if positions else count) if reduction == 1 else total
