"""Rotary position embedding by halves: ``x * cos + rotate_half(x) * sin``, rotate_half(x) = (-second, first).

``cos`` and ``sin`` broadcast against x, as in Hugging Face's models; where their last dim is shorter than
x's, the rest of x passes through. Saved for backward: cos and sin (x only where they want a gradient).
"""
# pyright: reportUnknownLambdaType=false
# - an operator's lambdas take what its schema says

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autoplan_codegen.kernels.operators import launcher, operator, runs_triton, wide


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    """Forward, or its transpose: ``x * cos + rotate_half^T(x * sin)``, where rotate_half^T = -rotate_half."""
    if runs_triton(x, cos, sin) and launcher("rotary").head_dim(x, cos, sin) is not None:
        return launcher("rotary").rotary(x, cos, sin, back)
    size = cos.shape[-1]
    turned, rest = wide(x[..., :size]), x[..., size:]
    c, s = wide(cos), wide(sin)
    y = turned * c - rotate_half(turned * s) if back else turned * c + rotate_half(turned) * s
    out = torch.empty_like(x)
    out[..., :size], out[..., size:] = y.to(x.dtype), rest
    return out


def _fake(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.empty_like(x)


rotary_backward = operator(
    "rotary_backward",
    "(Tensor d_y, Tensor cos, Tensor sin) -> Tensor",
    lambda d_y, cos, sin: _rotated(d_y, cos, sin, True),
    _fake,
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, cos, sin = inputs
    tables = cos.requires_grad or sin.requires_grad
    ctx.save_for_backward(cos, sin, *((x,) if tables else ()))


def _gradients(ctx: Any, d_y: Tensor) -> Any:
    cos, sin, *rest = ctx.saved_tensors
    d_x = rotary_backward(d_y, cos, sin)
    if not rest:
        return d_x, None, None
    x, g = wide(rest[0][..., : cos.shape[-1]]), wide(d_y[..., : cos.shape[-1]])
    d_cos = (g * x).sum_to_size(cos.shape).to(cos.dtype)
    return d_x, d_cos, (g * rotate_half(x)).sum_to_size(sin.shape).to(sin.dtype)


rotary = operator(
    "rotary",
    "(Tensor x, Tensor cos, Tensor sin) -> Tensor",
    lambda x, cos, sin: _rotated(x, cos, sin, False),
    _fake,
    _gradients,
    _save,
)
