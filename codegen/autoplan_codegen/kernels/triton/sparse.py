"""Kernels of sparse attention: the indexer's scores of a block of rows, and attention to selected keys.

A program has one row and the query heads of one key-value head (all of them where keys are shared, as in
MLA), and gathers the row's keys block by block. The gradients of keys and values are added up atomically in
fp32: which rows chose a key is known to the data alone.
"""
# pyright: reportMissingParameterType=false, reportConstantRedefinition=false
# - a kernel's arguments are Triton's pointers (upper case) and numbers, without types in Python

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from autoplan_codegen.kernels.triton.language import constexpr, interpreted, jit
from autoplan_codegen.kernels.triton.tiles import power_of_two


@jit
def scores_kernel(
    Q, K, W, OUT, heads, rows, columns, size, start,
    q_sample, q_row, q_head, k_sample, k_row, w_sample, w_row,
    CAUSAL: constexpr, SIZE: constexpr, PRECISION: constexpr, ROWS: constexpr, COLUMNS: constexpr,
):  # fmt: skip
    sample = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    at = tl.arange(0, SIZE)
    here = (row < rows)[:, None] & (column < columns)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    if not CAUSAL or tl.program_id(0) * COLUMNS <= start + tl.program_id(1) * ROWS + ROWS - 1:
        k = K + sample * k_sample + column[:, None].to(tl.int64) * k_row + at[None, :]
        k = tl.load(k, mask=(column < columns)[:, None] & (at < size)[None, :], other=0.0)
        for head in range(heads):
            q = Q + sample * q_sample + row[:, None].to(tl.int64) * q_row + head * q_head + at[None, :]
            q = tl.load(q, mask=(row < rows)[:, None] & (at < size)[None, :], other=0.0)
            w = tl.load(W + sample * w_sample + row * w_row + head, mask=row < rows, other=0.0).to(tl.float32)
            total += tl.maximum(tl.dot(q, tl.trans(k), input_precision=PRECISION), 0.0) * w[:, None]
    if CAUSAL:
        total = tl.where(column[None, :] <= start + row[:, None], total, -float("inf"))
    tl.store(OUT + (sample * rows + row[:, None]) * columns + column[None, :], total, mask=here)


@jit
def chosen_scores(q, K, KEYS, first, count, k_row, size, scale, N: constexpr, HEAD: constexpr,
    PRECISION: constexpr,
):  # fmt: skip
    """Scores in powers of two [heads, N] of the next keys, the keys' rows, and where there are any."""
    place = first + tl.arange(0, N)
    key = tl.load(KEYS + place, mask=place < count, other=-1)
    at = tl.arange(0, HEAD)[None, :]
    there = (key >= 0)[:, None] & (at < size)
    k = tl.load(K + key[:, None].to(tl.int64) * k_row + at, mask=there, other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * 1.4426950408889634)
    return tl.where((key >= 0)[None, :], scores, -float("inf")), k, key


@jit
def sparse_forward(
    Q, K, V, KEYS, OUT, LOG_SUM, heads, shared, rows, count, size, v_size, scale,
    q_sample, q_head, q_row, k_sample, k_head, k_row, v_sample, v_head, v_row,
    GROUP: constexpr, HEAD: constexpr, V_HEAD: constexpr, PRECISION: constexpr, N: constexpr,
):  # fmt: skip
    row, sample = tl.program_id(0).to(tl.int64), (tl.program_id(1) // shared).to(tl.int64)
    owner, group = tl.program_id(1) % shared, heads // shared
    member = tl.arange(0, GROUP)
    head = (owner * group + member).to(tl.int64)
    at, v_at = tl.arange(0, HEAD)[None, :], tl.arange(0, V_HEAD)[None, :]
    q = Q + sample * q_sample + row * q_row + head[:, None] * q_head + at
    q = tl.load(q, mask=(member < group)[:, None] & (at < size), other=0.0)
    K += sample * k_sample + owner * k_head
    V += sample * v_sample + owner * v_head
    KEYS += (sample * rows + row) * count
    out = tl.zeros((GROUP, V_HEAD), tl.float32)
    sums = tl.zeros((GROUP,), tl.float32)
    top = tl.full((GROUP,), -float("inf"), tl.float32)
    for first in range(0, count, N):
        scores, _, key = chosen_scores(q, K, KEYS, first, count, k_row, size, scale, N, HEAD, PRECISION)
        v = V + key[:, None].to(tl.int64) * v_row + v_at
        v = tl.load(v, mask=(key >= 0)[:, None] & (v_at < v_size), other=0.0)
        new = tl.maximum(top, tl.max(scores, 1))
        safe = tl.where(new == -float("inf"), 0.0, new)
        weights, keep = tl.exp2(scores - safe[:, None]), tl.exp2(top - safe)
        sums = sums * keep + tl.sum(weights, 1)
        out = tl.dot(weights.to(v.dtype), v, out * keep[:, None], input_precision=PRECISION)
        top = new
    none = sums == 0.0
    sums = tl.where(none, 1.0, sums)
    place = (sample * heads + head) * rows + row
    inside = (member < group)[:, None] & (v_at < v_size)
    tl.store(
        OUT + place[:, None] * v_size + v_at, (out / sums[:, None]).to(OUT.dtype.element_ty), mask=inside
    )
    log_sum = tl.where(none, -float("inf"), (top + tl.log2(sums)) * 0.6931471805599453)
    tl.store(LOG_SUM + place, log_sum, mask=member < group)


@jit
def sparse_backward(
    Q, K, V, KEYS, OUT, G, LOG_SUM, D_Q, D_K, D_V, heads, shared, rows, columns, count, size, v_size, scale,
    q_sample, q_head, q_row, k_sample, k_head, k_row, v_sample, v_head, v_row,
    GROUP: constexpr, HEAD: constexpr, V_HEAD: constexpr, PRECISION: constexpr, N: constexpr,
):  # fmt: skip
    row, sample = tl.program_id(0).to(tl.int64), (tl.program_id(1) // shared).to(tl.int64)
    owner, group = tl.program_id(1) % shared, heads // shared
    member = tl.arange(0, GROUP)
    head = (owner * group + member).to(tl.int64)
    at, v_at = tl.arange(0, HEAD)[None, :], tl.arange(0, V_HEAD)[None, :]
    mine, v_mine = (member < group)[:, None] & (at < size), (member < group)[:, None] & (v_at < v_size)
    q = tl.load(Q + sample * q_sample + row * q_row + head[:, None] * q_head + at, mask=mine, other=0.0)
    place = (sample * heads + head) * rows + row
    g = tl.load(G + place[:, None] * v_size + v_at, mask=v_mine, other=0.0)
    out = tl.load(OUT + place[:, None] * v_size + v_at, mask=v_mine, other=0.0)
    means = tl.expand_dims(tl.sum(out.to(tl.float32) * g.to(tl.float32), 1), 1)
    log_sum = tl.load(LOG_SUM + place, mask=member < group, other=float("inf"))
    log_sum = tl.expand_dims(tl.where(log_sum == -float("inf"), 0.0, log_sum), 1) * 1.4426950408889634
    K += sample * k_sample + owner * k_head
    V += sample * v_sample + owner * v_head
    KEYS += (sample * rows + row) * count
    own = (sample * shared + owner) * columns
    d_q = tl.zeros((GROUP, HEAD), tl.float32)
    for first in range(0, count, N):
        scores, k, key = chosen_scores(q, K, KEYS, first, count, k_row, size, scale, N, HEAD, PRECISION)
        there, v_there = (key >= 0)[:, None] & (at < size), (key >= 0)[:, None] & (v_at < v_size)
        v = tl.load(V + key[:, None].to(tl.int64) * v_row + v_at, mask=v_there, other=0.0)
        weights = tl.exp2(scores - log_sum)
        slopes = weights * (tl.dot(g, tl.trans(v), input_precision=PRECISION) - means) * scale
        d_q = tl.dot(slopes.to(k.dtype), k, d_q, input_precision=PRECISION)
        d_k = tl.dot(tl.trans(slopes.to(q.dtype)), q, input_precision=PRECISION)
        d_v = tl.dot(tl.trans(weights.to(g.dtype)), g, input_precision=PRECISION)
        tl.atomic_add(D_K + (own + key[:, None]) * size + at, d_k, mask=there, sem="relaxed")
        tl.atomic_add(D_V + (own + key[:, None]) * v_size + v_at, d_v, mask=v_there, sem="relaxed")
    tl.store(D_Q + place[:, None] * size + at, d_q.to(D_Q.dtype.element_ty), mask=mine)


# --- launches ----------------------------------------------------------------------------------------


def _rows_next(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


def scores(q: Tensor, k: Tensor, weights: Tensor, start: int, causal: bool) -> Tensor:
    """fp32 [samples, rows, columns] of the rows from ``start``; -inf where a row does not see a column."""
    q, k, weights = (_rows_next(x) for x in (q, k, weights))
    (samples, rows, heads, size), columns = q.shape, k.shape[1]
    out = q.new_empty(samples, rows, columns, dtype=torch.float32)
    tile = (16, 16) if interpreted() else (64, 128)
    scores_kernel[(triton.cdiv(columns, tile[1]), triton.cdiv(rows, tile[0]), samples)](
        q, k, weights, out, heads, rows, columns, size, start, *q.stride()[:3], *k.stride()[:2],
        *weights.stride()[:2], CAUSAL=causal, SIZE=max(16, power_of_two(size)), PRECISION=_precision(q),
        ROWS=tile[0], COLUMNS=tile[1], num_warps=4,
    )  # fmt: skip
    return out


def _constants(q: Tensor, k: Tensor, v: Tensor, keys: Tensor) -> dict[str, Any]:
    return {
        "GROUP": max(16, power_of_two(q.shape[1] // k.shape[1])),
        "HEAD": max(16, power_of_two(q.shape[-1])),
        "V_HEAD": max(16, power_of_two(v.shape[-1])),
        "PRECISION": _precision(q),
        "N": max(16, min(power_of_two(keys.shape[-1]), 32)),
        "num_warps": 8,
        "num_stages": 2,
    }


def sparse_attention(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    q, k, v, keys = *(_rows_next(x) for x in (q, k, v)), keys.contiguous()
    (samples, heads, rows, size), shared = q.shape, k.shape[1]
    out = q.new_empty(samples, heads, rows, v.shape[-1])
    log_sum = q.new_empty(samples, heads, rows, dtype=torch.float32)
    numbers = (heads, shared, rows, keys.shape[-1], size, v.shape[-1], scale)
    strides = [s for x in (q, k, v) for s in x.stride()[:3]]
    constants = _constants(q, k, v, keys)
    sparse_forward[(rows, samples * shared)](q, k, v, keys, out, log_sum, *numbers, *strides, **constants)
    return out, log_sum


def sparse_attention_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, out: Tensor, log_sum: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, keys = *(_rows_next(x) for x in (q, k, v)), keys.contiguous()
    (samples, heads, rows, size), (shared, columns) = q.shape, k.shape[1:3]
    d_q = q.new_empty(q.shape)
    d_k, d_v = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v))
    numbers = (heads, shared, rows, columns, keys.shape[-1], size, v.shape[-1], scale)
    strides = [s for x in (q, k, v) for s in x.stride()[:3]]
    sparse_backward[(rows, samples * shared)](
        q, k, v, keys, out.contiguous(), d_out.contiguous(), log_sum, d_q, d_k, d_v, *numbers, *strides,
        **_constants(q, k, v, keys),
    )  # fmt: skip
    return d_q, d_k.to(k.dtype), d_v.to(v.dtype)
