"""Kernels of the cross-entropy: forward reads the logits once, backward reads and writes them once.

Forward keeps a running maximum and sum for a row, block by block; backward needs no sum and runs every
block on its own. It may write over the logits.
"""
# pyright: reportMissingParameterType=false, reportConstantRedefinition=false
# - a kernel's arguments are Triton's pointers (upper case) and numbers, without types in Python

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from autoplan_codegen.kernels.triton.language import constexpr, jit
from autoplan_codegen.kernels.triton.tiles import Tile, power_of_two, rows_of

FORWARD_BLOCK, BACKWARD_BLOCK = 4096, 4096


@jit
def pieces_kernel(LOGITS, LABELS, LOG_SUM, TARGET, stride, columns, start, BLOCK: constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits = LOGITS + row * stride
    top = -float("inf")
    sums = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(logits + at, mask=at < columns, other=-float("inf")).to(tl.float32)
        new = tl.maximum(top, tl.max(x, 0))
        safe = tl.where(new == -float("inf"), 0.0, new)
        sums = sums * tl.exp(top - safe) + tl.exp(x - safe)
        top = new
    label = tl.load(LABELS + row) - start
    own = (label >= 0) & (label < columns)
    target = tl.load(logits + label, mask=own, other=0.0).to(tl.float32)
    tl.store(LOG_SUM + row, top + tl.log(tl.sum(sums, 0)))
    tl.store(TARGET + row, target)


@jit
def pieces_backward_kernel(
    LOGITS,
    LABELS,
    LOG_SUM,
    D_LOG_SUM,
    D_TARGET,
    D_LOGITS,
    stride,
    d_stride,
    columns,
    start,
    BLOCK: constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(LOGITS + row * stride + at, mask=at < columns, other=0.0).to(tl.float32)
    d = tl.exp(x - tl.load(LOG_SUM + row)) * tl.load(D_LOG_SUM + row)
    d += tl.where(at == tl.load(LABELS + row) - start, tl.load(D_TARGET + row), 0.0)
    tl.store(D_LOGITS + row * d_stride + at, d.to(D_LOGITS.dtype.element_ty), mask=at < columns)


def pieces(logits: Tensor, labels: Tensor, start: int) -> tuple[Tensor, Tensor]:
    flat = rows_of(logits)
    block = min(power_of_two(flat.shape[1]), FORWARD_BLOCK)
    log_sum = flat.new_empty(flat.shape[0], dtype=torch.float32)
    target = torch.empty_like(log_sum)
    pieces_kernel[(flat.shape[0],)](
        flat,
        labels.contiguous(),
        log_sum,
        target,
        flat.stride(0),
        flat.shape[1],
        start,
        BLOCK=block,
        num_warps=Tile(1, block).warps,
    )
    return log_sum, target


def pieces_backward(
    logits: Tensor,
    labels: Tensor,
    log_sum: Tensor,
    d_log_sum: Tensor,
    d_target: Tensor,
    start: int,
    in_place: bool,
) -> Tensor:
    flat = rows_of(logits)
    made = flat if in_place else flat.new_empty(flat.shape)
    block = min(power_of_two(flat.shape[1]), BACKWARD_BLOCK)
    pieces_backward_kernel[(flat.shape[0], triton.cdiv(flat.shape[1], block))](
        flat,
        labels.contiguous(),
        log_sum.contiguous(),
        d_log_sum.contiguous(),
        d_target.contiguous(),
        made,
        flat.stride(0),
        made.stride(0),
        flat.shape[1],
        start,
        BLOCK=block,
        num_warps=Tile(1, block).warps,
    )
    return made
