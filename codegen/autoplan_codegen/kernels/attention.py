"""Causal, sliding-window and full attention with grouped heads, in row blocks: scores never exist as a whole.

q [samples, heads, rows, size], k and v [samples, key-value heads, columns, size]; row i sees columns up to
i where ``causal``, and of these the last ``window`` where that is above 0. Saved for backward: q, k, v, the
output and the log-sum-exp of each row (FlashAttention, arXiv 2205.14135). The log-sum-exp is an output
without gradient.
"""
# pyright: reportUnknownLambdaType=false
# - an operator's lambdas take what its schema says

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autoplan_codegen.kernels.operators import launcher, operator, runs_triton, wide, wide_dtype
from autoplan_passes.ring import attend_block, attend_block_backward

LARGEST_HEAD = 256


def window_mask(rows: int, columns: int, window: int, device: torch.device) -> Tensor:
    """What a causal window sees, [rows, columns]."""
    distance = torch.arange(rows, device=device).unsqueeze(-1) - torch.arange(columns, device=device)
    return (distance >= 0) & (distance < window)


def _masked(q: Tensor, k: Tensor, causal: bool, window: int) -> tuple[Tensor | None, bool]:
    """The mask that plain PyTorch needs, and whether ``causal`` is left to say beside it."""
    if not causal or window <= 0 or window >= q.shape[-2]:
        return None, causal
    return window_mask(q.shape[-2], k.shape[-2], window, q.device), False


def _serves(q: Tensor, k: Tensor, v: Tensor) -> bool:
    same = q.shape[-1] == v.shape[-1] <= LARGEST_HEAD and q.dtype == k.dtype == v.dtype
    return same and runs_triton(q, k, v)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    if _serves(q, k, v):
        return launcher("attention").attention(q, k, v, causal, window, scale)
    if q.numel() == 0 or k.numel() == 0:
        return tuple(x.zero_() for x in _fake(q, k, v, causal, window, scale))  # pyright: ignore[reportReturnType] - two of two
    group, (mask, causal) = q.shape[1] // k.shape[1], _masked(q, k, causal, window)
    k, v = (x.repeat_interleave(group, 1) if group > 1 else x for x in (k, v))
    out, log_sum = attend_block(q, k, v, mask, causal, scale)
    return out.to(q.dtype).contiguous(), log_sum.to(wide_dtype(q.dtype)).contiguous()


def _fake(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int, scale: float) -> tuple[Tensor, Tensor]:
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    return out, q.new_empty(q.shape[:-1], dtype=wide_dtype(q.dtype))


def _backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sum: Tensor,
    causal: bool,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    if _serves(q, k, v):
        return launcher("attention").attention_backward(d_out, q, k, v, out, log_sum, causal, window, scale)
    if q.numel() == 0 or k.numel() == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    heads, (mask, causal) = (q.shape[1], k.shape[1]), _masked(q, k, causal, window)
    group = heads[0] // heads[1]
    k, v = (x.repeat_interleave(group, 1) if group > 1 else x for x in (k, v))
    d_q, d_k, d_v = attend_block_backward(d_out.contiguous(), (q, k, v, mask), out, log_sum, causal, scale)
    d_k, d_v = (wide(x).unflatten(1, (heads[1], -1)).sum(2) for x in (d_k, d_v))
    return d_q.to(q.dtype).contiguous(), d_k.to(k.dtype), d_v.to(v.dtype)


attention_backward = operator(
    "attention_backward",
    "(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor log_sum, bool causal, int window,"
    " float scale) -> (Tensor, Tensor, Tensor)",
    _backward,
    lambda d_out, q, k, v, *_: tuple(x.new_empty(x.shape) for x in (q, k, v)),
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.causal, ctx.window, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx: Any, d_out: Tensor, _d_log_sum: Tensor) -> Any:
    options = (ctx.causal, ctx.window, ctx.scale)
    return *attention_backward(d_out, *ctx.saved_tensors, *options), None, None, None


attention = operator(
    "attention",
    "(Tensor q, Tensor k, Tensor v, bool causal, int window, float scale) -> (Tensor, Tensor)",
    _attention,
    _fake,
    _gradients,
    _save,
)
