"""Kernels of the experts: grouped products that gather their rows, and weighted sums of tokens' choices.

Where groups end is read on the device: the grid has as many blocks of rows as there could be (a whole one
more for each group), and each program finds its group from the ends. Rows after the last end are a group
without a weight: zeros. The gathered rows are never stored.
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
from autoplan_codegen.kernels.triton.tiles import Tile, power_of_two, rows_of, tuned

PRODUCTS = [
    (128, 128, 8, 3),
    (128, 256, 8, 3),
    (64, 128, 4, 4),
    (64, 256, 8, 3),
    (32, 128, 4, 4),
    (16, 128, 4, 4),
]
INNER = 64


@jit
def block_of(ENDS, block, experts, rows, EXPERTS: constexpr, ROWS: constexpr):
    """The group of a block of rows, its first row, its group's end; the group ``experts`` has no weight."""
    group = tl.arange(0, EXPERTS)
    end = tl.load(ENDS + group, mask=group < experts, other=0).to(tl.int32)
    end = tl.where(group == experts, rows, end)
    begin = tl.load(ENDS + group - 1, mask=(group > 0) & (group <= experts), other=0).to(tl.int32)
    blocks = tl.where(group <= experts, tl.cdiv(tl.maximum(end - begin, 0), ROWS), 0)
    after = tl.cumsum(blocks, 0)
    own = tl.sum((after <= block).to(tl.int32), 0)
    mine = group == own
    start = tl.sum(tl.where(mine, begin + (block - after + blocks) * ROWS, 0), 0)
    return own, start, tl.sum(tl.where(mine, end, 0), 0)


@tuned(PRODUCTS, ["inner", "outer", "LENGTH"])
@jit
def grouped_product_kernel(
    X, AT, W, ENDS, Y, experts, rows, inner, outer, x_stride, w_expert, w_inner, w_outer, y_stride,
    LENGTH: constexpr, EXPERTS: constexpr, INNER: constexpr, PRECISION: constexpr,
    ROWS: constexpr, COLUMNS: constexpr,
):  # fmt: skip
    group, start, end = block_of(ENDS, tl.program_id(0), experts, rows, EXPERTS, ROWS)
    if group <= experts:
        row = start + tl.arange(0, ROWS)
        here = row < end
        source = row.to(tl.int64) if AT is None else tl.load(AT + row, mask=here, other=0).to(tl.int64)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        at = tl.arange(0, INNER)
        x = X + source[:, None] * x_stride + at[None, :]
        w = W + group.to(tl.int64) * w_expert + at[:, None] * w_inner + column[None, :] * w_outer
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in range(0, tl.where(group < experts, inner, 0), INNER):
            left = inner - first
            a = tl.load(x + first, mask=here[:, None] & (at < left)[None, :], other=0.0)
            b = tl.load(w + first * w_inner, mask=(at < left)[:, None] & (column < outer)[None, :], other=0.0)
            total = tl.dot(a, b, total, input_precision=PRECISION)
        place = Y + row[:, None].to(tl.int64) * y_stride + column[None, :]
        tl.store(place, total.to(Y.dtype.element_ty), mask=here[:, None] & (column < outer)[None, :])


WEIGHTS = [(128, 128, 8, 3), (64, 128, 4, 3), (128, 64, 4, 3), (64, 64, 4, 3)]


@tuned(WEIGHTS, ["inner", "outer", "LENGTH"])
@jit
def weight_gradient_kernel(
    X, AT, D_Y, ENDS, D_W, rows, inner, outer, x_stride, y_stride,
    LENGTH: constexpr, INNER: constexpr, PRECISION: constexpr, ROWS: constexpr, COLUMNS: constexpr,
):  # fmt: skip
    """x[rows of the group].T @ d_y[group]; a tile of ROWS inputs and COLUMNS outputs, INNER rows a step."""
    group = tl.program_id(2)
    begin = tl.load(ENDS + group - 1, mask=group > 0, other=0).to(tl.int32)
    end = tl.load(ENDS + group).to(tl.int32)
    i = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    o = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(begin, end, INNER):
        row = first + tl.arange(0, INNER)
        here = row < end
        source = row.to(tl.int64) if AT is None else tl.load(AT + row, mask=here, other=0).to(tl.int64)
        a = tl.load(
            X + source[:, None] * x_stride + i[None, :], mask=here[:, None] & (i < inner)[None, :], other=0.0
        )
        d = D_Y + row[:, None].to(tl.int64) * y_stride + o[None, :]
        b = tl.load(d, mask=here[:, None] & (o < outer)[None, :], other=0.0)
        total = tl.dot(tl.trans(a), b, total, input_precision=PRECISION)
    place = D_W + (group.to(tl.int64) * inner + i[:, None]) * outer + o[None, :]
    tl.store(place, total.to(D_W.dtype.element_ty), mask=(i < inner)[:, None] & (o < outer)[None, :])


def _constants(x: Tensor, rows: int) -> dict[str, Any]:
    inner = 16 if interpreted() else INNER
    precision = "ieee" if x.dtype == torch.float32 else "tf32"
    return {"LENGTH": power_of_two(rows), "INNER": inner, "PRECISION": precision}


def _product(x: Tensor, at: Tensor | None, weight: Tensor, ends: Tensor) -> Tensor:
    """``weight`` [experts, inner, outer] of any strides."""
    x = rows_of(x)
    (experts, inner, outer), rows = weight.shape, (x if at is None else at).shape[0]
    y = x.new_empty(rows, outer)

    def grid(chosen: dict[str, Any]) -> tuple[int, int]:
        return triton.cdiv(rows, chosen["ROWS"]) + experts + 1, triton.cdiv(outer, chosen["COLUMNS"])

    strides = (x.stride(0), *weight.stride(), y.stride(0))
    constants = {"EXPERTS": power_of_two(experts + 1), **_constants(x, rows)}
    at, ends = None if at is None else at.contiguous(), ends.contiguous()
    grouped_product_kernel[grid](x, at, weight, ends, y, experts, rows, inner, outer, *strides, **constants)
    return y


def grouped_linear(x: Tensor, at: Tensor | None, weight: Tensor, ends: Tensor) -> Tensor:
    return _product(x, at, weight, ends)


def grouped_linear_backward(
    d_y: Tensor, x: Tensor, at: Tensor | None, weight: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of every gathered row, and of the weight."""
    d_y, x = rows_of(d_y), rows_of(x)
    experts, inner, outer = weight.shape
    d_weight = torch.empty((experts, inner, outer), dtype=weight.dtype, device=weight.device)

    def grid(chosen: dict[str, Any]) -> tuple[int, int, int]:
        return triton.cdiv(outer, chosen["COLUMNS"]), triton.cdiv(inner, chosen["ROWS"]), experts

    at, ends = None if at is None else at.contiguous(), ends.contiguous()
    numbers = (d_y.shape[0], inner, outer, x.stride(0), d_y.stride(0))
    weight_gradient_kernel[grid](x, at, d_y, ends, d_weight, *numbers, **_constants(x, d_y.shape[0]))
    return _product(d_y, None, weight.transpose(1, 2), ends), d_weight


# --- the sum of each token's choices -----------------------------------------------------------------


@jit
def combine_kernel(Y, PLACES, WEIGHTS, OUT, stride, columns, CHOICES: constexpr, BLOCK: constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(CHOICES):  # pyright: ignore[reportGeneralTypeIssues] - unrolled by Triton
        place = tl.load(PLACES + token * CHOICES + choice).to(tl.int64)
        weight = tl.load(WEIGHTS + token * CHOICES + choice).to(tl.float32)
        total += weight * tl.load(Y + place * stride + at, mask=at < columns, other=0.0).to(tl.float32)
    tl.store(OUT + token * columns + at, total.to(OUT.dtype.element_ty), mask=at < columns)


@jit
def combine_backward_kernel(
    D_OUT,
    Y,
    PLACES,
    WEIGHTS,
    D_Y,
    D_WEIGHTS,
    g_stride,
    stride,
    columns,
    CHOICES: constexpr,
    BLOCK: constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    g = tl.load(D_OUT + token * g_stride + at, mask=at < columns, other=0.0).to(tl.float32)
    for choice in tl.static_range(CHOICES):  # pyright: ignore[reportGeneralTypeIssues] - unrolled by Triton
        place = tl.load(PLACES + token * CHOICES + choice).to(tl.int64)
        weight = tl.load(WEIGHTS + token * CHOICES + choice).to(tl.float32)
        y = tl.load(Y + place * stride + at, mask=at < columns, other=0.0).to(tl.float32)
        tl.store(D_Y + place * columns + at, (g * weight).to(D_Y.dtype.element_ty), mask=at < columns)
        tl.store(D_WEIGHTS + token * CHOICES + choice, tl.sum(g * y, 0).to(D_WEIGHTS.dtype.element_ty))


def combine(y: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    y, (tokens, choices) = rows_of(y), places.shape
    out, block = y.new_empty(tokens, y.shape[1]), min(power_of_two(y.shape[1]), 2048)
    combine_kernel[(tokens, triton.cdiv(y.shape[1], block))](
        y, places.contiguous(), weights.contiguous(), out, y.stride(0), y.shape[1],
        CHOICES=choices, BLOCK=block, num_warps=Tile(1, block).warps,
    )  # fmt: skip
    return out


def combine_backward(d_out: Tensor, y: Tensor, places: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    g, y, (tokens, choices) = rows_of(d_out), rows_of(y), places.shape
    every = places.numel() == y.shape[0]  # each row is one token's choice: all are written
    d_y = torch.empty(y.shape, dtype=y.dtype, device=y.device) if every else torch.zeros_like(y)
    d_weights, block = (
        torch.empty(weights.shape, dtype=weights.dtype, device=y.device),
        power_of_two(y.shape[1]),
    )
    combine_backward_kernel[(tokens,)](
        g, y, places.contiguous(), weights.contiguous(), d_y, d_weights, g.stride(0), y.stride(0), y.shape[1],
        CHOICES=choices, BLOCK=block, num_warps=Tile(1, block).warps,
    )  # fmt: skip
    return d_y, d_weights
