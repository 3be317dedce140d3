"""The output projection and its cross-entropy together: the logits never exist as a whole.

Works in chunks of the vocabulary, not of the rows: a chunk's part of the weight's gradient is then one
product, complete in itself, and what adds up over chunks is the gradient of the hidden states, in fp32
(rows are fewer than classes). A chunk of logits has about as many elements as the hidden states. Saved for
backward: hidden states, weight, labels, and one log-sum a row; the logits are computed again (a fourth
product beside three), which costs no memory for each micro-batch in flight, takes any weight for each row,
and serves a slice of the vocabulary as well as the whole.
"""
# pyright: reportUnknownLambdaType=false
# - an operator's lambdas take what its schema says

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autoplan_codegen.kernels.cross_entropy import losses_of, pieces, pieces_gradient, slopes
from autoplan_codegen.kernels.operators import none_if_empty, operator, wide, wide_dtype

Pair = tuple[Tensor, Tensor]
LEAST_CHUNK = 2**24  # elements of a chunk of logits: below it products are too small to be fast
CHUNK_MULTIPLE = 256  # classes


def vocabulary_chunk(rows: int, hidden: int, vocabulary: int) -> int:
    """How many classes are computed at once: rows x chunk is the largest logits tensor there ever is."""
    most = max(rows * hidden, LEAST_CHUNK) // max(rows, 1) // CHUNK_MULTIPLE * CHUNK_MULTIPLE
    return max(1, min(vocabulary, max(most, CHUNK_MULTIPLE)))


def _chunks(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
    """Each chunk of classes with its logits [rows, classes]."""
    classes = weight.shape[0]
    step = vocabulary_chunk(hidden.shape[0], hidden.shape[1], classes)
    for start in range(0, classes, step):
        own = slice(start, min(start + step, classes))
        yield own, F.linear(hidden, weight[own], None if bias is None else bias[own])


def _pieces(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, start: int) -> Pair:
    rows, places = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    target = rows.new_zeros(rows.shape[0], dtype=wide_dtype(hidden.dtype))
    log_sum = torch.full_like(target, float("-inf"))
    for own, logits in _chunks(rows, weight, bias):
        more_log_sum, more_target = pieces(logits, places, start + own.start)
        log_sum, target = torch.logaddexp(log_sum, more_log_sum), target + more_target
    return log_sum.view(labels.shape), target.view(labels.shape)


def _backward(
    d_log_sum: Tensor,
    d_target: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    log_sum: Tensor,
    start: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the hidden states, the weight and the bias (empty where there is none)."""
    rows, places = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    given = (log_sum.reshape(-1), d_log_sum.reshape(-1), d_target.reshape(-1))
    d_rows = wide(torch.zeros_like(rows))
    d_weight, d_bias = torch.empty_like(weight), torch.empty_like(weight[:0, 0] if bias is None else bias)
    for own, logits in _chunks(rows, weight, bias):
        d_logits = pieces_gradient(logits, places, *given, start + own.start, in_place=True)
        torch.mm(d_logits.t(), rows, out=d_weight[own])
        d_rows += d_logits @ weight[own]
        if bias is not None:
            d_bias[own] = wide(d_logits).sum(0).to(bias.dtype)
    return d_rows.to(hidden.dtype).view(hidden.shape), d_weight, d_bias


def _fake_backward(
    d_log_sum: Tensor,
    d_target: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    log_sum: Tensor,
    start: int,
) -> tuple[Tensor, Tensor, Tensor]:
    d_bias = weight.new_empty(0 if bias is None else bias.shape)
    return hidden.new_empty(hidden.shape), torch.empty_like(weight), d_bias


linear_cross_entropy_backward = operator(
    "linear_cross_entropy_backward",
    "(Tensor d_log_sum, Tensor d_target, Tensor hidden, Tensor weight, Tensor? bias, Tensor labels,"
    " Tensor log_sum, int vocabulary_start) -> (Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
)


def _rows(hidden: Tensor, labels: Tensor) -> Pair:
    made = hidden.new_empty(labels.shape, dtype=wide_dtype(hidden.dtype))
    return made, torch.empty_like(made)


# --- the pieces of a slice of the vocabulary ---------------------------------------------------------


def _save_pieces(ctx: Any, inputs: tuple[Any, ...], output: Pair) -> None:
    *tensors, ctx.start = inputs
    ctx.save_for_backward(*tensors, output[0])


def _pieces_gradients(ctx: Any, d_log_sum: Tensor, d_target: Tensor) -> Any:
    return *_given(ctx, (d_log_sum, d_target), ctx.start), None, None


def _given(ctx: Any, given: Pair, start: int) -> tuple[Tensor, Tensor, Tensor | None]:
    d_hidden, d_weight, d_bias = linear_cross_entropy_backward(*given, *ctx.saved_tensors, start)
    return d_hidden, d_weight, none_if_empty(d_bias, ctx.saved_tensors[2] is not None)


linear_cross_entropy_pieces = operator(
    "linear_cross_entropy_pieces",
    "(Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, int vocabulary_start) -> (Tensor, Tensor)",
    _pieces,
    lambda hidden, weight, bias, labels, vocabulary_start: _rows(hidden, labels),
    _pieces_gradients,
    _save_pieces,
)

# --- whole rows --------------------------------------------------------------------------------------


def _whole(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, ignore_index: int) -> Pair:
    log_sum, target = _pieces(hidden, weight, bias, labels, 0)
    return losses_of(log_sum, target, labels, ignore_index), log_sum


def _save(ctx: Any, inputs: tuple[Any, ...], output: Pair) -> None:
    *tensors, ctx.ignore_index = inputs
    ctx.save_for_backward(*tensors, output[1])


def _gradients(ctx: Any, d_loss: Tensor, d_log_sum: Tensor) -> Any:
    given = slopes(d_loss, d_log_sum, ctx.saved_tensors[3], ctx.ignore_index)
    return *_given(ctx, given, 0), None, None


linear_cross_entropy = operator(
    "linear_cross_entropy",
    "(Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, int ignore_index) -> (Tensor, Tensor)",
    _whole,
    lambda hidden, weight, bias, labels, ignore_index: _rows(hidden, labels),
    _gradients,
    _save,
)
