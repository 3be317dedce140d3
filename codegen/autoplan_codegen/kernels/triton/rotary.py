"""The kernel of the rotary embedding: x is read and written once, a position's angles once for all heads."""
# pyright: reportMissingParameterType=false, reportConstantRedefinition=false
# - a kernel's arguments are Triton's pointers (upper case) and numbers, without types in Python

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from autoplan_codegen.kernels.triton.language import constexpr, jit
from autoplan_codegen.kernels.triton.tiles import Tile, power_of_two

ELEMENTS = 4096


@jit
def rotary_kernel(
    X,
    COS,
    SIN,
    Y,
    outer,
    inner,
    heads,
    half,
    rest,
    x_outer,
    x_inner,
    x_head,
    y_outer,
    y_inner,
    y_head,
    cos_outer,
    cos_inner,
    sin_outer,
    sin_inner,
    BACK: constexpr,
    PLACES: constexpr,
    HEADS: constexpr,
    HALF: constexpr,
    REST: constexpr,
):
    place = (tl.program_id(0) * PLACES + tl.arange(0, PLACES))[:, None, None].to(tl.int64)
    head = tl.arange(0, HEADS)[None, :, None]
    at = tl.arange(0, HALF)[None, None, :]
    o, i = place // inner, place % inner
    here = place < outer * inner
    cos = COS + o * cos_outer + i * cos_inner + at
    sin = SIN + o * sin_outer + i * sin_inner + at
    table = here & (at < half)
    cos_1 = tl.load(cos, mask=table, other=0.0).to(tl.float32)
    cos_2 = tl.load(cos + half, mask=table, other=0.0).to(tl.float32)
    sin_1 = tl.load(sin, mask=table, other=0.0).to(tl.float32)
    sin_2 = tl.load(sin + half, mask=table, other=0.0).to(tl.float32)
    if BACK:  # the transpose of [[cos_1, -sin_1], [sin_2, cos_2]]
        swapped = sin_1
        sin_1 = -sin_2
        sin_2 = -swapped
    inside = table & (head < heads)
    x = X + o * x_outer + i * x_inner + head * x_head + at
    y = Y + o * y_outer + i * y_inner + head * y_head + at
    first = tl.load(x, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + half, mask=inside, other=0.0).to(tl.float32)
    tl.store(y, (first * cos_1 - second * sin_1).to(Y.dtype.element_ty), mask=inside)
    tl.store(y + half, (second * cos_2 + first * sin_2).to(Y.dtype.element_ty), mask=inside)
    if REST > 0:
        more = tl.arange(0, REST)[None, None, :]
        inside = here & (head < heads) & (more < rest)
        passed = tl.load(X + o * x_outer + i * x_inner + head * x_head + 2 * half + more, mask=inside)
        tl.store(Y + o * y_outer + i * y_inner + head * y_head + 2 * half + more, passed, mask=inside)


def head_dim(x: Tensor, cos: Tensor, sin: Tensor) -> int | None:
    """The dim (of four) along which both tables are the same, the nearest in memory; None: there is none."""
    if x.dim() > 4:
        return None
    shape, tables = _four(x), [_four(t.expand(*x.shape[:-1], cos.shape[-1])) for t in (cos, sin)]
    free = [d for d in range(3) if shape.shape[d] == 1 or all(t.stride(d) == 0 for t in tables)]
    return min(free, key=lambda d: (shape.shape[d] == 1, shape.stride(d))) if free else None


def rotary(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    """``x`` of up to four dims, one of which is :func:`head_dim`."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    y, by_head = torch.empty_like(x), head_dim(x, cos, sin)
    assert by_head is not None
    tables = [t.expand(*x.shape[:-1], cos.shape[-1]) for t in (_last(cos), _last(sin))]
    order = [*(d for d in range(3) if d != by_head), by_head, 3]
    _launch([_four(v).permute(order) for v in (x, y, *tables)], cos.shape[-1] // 2, back)
    return y


def _four(x: Tensor) -> Tensor:
    return x[(None,) * (4 - x.dim())]


def _last(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _launch(views: list[Tensor], half: int, back: bool) -> None:
    x, y, cos, sin = views
    outer, inner, heads, size = x.shape
    width = power_of_two(half)
    places = max(1, ELEMENTS // 2 // (power_of_two(heads) * width))
    rest = size - 2 * half
    rotary_kernel[(triton.cdiv(outer * inner, places),)](
        x,
        cos,
        sin,
        y,
        outer,
        inner,
        heads,
        half,
        rest,
        *x.stride()[:3],
        *y.stride()[:3],
        *cos.stride()[:2],
        *sin.stride()[:2],
        BACK=back,
        PLACES=places,
        HEADS=power_of_two(heads),
        HALF=width,
        REST=power_of_two(rest) if rest else 0,
        num_warps=Tile(places, power_of_two(heads) * width).warps,
    )
