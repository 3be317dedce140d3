"""RMSNorm and LayerNorm over the last dim, with or without the residual added first.

``sum = x + residual; y = (sum - mean) * rsqrt(variance + eps) * weight + bias``, mean 0 for RMSNorm;
computed in fp32, rounded once to the dtype of x. Saved for backward: the normalised input (``sum``, or x)
and the weight; a row's statistics are computed again from the row, which backward reads anyway.
"""
# pyright: reportUnknownLambdaType=false
# - an operator's lambdas take what its schema says

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autoplan_codegen.kernels.operators import (
    LARGEST_ROW,
    launcher,
    none_if_empty,
    operator,
    runs_triton,
    wide,
)

Pair = tuple[Tensor, Tensor]


def _normalised(x: Tensor, eps: float, centred: bool) -> Pair:
    """The rows of x at mean 0 (if centred) and mean square 1, and the factor of each row."""
    x = wide(x)
    x = x - x.mean(-1, keepdim=True) if centred else x
    factor = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * factor, factor


def _norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool) -> Tensor:
    if x.shape[-1] <= LARGEST_ROW and runs_triton(x, weight, bias):
        return launcher("norms").norm(x, None, weight, bias, eps, centred)[0]
    y, _ = _normalised(x, eps, centred)
    y = y if weight is None else y * wide(weight)
    return (y if bias is None else y + wide(bias)).to(x.dtype).contiguous()


def _add_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool
) -> Pair:
    if x.shape[-1] <= LARGEST_ROW and runs_triton(x, residual, weight, bias):
        return launcher("norms").norm(x, residual, weight, bias, eps, centred)
    total = (x + residual).contiguous()
    return _norm(total, weight, bias, eps, centred), total


# --- the gradient of all of them ---------------------------------------------------------------------


def _backward(
    d_y: Tensor, d_sum: Tensor | None, x: Tensor, weight: Tensor | None, eps: float, centred: bool, bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the normalised input, the weight and the bias (empty where there is none)."""
    if x.shape[-1] <= LARGEST_ROW and runs_triton(d_y, d_sum, x, weight):
        return launcher("norms").norm_backward(d_y, d_sum, x, weight, eps, centred, bias)
    hat, factor = _normalised(x, eps, centred)
    g = wide(d_y) if weight is None else wide(d_y) * wide(weight)
    d_x = g - hat * (g * hat).mean(-1, keepdim=True)
    d_x = factor * (d_x - g.mean(-1, keepdim=True) if centred else d_x)
    d_x = (d_x if d_sum is None else d_x + wide(d_sum)).to(x.dtype).contiguous()
    rows = wide(d_y).reshape(-1, x.shape[-1])
    d_weight = x.new_empty(0) if weight is None else (rows * hat.reshape(rows.shape)).sum(0).to(weight.dtype)
    d_bias = rows.sum(0).to(x.dtype if weight is None else weight.dtype) if bias else x.new_empty(0)
    return d_x, d_weight, d_bias


def _fake_backward(
    d_y: Tensor, d_sum: Tensor | None, x: Tensor, weight: Tensor | None, eps: float, centred: bool, bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    size, like = x.shape[-1], x if weight is None else weight
    d_weight = x.new_empty(0) if weight is None else like.new_empty(size)
    return x.new_empty(x.shape), d_weight, like.new_empty(size) if bias else x.new_empty(0)


norm_backward = operator(
    "norm_backward",
    "(Tensor d_y, Tensor? d_sum, Tensor x, Tensor? weight, float eps, bool centred, bool bias)"
    " -> (Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keeps the normalised input and the weight; inputs are (x, [residual,] weight, [bias,] eps)."""
    ctx.set_materialize_grads(False)
    *tensors, ctx.eps = inputs
    total, first = (output[1], 2) if isinstance(output, tuple) else (inputs[0], 1)
    ctx.biased = len(tensors) > first + 1 and tensors[first + 1] is not None
    ctx.tensors, ctx.first = len(tensors), first
    ctx.save_for_backward(total, tensors[first])


def _gradients(ctx: Any, centred: bool, d_y: Tensor | None, d_sum: Tensor | None = None) -> Any:
    total, weight = ctx.saved_tensors
    d_x, parameters = d_sum, [None, None]
    if d_y is not None:
        d_x, d_weight, d_bias = norm_backward(d_y, d_sum, total, weight, ctx.eps, centred, ctx.biased)
        parameters = [none_if_empty(d_weight, weight is not None), none_if_empty(d_bias, ctx.biased)]
    return *[d_x] * ctx.first, *parameters[: ctx.tensors - ctx.first], None


def _rms_gradients(ctx: Any, *gradients: Tensor | None) -> Any:
    return _gradients(ctx, False, *gradients)


def _layer_gradients(ctx: Any, *gradients: Tensor | None) -> Any:
    return _gradients(ctx, True, *gradients)


# --- the operators -----------------------------------------------------------------------------------

rms_norm = operator(
    "rms_norm",
    "(Tensor x, Tensor? weight, float eps) -> Tensor",
    lambda x, weight, eps: _norm(x, weight, None, eps, False),
    lambda x, weight, eps: x.new_empty(x.shape),
    _rms_gradients,
    _save,
)
add_rms_norm = operator(
    "add_rms_norm",
    "(Tensor x, Tensor residual, Tensor? weight, float eps) -> (Tensor, Tensor)",
    lambda x, residual, weight, eps: _add_norm(x, residual, weight, None, eps, False),
    lambda x, residual, weight, eps: (x.new_empty(x.shape), x.new_empty(x.shape)),
    _rms_gradients,
    _save,
)
layer_norm = operator(
    "layer_norm",
    "(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor",
    lambda x, weight, bias, eps: _norm(x, weight, bias, eps, True),
    lambda x, weight, bias, eps: x.new_empty(x.shape),
    _layer_gradients,
    _save,
)
add_layer_norm = operator(
    "add_layer_norm",
    "(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor)",
    lambda x, residual, weight, bias, eps: _add_norm(x, residual, weight, bias, eps, True),
    lambda x, residual, weight, bias, eps: (x.new_empty(x.shape), x.new_empty(x.shape)),
    _layer_gradients,
    _save,
)
