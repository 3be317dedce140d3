"""Products whose weight gradients are made later, in plain PyTorch: the backward of a zero-bubble schedule.

A tensor and a weight in, their product out, differentiable. The backward makes the gradient of the tensor at
once and remembers what that of the weight takes; :func:`take_deferred` hands this over, and
:func:`run_deferred` adds it to ``.grad``. Imports torch alone: generated stage modules carry a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from autoplan_passes.collectives import Tensor, gather_whole, scatter_sum

DEFERRED: list[tuple[Tensor, Callable[[], Tensor]]] = []


def take_deferred() -> list[tuple[Tensor, Callable[[], Tensor]]]:
    """The weights and what makes their gradients, of the backward that just ran."""
    taken = list(DEFERRED)
    DEFERRED.clear()
    return taken


def run_deferred(taken: Sequence[tuple[Tensor, Callable[[], Tensor]]]) -> None:
    """Make the gradients and add them up where autograd would have."""
    for weight, gradient in taken:
        torch.autograd.backward(weight, gradient())


class _LinearLater(torch.autograd.Function):
    """``F.linear``; of the weight and the bias it is remembered which rows to multiply."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias = weight, bias
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,), weight, bias = ctx.saved_tensors, ctx.weight, ctx.bias
        rows, made = x.reshape(-1, x.shape[-1]), gradients[0].reshape(-1, weight.shape[0])
        if weight.requires_grad:
            DEFERRED.append((weight, lambda: made.t() @ rows))
        if bias is not None and bias.requires_grad:
            DEFERRED.append((bias, lambda: made.sum(0)))
        return gradients[0] @ weight if ctx.needs_input_grad[0] else None, None, None


def linear_later(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear(x, weight, bias)`` whose weight and bias get their gradients later."""
    product: Any = _LinearLater.apply(x, weight, bias)
    return product


class _GroupedLater(torch.autograd.Function):
    """``torch._grouped_mm`` of rows [N, k] with one weight [k, n] a group; ``ends`` is where groups end."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, ends)
        ctx.weight = weight
        return torch._grouped_mm(x, weight, ends)  # pyright: ignore[reportPrivateUsage]  it has no other name

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x, ends), weight, made = ctx.saved_tensors, ctx.weight, gradients[0]
        if weight.requires_grad:
            DEFERRED.append((weight, lambda: torch._grouped_mm(x.t(), made, ends)))  # pyright: ignore[reportPrivateUsage]  as above
        if not ctx.needs_input_grad[0]:
            return None, None, None
        return torch._grouped_mm(made, weight.transpose(-2, -1), ends), None, None  # pyright: ignore[reportPrivateUsage]  as above


def grouped_mm_later(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """``torch._grouped_mm(x, weight, ends)`` whose weights get their gradients later."""
    product: Any = _GroupedLater.apply(x, weight, ends)
    return product


class _GatheredLinearsLater(torch.autograd.Function):
    """Products of a gathered tensor; keeps this rank's piece, and from its backward on the whole."""

    @staticmethod
    def forward(ctx: Any, piece: Tensor, place: Any, keeps_whole: bool, count: int, *held: Any) -> Any:
        whole = gather_whole(piece, *place)
        ctx.save_for_backward(whole if keeps_whole else piece)
        ctx.place, ctx.keeps_whole, ctx.weights, ctx.biases = place, keeps_whole, held[:count], held[count:]
        return tuple(F.linear(whole, weight, bias) for weight, bias in zip(ctx.weights, ctx.biases))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (kept,) = ctx.saved_tensors
        whole = kept if ctx.keeps_whole else gather_whole(kept, *ctx.place)
        rows = whole.reshape(-1, whole.shape[-1])
        for gradient, weight, bias in zip(gradients, ctx.weights, ctx.biases):
            made = gradient.reshape(-1, weight.shape[0])
            if weight.requires_grad:
                DEFERRED.append((weight, lambda made=made: made.t() @ rows))
            if bias is not None and bias.requires_grad:
                DEFERRED.append((bias, lambda made=made: made.sum(0)))
        towards: Any = sum(gradient @ weight for gradient, weight in zip(gradients, ctx.weights))
        rest = [None] * (2 * len(ctx.weights))
        return scatter_sum(towards, *ctx.place), None, None, None, *rest


def gathered_linears_later(
    piece: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    dim: int,
    axis: str,
    sections: Sequence[int] = (),
    zigzag: bool = False,
    keeps_whole: bool = False,
) -> tuple[Tensor, ...]:
    """``gathered_linears`` whose weights and biases get their gradients later."""
    place = (dim, axis, sections, zigzag)
    products: Any = _GatheredLinearsLater.apply(piece, place, keeps_whole, len(weights), *weights, *biases)
    return products
