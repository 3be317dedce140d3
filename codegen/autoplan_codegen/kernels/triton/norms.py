"""Kernels of the norms: a row is read once, its statistics never leave the registers.

Forward reads x (and the residual) and writes y (and the sum). Backward reads the sum, d_y (and d_sum),
writes d_x, and keeps the gradients of weight and bias in registers over all the rows of a program: one
partial row a program.
"""
# pyright: reportMissingParameterType=false, reportConstantRedefinition=false
# - a kernel's arguments are Triton's pointers (upper case) and numbers, without types in Python

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from autoplan_codegen.kernels.triton.language import constexpr, jit
from autoplan_codegen.kernels.triton.tiles import programs, rows_of, whole_rows


@jit
def norm_forward(
    X,
    R,
    W,
    B,
    Y,
    S,
    x_stride,
    r_stride,
    rows,
    columns,
    eps,
    CENTRED: constexpr,
    ROWS: constexpr,
    BLOCK: constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    at = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (at < columns)
    x = tl.load(X + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    if R is not None:
        x += tl.load(R + row * r_stride + at, mask=inside, other=0.0).to(tl.float32)
        total = x.to(S.dtype.element_ty)
        tl.store(S + row * columns + at, total, mask=inside)
        x = total.to(tl.float32)
    if CENTRED:
        x = tl.where(inside, x - (tl.sum(x, 1) / columns)[:, None], 0.0)
    y = x * tl.rsqrt(tl.sum(x * x, 1) / columns + eps)[:, None]
    if W is not None:
        y *= tl.load(W + at, mask=at < columns, other=0.0).to(tl.float32)
    if B is not None:
        y += tl.load(B + at, mask=at < columns, other=0.0).to(tl.float32)
    tl.store(Y + row * columns + at, y.to(Y.dtype.element_ty), mask=inside)


@jit
def norm_backward_kernel(
    DY,
    DS,
    X,
    W,
    DX,
    DW,
    DB,
    dy_stride,
    ds_stride,
    x_stride,
    rows,
    columns,
    eps,
    CENTRED: constexpr,
    ROWS: constexpr,
    BLOCK: constexpr,
):
    at = tl.arange(0, BLOCK)[None, :]
    d_w = tl.zeros((ROWS, BLOCK), tl.float32)
    d_b = tl.zeros((ROWS, BLOCK), tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = (block * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
        inside = (row < rows) & (at < columns)
        x = tl.load(X + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
        d_y = tl.load(DY + row * dy_stride + at, mask=inside, other=0.0).to(tl.float32)
        if CENTRED:
            x = tl.where(inside, x - (tl.sum(x, 1) / columns)[:, None], 0.0)
        factor = tl.rsqrt(tl.sum(x * x, 1) / columns + eps)[:, None]
        x = x * factor
        if DB is not None:
            d_b += d_y
        if W is not None:
            d_w += d_y * x
            d_y *= tl.load(W + at, mask=at < columns, other=0.0).to(tl.float32)
        d_x = d_y - x * (tl.sum(d_y * x, 1) / columns)[:, None]
        if CENTRED:
            d_x -= (tl.sum(d_y, 1) / columns)[:, None]
        d_x *= factor
        if DS is not None:
            d_x += tl.load(DS + row * ds_stride + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(DX + row * columns + at, d_x.to(DX.dtype.element_ty), mask=inside)
    place = tl.program_id(0) * columns + tl.arange(0, BLOCK)
    if W is not None:
        tl.store(DW + place, tl.sum(d_w, 0), mask=tl.arange(0, BLOCK) < columns)
    if DB is not None:
        tl.store(DB + place, tl.sum(d_b, 0), mask=tl.arange(0, BLOCK) < columns)


def norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, Tensor]:
    """(y, sum); the sum is x itself where there is no residual."""
    flat, tile = rows_of(x), whole_rows(x.shape[-1])
    y = x.new_empty(x.shape)
    other = None if residual is None else rows_of(residual)
    total = None if residual is None else x.new_empty(x.shape)
    norm_forward[(triton.cdiv(flat.shape[0], tile.rows),)](
        flat,
        other,
        weight,
        bias,
        y,
        total,
        flat.stride(0),
        0 if other is None else other.stride(0),
        *flat.shape,
        eps,
        CENTRED=centred,
        ROWS=tile.rows,
        BLOCK=tile.columns,
        num_warps=tile.warps,
    )
    return y, x if total is None else total


def norm_backward(
    d_y: Tensor, d_sum: Tensor | None, x: Tensor, weight: Tensor | None, eps: float, centred: bool, bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    flat, g, tile = rows_of(x), rows_of(d_y), whole_rows(x.shape[-1])
    more = None if d_sum is None else rows_of(d_sum)
    count, columns = programs(x, triton.cdiv(flat.shape[0], tile.rows)), flat.shape[1]
    d_x = x.new_empty(x.shape)
    partial = x.new_empty(2, count, columns, dtype=torch.float32)
    d_w, d_b = (partial[0] if weight is not None else None), (partial[1] if bias else None)
    norm_backward_kernel[(count,)](
        g,
        more,
        flat,
        weight,
        d_x,
        d_w,
        d_b,
        g.stride(0),
        0 if more is None else more.stride(0),
        flat.stride(0),
        *flat.shape,
        eps,
        CENTRED=centred,
        ROWS=tile.rows,
        BLOCK=tile.columns,
        num_warps=tile.warps,
    )
    dtype = x.dtype if weight is None else weight.dtype
    sums = [x.new_empty(0) if part is None else part.sum(0).to(dtype) for part in (d_w, d_b)]
    return d_x, sums[0], sums[1]
