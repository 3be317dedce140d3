"""Kernels of the activations: each input is read once, each output written once.

Tiles go over rows with any stride, so halves of one projection need no copy. The gradient of a bias is
summed in registers over the rows of a program: one partial row a program.
"""
# pyright: reportMissingParameterType=false, reportConstantRedefinition=false
# - a kernel's arguments are Triton's pointers (upper case) and numbers, without types in Python

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from autoplan_codegen.kernels.triton.language import constexpr, jit
from autoplan_codegen.kernels.triton.tiles import Tile, pieces_of_rows, programs, rows_of


@jit
def activation(x, KIND: constexpr):
    if KIND == "silu":
        y = x * tl.sigmoid(x)
    elif KIND == "gelu":
        y = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    else:
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))  # tanh(z) = 2 sigmoid(2z) - 1
    return y


@jit
def slope_of(x, KIND: constexpr):
    if KIND == "silu":
        s = tl.sigmoid(x)
        slope = s * (1 + x * (1 - s))
    elif KIND == "gelu":
        slope = 0.5 * (1 + tl.erf(x * 0.7071067811865476)) + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    else:
        s = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        slope = s + x * s * (1 - s) * 1.5957691216057308 * (1 + 0.134145 * x * x)
    return slope


@jit
def gated_forward(
    G, U, Y, g_stride, u_stride, rows, columns, KIND: constexpr, ROWS: constexpr, BLOCK: constexpr
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    at = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = (row < rows) & (at < columns)
    gate = tl.load(G + row * g_stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(U + row * u_stride + at, mask=inside, other=0.0).to(tl.float32)
    y = activation(gate, KIND) * up
    tl.store(Y + row * columns + at, y.to(Y.dtype.element_ty), mask=inside)


@jit
def gated_backward_kernel(
    DY,
    G,
    U,
    DG,
    DU,
    dy_stride,
    g_stride,
    u_stride,
    rows,
    columns,
    KIND: constexpr,
    ROWS: constexpr,
    BLOCK: constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    at = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = (row < rows) & (at < columns)
    d_y = tl.load(DY + row * dy_stride + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(G + row * g_stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(U + row * u_stride + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(DG + row * columns + at, (d_y * up * slope_of(gate, KIND)).to(DG.dtype.element_ty), mask=inside)
    tl.store(DU + row * columns + at, (d_y * activation(gate, KIND)).to(DU.dtype.element_ty), mask=inside)


def _grid(x: Tensor, tile: Tile) -> tuple[int, int]:
    return triton.cdiv(x.shape[0], tile.rows), triton.cdiv(x.shape[1], tile.columns)


def gated(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    g, u, tile = rows_of(gate), rows_of(up), pieces_of_rows(gate.shape[-1])
    y = gate.new_empty(gate.shape)
    gated_forward[_grid(g, tile)](
        g,
        u,
        y,
        g.stride(0),
        u.stride(0),
        *g.shape,
        KIND=kind,
        ROWS=tile.rows,
        BLOCK=tile.columns,
        num_warps=tile.warps,
    )
    return y


def gated_backward(d_y: Tensor, gate: Tensor, up: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    d, g, u, tile = rows_of(d_y), rows_of(gate), rows_of(up), pieces_of_rows(gate.shape[-1])
    d_gate, d_up = gate.new_empty(gate.shape), up.new_empty(up.shape)
    gated_backward_kernel[_grid(g, tile)](
        d,
        g,
        u,
        d_gate,
        d_up,
        d.stride(0),
        g.stride(0),
        u.stride(0),
        *g.shape,
        KIND=kind,
        ROWS=tile.rows,
        BLOCK=tile.columns,
        num_warps=tile.warps,
    )
    return d_gate, d_up


# --- dropout(gelu(x + bias)) -------------------------------------------------------------------------


@jit
def kept(SEED, row, first, p, ROWS: constexpr, BLOCK: constexpr):
    """1 / (1 - p) or 0 at [ROWS, BLOCK]: one Philox counter serves four columns."""
    counter = (first // 4 + tl.arange(0, BLOCK // 4))[None, :] + tl.zeros((ROWS, 1), tl.int32)
    which = row.to(tl.int32) + tl.zeros((ROWS, BLOCK // 4), tl.int32)
    none = tl.zeros((ROWS, BLOCK // 4), tl.int32)
    a, b, c, d = tl.philox(tl.load(SEED), counter, which, none, none)
    words = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
    return tl.where(tl.uint_to_uniform_float(words) >= p, 1 / (1 - p), 0.0)


@jit
def bias_gelu_forward(
    X, B, Y, SEED, x_stride, rows, columns, p, KIND: constexpr, ROWS: constexpr, BLOCK: constexpr
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    first = tl.program_id(1) * BLOCK
    at = (first + tl.arange(0, BLOCK))[None, :]
    inside = (row < rows) & (at < columns)
    x = tl.load(X + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    if B is not None:
        x += tl.load(B + at, mask=at < columns, other=0.0).to(tl.float32)
    y = activation(x, KIND)
    if SEED is not None:
        y *= kept(SEED, row, first, p, ROWS, BLOCK)
    tl.store(Y + row * columns + at, y.to(Y.dtype.element_ty), mask=inside)


@jit
def bias_gelu_backward(
    DY,
    X,
    B,
    DX,
    DB,
    SEED,
    dy_stride,
    x_stride,
    rows,
    columns,
    p,
    KIND: constexpr,
    ROWS: constexpr,
    BLOCK: constexpr,
):
    first = tl.program_id(1) * BLOCK
    at = (first + tl.arange(0, BLOCK))[None, :]
    d_b = tl.zeros((ROWS, BLOCK), tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = (block * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
        inside = (row < rows) & (at < columns)
        x = tl.load(X + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
        if B is not None:
            x += tl.load(B + at, mask=at < columns, other=0.0).to(tl.float32)
        d_x = tl.load(DY + row * dy_stride + at, mask=inside, other=0.0).to(tl.float32) * slope_of(x, KIND)
        if SEED is not None:
            d_x *= kept(SEED, row, first, p, ROWS, BLOCK)
        if B is not None:
            d_b += d_x
        tl.store(DX + row * columns + at, d_x.to(DX.dtype.element_ty), mask=inside)
    if B is not None:
        place = first + tl.arange(0, BLOCK)
        tl.store(DB + tl.program_id(0) * columns + place, tl.sum(d_b, 0), mask=place < columns)


def bias_gelu_dropout(x: Tensor, bias: Tensor | None, p: float, seed: Tensor | None, kind: str) -> Tensor:
    flat, tile = rows_of(x), pieces_of_rows(max(x.shape[-1], 4))
    y = x.new_empty(x.shape)
    bias_gelu_forward[_grid(flat, tile)](
        flat,
        bias,
        y,
        seed if p > 0 else None,
        flat.stride(0),
        *flat.shape,
        p,
        KIND=kind,
        ROWS=tile.rows,
        BLOCK=tile.columns,
        num_warps=tile.warps,
    )
    return y


def bias_gelu_dropout_backward(
    d_y: Tensor, x: Tensor, bias: Tensor | None, p: float, seed: Tensor | None, kind: str
) -> tuple[Tensor, Tensor]:
    flat, g, tile = rows_of(x), rows_of(d_y), pieces_of_rows(max(x.shape[-1], 4))
    blocks, across = _grid(flat, tile)
    count = blocks if bias is None else programs(x, blocks, max(1, 8 // across))
    d_x = x.new_empty(x.shape)
    partial = None if bias is None else x.new_empty(count, flat.shape[1], dtype=torch.float32)
    bias_gelu_backward[(count, across)](
        g,
        flat,
        bias,
        d_x,
        partial,
        seed if p > 0 else None,
        g.stride(0),
        flat.stride(0),
        *flat.shape,
        p,
        KIND=kind,
        ROWS=tile.rows,
        BLOCK=tile.columns,
        num_warps=tile.warps,
    )
    return d_x, x.new_empty(0) if bias is None or partial is None else partial.sum(0).to(bias.dtype)
