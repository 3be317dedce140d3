"""The products of experts with the moving of tokens fused in: gathered first, weighted and added last.

``grouped_linear``: row i is ``x[rows[i]] @ weight[g]`` for the group g it falls into (``ends`` [experts]:
where each group ends). ``combine_experts``: token t is the sum over its choices c of ``weights[t, c] *
y[places[t, c]]``, each row of y being the choice of one token. Saved for backward: the inputs; the gathered
rows are never stored.
"""
# pyright: reportUnknownLambdaType=false
# - an operator's lambdas take what its schema says

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autoplan_codegen.kernels.operators import LARGEST_ROW, launcher, operator, runs_triton, wide
from autoplan_passes.grouped import GROUPED_PRODUCT, GROUPED_PRODUCT_BACKWARD

# --- gather and multiply -----------------------------------------------------------------------------


def _gathered(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.index_select(0, rows)


def _grouped_linear(x: Tensor, rows: Tensor | None, weight: Tensor, ends: Tensor) -> Tensor:
    if runs_triton(x, rows, weight, ends):
        return launcher("experts").grouped_linear(x, rows, weight, ends)
    return GROUPED_PRODUCT(_gathered(x, rows), weight, ends)


def _grouped_linear_backward(
    d_y: Tensor, x: Tensor, rows: Tensor | None, weight: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor]:
    if runs_triton(d_y, x, rows, weight, ends):
        d_rows, d_weight = launcher("experts").grouped_linear_backward(d_y, x, rows, weight, ends)
    else:
        d_rows, d_weight = GROUPED_PRODUCT_BACKWARD(d_y.contiguous(), _gathered(x, rows), weight, ends)
    if rows is None:
        return d_rows, d_weight
    d_x = wide(torch.zeros_like(x)).index_add_(0, rows, wide(d_rows))
    return d_x.to(x.dtype), d_weight


grouped_linear_backward = operator(
    "grouped_linear_backward",
    "(Tensor d_y, Tensor x, Tensor? rows, Tensor weight, Tensor ends) -> (Tensor, Tensor)",
    _grouped_linear_backward,
    lambda d_y, x, rows, weight, ends: (x.new_empty(x.shape), torch.empty_like(weight)),
)


def _fake_grouped(x: Tensor, rows: Tensor | None, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty((x if rows is None else rows).shape[0], weight.shape[2])


def _save_grouped(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _grouped_gradients(ctx: Any, d_y: Tensor) -> Any:
    d_x, d_weight = grouped_linear_backward(d_y, *ctx.saved_tensors)
    return d_x, None, d_weight, None


grouped_linear = operator(
    "grouped_linear",
    "(Tensor x, Tensor? rows, Tensor weight, Tensor ends) -> Tensor",
    _grouped_linear,
    _fake_grouped,
    _grouped_gradients,
    _save_grouped,
)

# --- weight and add up -------------------------------------------------------------------------------


def _combine(y: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    if runs_triton(y, places, weights):
        return launcher("experts").combine(y, places, weights)
    chosen = wide(y).index_select(0, places.reshape(-1)).view(*places.shape, y.shape[-1])
    return (chosen * wide(weights).unsqueeze(-1)).sum(1).to(y.dtype)


def _combine_backward(d_out: Tensor, y: Tensor, places: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    if y.shape[-1] <= LARGEST_ROW and runs_triton(d_out, y, places, weights):
        return launcher("experts").combine_backward(d_out, y, places, weights)
    g = wide(d_out).unsqueeze(1)
    chosen = wide(y).index_select(0, places.reshape(-1)).view(*places.shape, y.shape[-1])
    d_rows = (g * wide(weights).unsqueeze(-1)).reshape(-1, y.shape[-1]).to(y.dtype)
    d_y = torch.zeros_like(y).index_copy_(0, places.reshape(-1), d_rows)
    return d_y, (g * chosen).sum(-1).to(weights.dtype)


combine_experts_backward = operator(
    "combine_experts_backward",
    "(Tensor d_out, Tensor y, Tensor places, Tensor weights) -> (Tensor, Tensor)",
    _combine_backward,
    lambda d_out, y, places, weights: (torch.empty_like(y), torch.empty_like(weights)),
)


def _save_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _combine_gradients(ctx: Any, d_out: Tensor) -> Any:
    d_y, d_weights = combine_experts_backward(d_out, *ctx.saved_tensors)
    return d_y, None, d_weights


combine_experts = operator(
    "combine_experts",
    "(Tensor y, Tensor places, Tensor weights) -> Tensor",
    _combine,
    lambda y, places, weights: y.new_empty(places.shape[0], y.shape[1]),
    _combine_gradients,
    _save_combine,
)
