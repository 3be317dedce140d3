"""Activations in one pass: SwiGLU and GeGLU of two halves, and bias + GELU + dropout.

Saved for backward: the inputs alone (the gate's activation is computed again; the dropout mask is drawn
again from the seed and each element's place, with Philox 4x32-10 (Salmon et al., SC 2011): equal on every
device).
"""
# pyright: reportUnknownLambdaType=false
# - an operator's lambdas take what its schema says

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autoplan_codegen.kernels.operators import launcher, none_if_empty, operator, runs_triton, wide

GATES = ("silu", "gelu", "gelu_tanh")


def activation_and_slope(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """The activation at x, and its derivative there."""
    if kind == "silu":
        s = torch.sigmoid(x)
        return x * s, s * (1 + x * (1 - s))
    if kind == "gelu":
        cumulative = 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))
        return x * cumulative, cumulative + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    scale = math.sqrt(2 / math.pi)
    t = torch.tanh(scale * (x + 0.044715 * x**3))
    slope = 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * scale * (1 + 3 * 0.044715 * x * x)
    return 0.5 * x * (1 + t), slope


def gelu_kind(approximate: str) -> str:
    return "gelu_tanh" if approximate == "tanh" else "gelu"


# --- activation(gate) * up ---------------------------------------------------------------------------


def _gated(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    if runs_triton(gate, up):
        return launcher("gated").gated(gate, up, kind)
    return (activation_and_slope(wide(gate), kind)[0] * wide(up)).to(gate.dtype).contiguous()


def _gated_backward(d_y: Tensor, gate: Tensor, up: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    if runs_triton(d_y, gate, up):
        return launcher("gated").gated_backward(d_y, gate, up, kind)
    value, slope = activation_and_slope(wide(gate), kind)
    d_gate, d_up = wide(d_y) * wide(up) * slope, wide(d_y) * value
    return d_gate.to(gate.dtype).contiguous(), d_up.to(up.dtype).contiguous()


gated_backward = operator(
    "gated_backward",
    "(Tensor d_y, Tensor gate, Tensor up, str kind) -> (Tensor, Tensor)",
    _gated_backward,
    lambda d_y, gate, up, kind: (gate.new_empty(gate.shape), up.new_empty(up.shape)),
)


def _save_gated(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.kind = gelu_kind(inputs[2]) if len(inputs) > 2 else "silu"


def _gated_gradients(ctx: Any, d_y: Tensor) -> Any:
    gate, up = ctx.saved_tensors
    return *gated_backward(d_y, gate, up, ctx.kind), *(() if ctx.kind == "silu" else (None,))


swiglu = operator(
    "swiglu",
    "(Tensor gate, Tensor up) -> Tensor",
    lambda gate, up: _gated(gate, up, "silu"),
    lambda gate, up: gate.new_empty(gate.shape),
    _gated_gradients,
    _save_gated,
)
geglu = operator(
    "geglu",
    "(Tensor gate, Tensor up, str approximate) -> Tensor",
    lambda gate, up, approximate: _gated(gate, up, gelu_kind(approximate)),
    lambda gate, up, approximate: gate.new_empty(gate.shape),
    _gated_gradients,
    _save_gated,
)

# --- dropout(gelu(x + bias)) -------------------------------------------------------------------------

_LOW, _KEYS, _FACTORS = 0xFFFFFFFF, (0x9E3779B9, 0xBB67AE85), (0xD2511F53, 0xCD9E8D57)


def _product(factor: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of factor * x, both below 2^32, without leaving int64."""
    low, high = factor * (x & 0xFFFF), factor * (x >> 16)
    middle = (high & 0xFFFF) * 65536 + low
    return ((high >> 16) + (middle >> 32)) & _LOW, middle & _LOW


def uniform(seed: Tensor, rows: int, columns: int) -> Tensor:
    """Philox 4x32-10 as [rows, columns] fp32 in [0, 1): counter (column // 4, row), its words in turn."""
    place = torch.arange(-(-columns // 4), device=seed.device).repeat(rows, 1)
    c0, c1 = place, torch.arange(rows, device=seed.device).unsqueeze(-1).expand_as(place)
    c2 = c3 = torch.zeros_like(place)
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(10):
        high_0, low_0 = _product(_FACTORS[0], c0)
        high_1, low_1 = _product(_FACTORS[1], c2)
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0, k1 = (k0 + _KEYS[0]) & _LOW, (k1 + _KEYS[1]) & _LOW
    words = torch.stack([c0, c1, c2, c3], -1).flatten(1)[:, :columns]
    return torch.where(words >= 2**31, _LOW - words, words).float() * 4.6566127342e-10  # tl.rand's mapping


def _kept(x: Tensor, p: float, seed: Tensor | None) -> Tensor | None:
    """The factor of each element: 0, or 1 / (1 - p)."""
    if seed is None or p == 0:
        return None
    keep = uniform(seed, x.numel() // max(x.shape[-1], 1), x.shape[-1]).view(x.shape) >= p
    return keep.to(wide(x).dtype) / (1 - p) if p < 1 else torch.zeros_like(wide(x))


def _bias_gelu_dropout(
    x: Tensor, bias: Tensor | None, p: float, seed: Tensor | None, approximate: str
) -> Tensor:
    if runs_triton(x, bias):
        return launcher("gated").bias_gelu_dropout(x, bias, p, seed, gelu_kind(approximate))
    total = wide(x) if bias is None else wide(x) + wide(bias)
    y, kept = F.gelu(total, approximate=approximate), _kept(x, p, seed)
    return (y if kept is None else y * kept).to(x.dtype).contiguous()


def _bias_gelu_dropout_backward(
    d_y: Tensor, x: Tensor, bias: Tensor | None, p: float, seed: Tensor | None, approximate: str
) -> tuple[Tensor, Tensor]:
    if runs_triton(d_y, x, bias):
        return launcher("gated").bias_gelu_dropout_backward(d_y, x, bias, p, seed, gelu_kind(approximate))
    total, kept = wide(x) if bias is None else wide(x) + wide(bias), _kept(x, p, seed)
    d_x = activation_and_slope(total, gelu_kind(approximate))[1] * wide(d_y)
    d_x = d_x if kept is None else d_x * kept
    d_bias = x.new_empty(0) if bias is None else d_x.reshape(-1, x.shape[-1]).sum(0).to(bias.dtype)
    return d_x.to(x.dtype).contiguous(), d_bias


bias_gelu_dropout_backward = operator(
    "bias_gelu_dropout_backward",
    "(Tensor d_y, Tensor x, Tensor? bias, float p, Tensor? seed, str approximate) -> (Tensor, Tensor)",
    _bias_gelu_dropout_backward,
    lambda d_y, x, bias, p, seed, approximate: (
        x.new_empty(x.shape),
        x.new_empty(0) if bias is None else bias.new_empty(bias.shape),
    ),
)


def _save_bias_gelu(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, bias, ctx.p, seed, ctx.approximate = inputs
    ctx.save_for_backward(x, bias, seed)


def _bias_gelu_gradients(ctx: Any, d_y: Tensor) -> Any:
    x, bias, seed = ctx.saved_tensors
    d_x, d_bias = bias_gelu_dropout_backward(d_y, x, bias, ctx.p, seed, ctx.approximate)
    return d_x, none_if_empty(d_bias, bias is not None), None, None, None


bias_gelu_dropout = operator(
    "bias_gelu_dropout",
    "(Tensor x, Tensor? bias, float p, Tensor? seed, str approximate) -> Tensor",
    _bias_gelu_dropout,
    lambda x, bias, p, seed, approximate: x.new_empty(x.shape),
    _bias_gelu_gradients,
    _save_bias_gelu,
)
