"""Grouped products in any precision, in plain PyTorch: rows of group g times the g-th weight.

Rows [n, i], weights [groups, i, o] and the end of every group's rows in, rows [n, o] out, differentiable; a
group without rows gives its weight a zero gradient. ``torch._grouped_mm`` has no fp64, and the libraries that
work around that register operators of their own, which generated files would depend on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from autoplan_passes.collectives import Tensor


def _groups(ends: Tensor) -> Iterator[tuple[int, slice]]:
    """The groups that have rows, and their rows."""
    start = 0
    for group, end in enumerate(ends.tolist()):
        if end > start:
            yield group, slice(start, end)
        start = max(start, end)


def _multiply(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    out = rows.new_zeros(rows.shape[0], weights.shape[2])
    for group, own in _groups(ends):
        torch.mm(rows[own], weights[group], out=out[own])
    return out


def _multiply_back(gradient: Tensor, rows: Tensor, weights: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    of_rows, of_weights = torch.zeros_like(rows), torch.zeros_like(weights)
    for group, own in _groups(ends):
        torch.mm(gradient[own], weights[group].t(), out=of_rows[own])
        of_weights[group] = rows[own].t() @ gradient[own]
    return of_rows, of_weights


def _like_product(rows: Tensor, weights: Tensor, _ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[2])


def _like_operands(_gradient: Tensor, rows: Tensor, weights: Tensor, _ends: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows), torch.empty_like(weights)


def _operator(name: str, function: Callable[..., Any], fake: Callable[..., Any], schema: str) -> Any:
    """One operator, whatever the rows of each group: they are data."""
    made = torch.library.custom_op(f"autoplan::{name}", function, mutates_args=(), schema=schema)
    made.register_fake(fake)
    return made


GROUPED_PRODUCT = _operator(
    "grouped_product",
    _multiply,
    _like_product,
    "(Tensor rows, Tensor weights, Tensor ends) -> Tensor",
)
GROUPED_PRODUCT_BACKWARD = _operator(
    "grouped_product_backward",
    _multiply_back,
    _like_operands,
    "(Tensor gradient, Tensor rows, Tensor weights, Tensor ends) -> (Tensor, Tensor)",
)


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, ends)
        return GROUPED_PRODUCT(rows, weights, ends)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return *GROUPED_PRODUCT_BACKWARD(gradients[0].contiguous(), *ctx.saved_tensors), None


def grouped_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Rows [n, i], grouped up to ``ends`` [groups], times weights [groups, i, o]; 0 after the last end."""
    return _GroupedProduct.apply(rows, weights, ends)  # pyright: ignore[reportReturnType] - torch types apply as Any
