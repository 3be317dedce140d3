"""Softmax cross-entropy row by row, whole or as the pieces that ranks with slices of the classes combine.

A row's loss is ``log_sum - target``: the log of its sum of exponentials, and the logit of its label. Where
the classes are cut, each rank has both for its slice (target 0 where the label is another's);
``autoplan_passes.collectives.combined_log_sums`` joins them with two small all-reduces. Saved for backward:
the logits, the labels and the log-sums.
"""
# pyright: reportUnknownLambdaType=false
# - an operator's lambdas take what its schema says

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autoplan_codegen.kernels.operators import launcher, operator, runs_triton, wide, wide_dtype

Pair = tuple[Tensor, Tensor]


def pieces(logits: Tensor, labels: Tensor, vocabulary_start: int) -> Pair:
    """Log-sum and target of every row [rows] in fp32; logits are [rows, classes of the slice]."""
    if runs_triton(logits, labels):
        return launcher("cross_entropy").pieces(logits, labels, vocabulary_start)
    own, place = _places(labels, vocabulary_start, logits.shape[-1])
    target = wide(logits.gather(-1, place.unsqueeze(-1)).squeeze(-1)) if logits.shape[-1] else own.float()
    return wide(logits).logsumexp(-1), target.masked_fill(~own, 0)


def pieces_gradient(
    logits: Tensor,
    labels: Tensor,
    log_sum: Tensor,
    d_log_sum: Tensor,
    d_target: Tensor,
    vocabulary_start: int,
    in_place: bool = False,
) -> Tensor:
    """``softmax * d_log_sum + one_hot(label) * d_target``, in the dtype of the logits."""
    if runs_triton(logits, labels):
        return launcher("cross_entropy").pieces_backward(
            logits, labels, log_sum, d_log_sum, d_target, vocabulary_start, in_place
        )
    own, place = _places(labels, vocabulary_start, logits.shape[-1])
    d = (wide(logits) - log_sum.unsqueeze(-1)).exp() * d_log_sum.unsqueeze(-1)
    d.scatter_add_(-1, place.unsqueeze(-1), (d_target * own).to(d.dtype).unsqueeze(-1))
    return logits.copy_(d) if in_place else d.to(logits.dtype)


def _places(labels: Tensor, start: int, classes: int) -> tuple[Tensor, Tensor]:
    """Whether a label is of this slice, and its place in it (0 where it is not)."""
    own = (labels >= start) & (labels < start + classes)
    return own, torch.where(own, labels - start, 0)


def _flat(logits: Tensor, labels: Tensor) -> Pair:
    return logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)


def _rows(logits: Tensor, labels: Tensor) -> Pair:
    made = logits.new_empty(labels.shape, dtype=wide_dtype(logits.dtype))
    return made, torch.empty_like(made)


# --- the pieces of a slice ---------------------------------------------------------------------------


def _pieces(logits: Tensor, labels: Tensor, vocabulary_start: int) -> Pair:
    log_sum, target = pieces(*_flat(logits, labels), vocabulary_start)
    return log_sum.view(labels.shape), target.view(labels.shape)


def _backward(
    d_log_sum: Tensor, d_target: Tensor, logits: Tensor, labels: Tensor, log_sum: Tensor, start: int
) -> Tensor:
    rows, places = _flat(logits, labels)
    given = (log_sum.reshape(-1), d_log_sum.reshape(-1), d_target.reshape(-1))
    return pieces_gradient(rows, places, *given, start).view(logits.shape)


cross_entropy_backward = operator(
    "cross_entropy_backward",
    "(Tensor d_log_sum, Tensor d_target, Tensor logits, Tensor labels, Tensor log_sum, int vocabulary_start)"
    " -> Tensor",
    _backward,
    lambda d_log_sum, d_target, logits, labels, log_sum, start: logits.new_empty(logits.shape),
)


def _save_pieces(ctx: Any, inputs: tuple[Any, ...], output: Pair) -> None:
    logits, labels, ctx.start = inputs
    ctx.save_for_backward(logits, labels, output[0])


def _pieces_gradients(ctx: Any, d_log_sum: Tensor, d_target: Tensor) -> Any:
    return cross_entropy_backward(d_log_sum, d_target, *ctx.saved_tensors, ctx.start), None, None


cross_entropy_pieces = operator(
    "cross_entropy_pieces",
    "(Tensor logits, Tensor labels, int vocabulary_start) -> (Tensor, Tensor)",
    _pieces,
    lambda logits, labels, vocabulary_start: _rows(logits, labels),
    _pieces_gradients,
    _save_pieces,
)

# --- whole rows --------------------------------------------------------------------------------------


def losses_of(log_sum: Tensor, target: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    return (log_sum - target).masked_fill(labels == ignore_index, 0)


def _cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int) -> Pair:
    log_sum, target = _pieces(logits, labels, 0)
    return losses_of(log_sum, target, labels, ignore_index), log_sum


def _save(ctx: Any, inputs: tuple[Any, ...], output: Pair) -> None:
    logits, labels, ctx.ignore_index = inputs
    ctx.save_for_backward(logits, labels, output[1])


def slopes(d_loss: Tensor, d_log_sum: Tensor, labels: Tensor, ignore_index: int) -> Pair:
    """Gradients of log-sum and target from those of the losses and (a z-loss, say) the log-sums."""
    d_loss = d_loss.masked_fill(labels == ignore_index, 0)
    return d_loss + d_log_sum, -d_loss


def _gradients(ctx: Any, d_loss: Tensor, d_log_sum: Tensor) -> Any:
    labels = ctx.saved_tensors[1]
    given = slopes(d_loss, d_log_sum, labels, ctx.ignore_index)
    return cross_entropy_backward(*given, *ctx.saved_tensors, 0), None, None


cross_entropy = operator(
    "cross_entropy",
    "(Tensor logits, Tensor labels, int ignore_index) -> (Tensor, Tensor)",
    _cross_entropy,
    lambda logits, labels, ignore_index: _rows(logits, labels),
    _gradients,
    _save,
)
