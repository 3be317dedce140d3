"""The kernel of AdamW: one launch steps many tensors, each element read once and written once.

A table gives each block its tensor and its place there; tensors are addresses in a second table. Both
tables are small, and go to the device in one copy.
"""
# pyright: reportMissingParameterType=false, reportConstantRedefinition=false
# - a kernel's arguments are Triton's pointers (upper case) and numbers, without types in Python

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from autoplan_codegen.kernels.triton.language import constexpr, jit

BLOCK = 2048


@jit
def address(ENTRY, TYPE: constexpr, ALIGNED: constexpr):
    pointer = tl.load(ENTRY).to(tl.pointer_type(TYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@jit
def step_block(
    parameter,
    gradient,
    first,
    second,
    master,
    at,
    size,
    keep,
    size_1,
    size_2,
    beta1,
    beta2,
    eps,
    scale,
    WHOLE: constexpr,
):
    """Without a mask where the block is whole: only then are accesses of 128 bits known to be safe."""
    inside = None if WHOLE else at < size
    g = tl.load(gradient + at, mask=inside).to(tl.float32) * scale
    m = tl.load(first + at, mask=inside).to(tl.float32) * beta1 + (1 - beta1) * g
    v = tl.load(second + at, mask=inside).to(tl.float32) * beta2 + (1 - beta2) * g * g
    weight = tl.load(master + at, mask=inside).to(tl.float32)
    weight = weight * keep - size_1 * m / (tl.sqrt(v) * size_2 + eps)
    tl.store(first + at, m.to(first.dtype.element_ty), mask=inside)
    tl.store(second + at, v.to(second.dtype.element_ty), mask=inside)
    tl.store(master + at, weight.to(master.dtype.element_ty), mask=inside)
    if parameter is not None:
        tl.store(parameter + at, weight.to(parameter.dtype.element_ty), mask=inside)


@jit
def adamw_kernel(
    ADDRESSES,
    BLOCKS,
    keep,
    size_1,
    size_2,
    beta1,
    beta2,
    eps,
    scale,
    PARAMETER: constexpr,
    GRADIENT: constexpr,
    FIRST: constexpr,
    SECOND: constexpr,
    MASTER: constexpr,
    ALIGNED: constexpr,
    BLOCK: constexpr,
):
    """ADDRESSES: six numbers a tensor (its size last); BLOCKS: tensor and first element of each block.

    PARAMETER None: the master is the parameter.
    """
    entry = ADDRESSES + 6 * tl.load(BLOCKS + 2 * tl.program_id(0))
    start = tl.multiple_of(tl.load(BLOCKS + 2 * tl.program_id(0) + 1), BLOCK)
    at = start + tl.arange(0, BLOCK)
    size = tl.load(entry + 5)
    gradient = address(entry + 1, GRADIENT, ALIGNED)
    first = address(entry + 2, FIRST, ALIGNED)
    second = address(entry + 3, SECOND, ALIGNED)
    master = address(entry + 4, MASTER, ALIGNED)
    parameter = None if PARAMETER is None else address(entry, PARAMETER, ALIGNED)
    if start + BLOCK <= size:
        step_block(
            parameter,
            gradient,
            first,
            second,
            master,
            at,
            size,
            keep,
            size_1,
            size_2,
            beta1,
            beta2,
            eps,
            scale,
            True,
        )
    else:
        step_block(
            parameter,
            gradient,
            first,
            second,
            master,
            at,
            size,
            keep,
            size_1,
            size_2,
            beta1,
            beta2,
            eps,
            scale,
            False,
        )


TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def adamw_step(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    masters: Sequence[Tensor],
    *numbers: float,
) -> None:
    """``numbers``: keep, size_1, size_2, beta1, beta2, eps, gradient scale."""
    groups: dict[tuple[torch.dtype, ...], list[tuple[Tensor, ...]]] = {}
    for tensors in zip(parameters, gradients, first, second, masters or parameters):
        groups.setdefault(tuple(x.dtype for x in tensors), []).append(tensors)
    for dtypes, entries in groups.items():
        addresses, blocks = _tables(entries)
        parameter, *others = (TYPES[dtype] for dtype in dtypes)
        adamw_kernel[(blocks.shape[0],)](
            addresses,
            blocks,
            *numbers,
            parameter if masters else None,
            *others,
            ALIGNED=all(x.data_ptr() % 16 == 0 for tensors in entries for x in tensors),
            BLOCK=BLOCK,
            num_warps=8,
        )


def _tables(entries: list[tuple[Tensor, ...]]) -> tuple[Tensor, Tensor]:
    """Addresses and sizes of each tensor; tensor and first element of each block."""
    sizes = torch.tensor([tensors[0].numel() for tensors in entries])
    addresses = torch.tensor([[x.data_ptr() for x in tensors] for tensors in entries])
    counts = (sizes + BLOCK - 1) // BLOCK
    which = torch.repeat_interleave(torch.arange(len(entries)), counts)
    first = torch.arange(which.numel()) - (counts.cumsum(0) - counts)[which]
    both = torch.cat(
        [
            torch.cat([addresses, sizes[:, None]], 1).flatten(),
            torch.stack([which, first * BLOCK], 1).flatten(),
        ]
    )
    both = both.to(entries[0][0].device, non_blocking=True)
    cut = 6 * len(entries)
    return both[:cut], both[cut:].view(-1, 2)
