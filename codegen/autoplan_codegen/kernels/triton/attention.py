"""Kernels of attention: scores stay in registers, forward and backward (FlashAttention-2, arXiv 2307.08691).

A program of the forward and of d_q has a block of rows and goes over the columns that they see; one of d_k
and d_v has a block of columns and goes over the rows, of every query head of its group, that see it. Only
the blocks at the edges of what is seen are masked. Tiles are tuned once for a chip, head size, sequence and
kind of mask.
"""
# pyright: reportMissingParameterType=false, reportConstantRedefinition=false
# - a kernel's arguments are Triton's pointers (upper case) and numbers, without types in Python

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from autoplan_codegen.kernels.triton.language import constexpr, jit
from autoplan_codegen.kernels.triton.tiles import power_of_two, tuned

KEY = ["HEAD", "CAUSAL", "WINDOWED", "LENGTH"]


@jit
def tile(X, first, length, stride, size, BLOCK: constexpr, HEAD: constexpr, EVEN: constexpr):
    """Rows [BLOCK, HEAD] from ``first``, 0 outside."""
    row = (first + tl.arange(0, BLOCK))[:, None]
    at = tl.arange(0, HEAD)[None, :]
    inside = row < length
    if not EVEN:
        inside = inside & (at < size)
    return tl.load(X + row.to(tl.int64) * stride + at, mask=inside, other=0.0)


@jit
def seen(row, column, rows, columns, window, CAUSAL: constexpr, WINDOWED: constexpr):
    inside = (row < rows) & (column < columns)
    if CAUSAL:
        inside = inside & (column <= row)
    if WINDOWED:
        inside = inside & (column > row - window)
    return inside


@jit
def columns_seen(
    start,
    columns,
    window,
    CAUSAL: constexpr,
    WINDOWED: constexpr,
    ROWS: constexpr,
    COLUMNS: constexpr,
):
    """Where the columns begin that some row of a block sees, all rows see, no longer all, and no more."""
    low = 0
    all_low = 0
    all_high = columns // COLUMNS * COLUMNS
    high = columns
    if CAUSAL:
        high = tl.minimum(columns, start + ROWS)
        all_high = tl.minimum(all_high, (start + 1) // COLUMNS * COLUMNS)
    if WINDOWED:
        low = tl.maximum(0, start - window + 1) // COLUMNS * COLUMNS
        all_low = tl.cdiv(tl.maximum(0, start + ROWS - window), COLUMNS) * COLUMNS
    all_high = tl.maximum(all_high, low)
    return low, tl.minimum(tl.maximum(all_low, low), all_high), all_high, high


@jit
def rows_seeing(
    start, rows, window, CAUSAL: constexpr, WINDOWED: constexpr, ROWS: constexpr, COLUMNS: constexpr
):
    """The first and the last of the rows that see a block of columns."""
    low = start // ROWS * ROWS if CAUSAL else 0
    high = tl.minimum(rows, start + COLUMNS - 1 + window) if WINDOWED else rows
    return low, high


@jit
def phase_of(phase: constexpr, low, all_low, all_high, high):
    """Blocks that some see, that all see, that some see: the second phase needs no mask."""
    if phase == 0:
        first, last = low, all_low
    elif phase == 1:
        first, last = all_low, all_high
    else:
        first, last = all_high, high
    return first, last


# --- forward -----------------------------------------------------------------------------------------


@jit
def attend(
    q,
    out,
    sums,
    top,
    K,
    V,
    start,
    low,
    high,
    rows,
    columns,
    k_row,
    v_row,
    size,
    window,
    scale,
    MASKED: constexpr,
    CAUSAL: constexpr,
    WINDOWED: constexpr,
    ROWS: constexpr,
    COLUMNS: constexpr,
    HEAD: constexpr,
    EVEN: constexpr,
    PRECISION: constexpr,
):
    row = (start + tl.arange(0, ROWS))[:, None]
    for first in range(low, high, COLUMNS):
        k = tile(K, first, columns, k_row, size, COLUMNS, HEAD, EVEN)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if MASKED:
            column = (first + tl.arange(0, COLUMNS))[None, :]
            scores = tl.where(
                seen(row, column, rows, columns, window, CAUSAL, WINDOWED), scores, -float("inf")
            )
        new = tl.maximum(top, tl.max(scores, 1))
        safe = tl.where(new == -float("inf"), 0.0, new) if MASKED else new
        weights = tl.exp2(scores - safe[:, None])
        keep = tl.exp2(top - safe)
        sums = sums * keep + tl.sum(weights, 1)
        v = tile(V, first, columns, v_row, size, COLUMNS, HEAD, EVEN)
        out = tl.dot(weights.to(v.dtype), v, out * keep[:, None], input_precision=PRECISION)
        top = new
    return out, sums, top


FORWARD = [(128, 64, 8, 3), (128, 32, 4, 4), (128, 128, 8, 3), (64, 64, 4, 3)]


@tuned(FORWARD, KEY)
@jit
def attention_forward(
    Q, K, V, OUT, LOG_SUM, heads, group, rows, columns, size, window, scale,
    q_sample, q_head, q_row, k_sample, k_head, k_row, v_sample, v_head, v_row, o_sample, o_head, o_row,
    LENGTH: constexpr, CAUSAL: constexpr, WINDOWED: constexpr, HEAD: constexpr,
    EVEN: constexpr, PRECISION: constexpr, ROWS: constexpr, COLUMNS: constexpr,
):  # fmt: skip
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS  # the longest first
    sample, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    q = tile(Q + sample * q_sample + head * q_head, start, rows, q_row, size, ROWS, HEAD, EVEN)
    K += sample * k_sample + head // group * k_head
    V += sample * v_sample + head // group * v_head
    out = tl.zeros((ROWS, HEAD), tl.float32)
    sums = tl.zeros((ROWS,), tl.float32)
    top = tl.full((ROWS,), -float("inf"), tl.float32)
    low, all_low, all_high, high = columns_seen(start, columns, window, CAUSAL, WINDOWED, ROWS, COLUMNS)
    scale *= 1.4426950408889634
    for phase in tl.static_range(0 if WINDOWED else 1, 3):  # pyright: ignore[reportGeneralTypeIssues] - unrolled
        first, last = phase_of(phase, low, all_low, all_high, high)
        out, sums, top = attend(
            q, out, sums, top, K, V, start, first, last, rows, columns, k_row, v_row, size, window, scale,
            phase != 1, CAUSAL, WINDOWED, ROWS, COLUMNS, HEAD, EVEN, PRECISION,
        )  # fmt: skip
    row, at = (start + tl.arange(0, ROWS)), tl.arange(0, HEAD)[None, :]
    none = sums == 0.0  # a row that sees no key
    sums = tl.where(none, 1.0, sums)
    out = out / sums[:, None]
    place = OUT + sample * o_sample + head * o_head + row[:, None].to(tl.int64) * o_row + at
    tl.store(place, out.to(OUT.dtype.element_ty), mask=(row[:, None] < rows) & (at < size))
    log_sum = tl.where(none, -float("inf"), (top + tl.log2(sums)) * 0.6931471805599453)
    tl.store(LOG_SUM + tl.program_id(1).to(tl.int64) * rows + row, log_sum, mask=row < rows)


# --- backward ----------------------------------------------------------------------------------------


@jit
def means_kernel(OUT, D_OUT, MEANS, heads, rows, size, o_sample, o_head, o_row, d_sample, d_head, d_row,
    ROWS: constexpr, HEAD: constexpr,
):  # fmt: skip
    """sum(out * d_out) of every row."""
    sample, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    start = tl.program_id(0) * ROWS
    out = tile(OUT + sample * o_sample + head * o_head, start, rows, o_row, size, ROWS, HEAD, False)
    d_out = tile(D_OUT + sample * d_sample + head * d_head, start, rows, d_row, size, ROWS, HEAD, False)
    row = start + tl.arange(0, ROWS)
    means = tl.sum(out.to(tl.float32) * d_out.to(tl.float32), 1)
    tl.store(MEANS + tl.program_id(1).to(tl.int64) * rows + row, means, mask=row < rows)


@jit
def weights_and_slopes(
    q, k, v, g, log_sum, means, row, column, rows, columns, window, scale,
    MASKED: constexpr, CAUSAL: constexpr, WINDOWED: constexpr, PRECISION: constexpr,
):  # fmt: skip
    """Softmax weights of [rows, columns] and the gradient of the scores, before the scale."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * 1.4426950408889634)
    weights = tl.exp2(scores - log_sum[:, None])
    if MASKED:
        weights = tl.where(seen(row, column, rows, columns, window, CAUSAL, WINDOWED), weights, 0.0)
    slopes = weights * (tl.dot(g, tl.trans(v), input_precision=PRECISION) - means[:, None])
    return weights, slopes


@jit
def numbers_of(X, first, rows, BLOCK: constexpr):
    row = first + tl.arange(0, BLOCK)
    return tl.load(X + row, mask=row < rows, other=0.0)


@jit
def add_columns(
    d_k, d_v, k, v, Q, G, LOG_SUM, MEANS, start, low, high, rows, columns, q_row, g_row, size, window, scale,
    CAUSAL: constexpr, WINDOWED: constexpr, ROWS: constexpr, COLUMNS: constexpr,
    HEAD: constexpr, EVEN: constexpr, PRECISION: constexpr,
):  # fmt: skip
    column = (start + tl.arange(0, COLUMNS))[None, :]
    for first in range(low, high, ROWS):
        q = tile(Q, first, rows, q_row, size, ROWS, HEAD, EVEN)
        g = tile(G, first, rows, g_row, size, ROWS, HEAD, EVEN)
        log_sum, means = numbers_of(LOG_SUM, first, rows, ROWS), numbers_of(MEANS, first, rows, ROWS)
        weights, slopes = weights_and_slopes(
            q, k, v, g, log_sum * 1.4426950408889634, means, (first + tl.arange(0, ROWS))[:, None], column,
            rows, columns, window, scale, True, CAUSAL, WINDOWED, PRECISION,
        )  # fmt: skip
        d_v = tl.dot(tl.trans(weights.to(g.dtype)), g, d_v, input_precision=PRECISION)
        d_k = tl.dot(tl.trans(slopes.to(q.dtype)), q, d_k, input_precision=PRECISION)
    return d_k, d_v


BY_COLUMNS = [(32, 64, 8, 2), (64, 32, 4, 1), (32, 128, 8, 2), (64, 64, 8, 2)]


@tuned(BY_COLUMNS, KEY)
@jit
def columns_backward(
    Q, K, V, G, LOG_SUM, MEANS, D_K, D_V, heads, group, rows, columns, size, window, scale,
    q_sample, q_head, q_row, k_sample, k_head, k_row, v_sample, v_head, v_row, g_sample, g_head, g_row,
    LENGTH: constexpr, CAUSAL: constexpr, WINDOWED: constexpr, HEAD: constexpr,
    EVEN: constexpr, PRECISION: constexpr, ROWS: constexpr, COLUMNS: constexpr,
):  # fmt: skip
    """``heads`` are those of keys and values."""
    start = tl.program_id(0) * COLUMNS
    sample, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    k = tile(K + sample * k_sample + head * k_head, start, columns, k_row, size, COLUMNS, HEAD, EVEN)
    v = tile(V + sample * v_sample + head * v_head, start, columns, v_row, size, COLUMNS, HEAD, EVEN)
    d_k = tl.zeros((COLUMNS, HEAD), tl.float32)
    d_v = tl.zeros((COLUMNS, HEAD), tl.float32)
    low, high = rows_seeing(start, rows, window, CAUSAL, WINDOWED, ROWS, COLUMNS)
    for member in range(group):
        own = head * group + member
        numbers = (sample * heads * group + own) * rows
        q, g = Q + sample * q_sample + own * q_head, G + sample * g_sample + own * g_head
        d_k, d_v = add_columns(
            d_k, d_v, k, v, q, g, LOG_SUM + numbers, MEANS + numbers, start, low, high, rows, columns, q_row,
            g_row, size, window, scale, CAUSAL, WINDOWED, ROWS, COLUMNS, HEAD, EVEN, PRECISION,
        )  # fmt: skip
    column, at = (start + tl.arange(0, COLUMNS))[:, None], tl.arange(0, HEAD)[None, :]
    place = (tl.program_id(1).to(tl.int64) * columns + column) * size + at
    inside = (column < columns) & (at < size)
    tl.store(D_K + place, (d_k * scale).to(D_K.dtype.element_ty), mask=inside)
    tl.store(D_V + place, d_v.to(D_V.dtype.element_ty), mask=inside)


@jit
def add_rows(
    d_q, q, g, log_sum, means, K, V, start, low, high, rows, columns, k_row, v_row, size, window, scale,
    MASKED: constexpr, CAUSAL: constexpr, WINDOWED: constexpr,
    ROWS: constexpr, COLUMNS: constexpr, HEAD: constexpr, EVEN: constexpr, PRECISION: constexpr,
):  # fmt: skip
    row = (start + tl.arange(0, ROWS))[:, None]
    for first in range(low, high, COLUMNS):
        k = tile(K, first, columns, k_row, size, COLUMNS, HEAD, EVEN)
        v = tile(V, first, columns, v_row, size, COLUMNS, HEAD, EVEN)
        _, slopes = weights_and_slopes(
            q, k, v, g, log_sum, means, row, (first + tl.arange(0, COLUMNS))[None, :],
            rows, columns, window, scale, MASKED, CAUSAL, WINDOWED, PRECISION,
        )  # fmt: skip
        d_q = tl.dot(slopes.to(k.dtype), k, d_q, input_precision=PRECISION)
    return d_q


BY_ROWS = [(64, 32, 4, 2), (64, 64, 4, 2), (128, 64, 8, 2)]


@tuned(BY_ROWS, KEY)
@jit
def rows_backward(
    Q, K, V, G, LOG_SUM, MEANS, D_Q, heads, group, rows, columns, size, window, scale,
    q_sample, q_head, q_row, k_sample, k_head, k_row, v_sample, v_head, v_row, g_sample, g_head, g_row,
    LENGTH: constexpr, CAUSAL: constexpr, WINDOWED: constexpr, HEAD: constexpr,
    EVEN: constexpr, PRECISION: constexpr, ROWS: constexpr, COLUMNS: constexpr,
):  # fmt: skip
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    sample, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    q = tile(Q + sample * q_sample + head * q_head, start, rows, q_row, size, ROWS, HEAD, EVEN)
    g = tile(G + sample * g_sample + head * g_head, start, rows, g_row, size, ROWS, HEAD, EVEN)
    numbers = tl.program_id(1).to(tl.int64) * rows
    log_sum = numbers_of(LOG_SUM + numbers, start, rows, ROWS) * 1.4426950408889634
    means = numbers_of(MEANS + numbers, start, rows, ROWS)
    K += sample * k_sample + head // group * k_head
    V += sample * v_sample + head // group * v_head
    d_q = tl.zeros((ROWS, HEAD), tl.float32)
    low, all_low, all_high, high = columns_seen(start, columns, window, CAUSAL, WINDOWED, ROWS, COLUMNS)
    for phase in tl.static_range(0 if WINDOWED else 1, 3):  # pyright: ignore[reportGeneralTypeIssues] - unrolled
        first, last = phase_of(phase, low, all_low, all_high, high)
        d_q = add_rows(
            d_q, q, g, log_sum, means, K, V, start, first, last, rows, columns, k_row, v_row, size, window,
            scale, phase != 1, CAUSAL, WINDOWED, ROWS, COLUMNS, HEAD, EVEN, PRECISION,
        )  # fmt: skip
    row, at = (start + tl.arange(0, ROWS))[:, None], tl.arange(0, HEAD)[None, :]
    place = D_Q + (numbers + row) * size + at
    tl.store(place, (d_q * scale).to(D_Q.dtype.element_ty), mask=(row < rows) & (at < size))


# --- launches ----------------------------------------------------------------------------------------


def options(q: Tensor, causal: bool, window: int) -> dict[str, Any]:
    """The constants of a launch; LENGTH (the sequence, rounded up) is there for the tuning alone."""
    size = q.shape[-1]
    return {
        "LENGTH": power_of_two(q.shape[2]),
        "CAUSAL": causal,
        "WINDOWED": causal and 0 < window < q.shape[2],
        "HEAD": max(16, power_of_two(size)),
        "EVEN": size == max(16, power_of_two(size)),
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
    }


def _rows_next(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    q, k, v = (_rows_next(x) for x in (q, k, v))
    (samples, heads, rows, size), columns = q.shape, k.shape[2]
    out, log_sum = q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=torch.float32)
    strides = [s for x in (q, k, v, out) for s in x.stride()[:3]]
    numbers = (heads, heads // k.shape[1], rows, columns, size, window, scale)

    def grid(chosen: dict[str, Any]) -> tuple[int, int]:
        return triton.cdiv(rows, chosen["ROWS"]), samples * heads

    attention_forward[grid](q, k, v, out, log_sum, *numbers, *strides, **options(q, causal, window))
    return out, log_sum


def attention_backward(
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
    q, k, v, g, out = (_rows_next(x) for x in (q, k, v, d_out, out))
    (samples, heads, rows, size), columns, shared = q.shape, k.shape[2], k.shape[1]
    constants = options(q, causal, window)
    log_sum = log_sum.masked_fill(log_sum == -float("inf"), float("inf"))  # rows that see no key
    means, (d_q, d_k, d_v) = torch.empty_like(log_sum), (x.new_empty(x.shape) for x in (q, k, v))
    means_kernel[(triton.cdiv(rows, 16), samples * heads)](
        out, g, means, heads, rows, size, *out.stride()[:3], *g.stride()[:3], ROWS=16, HEAD=constants["HEAD"]
    )  # fmt: skip
    strides = [s for x in (q, k, v, g) for s in x.stride()[:3]]
    numbers = (heads // shared, rows, columns, size, window, scale)

    def by_columns(chosen: dict[str, Any]) -> tuple[int, int]:
        return triton.cdiv(columns, chosen["COLUMNS"]), samples * shared

    def by_rows(chosen: dict[str, Any]) -> tuple[int, int]:
        return triton.cdiv(rows, chosen["ROWS"]), samples * heads

    columns_backward[by_columns](
        q, k, v, g, log_sum, means, d_k, d_v, shared, *numbers, *strides, **constants
    )
    rows_backward[by_rows](q, k, v, g, log_sum, means, d_q, heads, *numbers, *strides, **constants)
    return d_q, d_k, d_v
