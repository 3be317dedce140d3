"""The shapes each contraction op multiplies: a table from op name to a formula over its arguments.

Comes in: a node whose op sums over a dimension. Goes out: its products [m, k] x [k, n], whose FLOPs equal
those of ``torch.utils.flop_counter`` where that has a formula (tests compare).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoplan.errors import UnsupportedOpError
from autoplan_cost_models.kernels import Kind
from autoplan_cost_models.node_facts import op_name, outputs_of, tensor_argument


@dataclass(frozen=True)
class Product:
    """``count`` products [m, k] x [k, n] of the nodes ``left`` and ``right``."""

    count: float
    m: float
    n: float
    k: float
    left: Any
    right: Any
    kind: Kind = "gemm"


Formula = Callable[[fx.Node], tuple[Product, ...]]


def _shape(argument: Any) -> tuple[int, ...]:
    tensor = tensor_argument(argument)
    assert tensor is not None
    return tuple(int(size) for size in tensor.shape)


def _linear(node: fx.Node) -> tuple[Product, ...]:
    x, weight = _shape(node.args[0]), _shape(node.args[1])
    out = weight[0] if len(weight) == 2 else 1
    return (Product(1, math.prod(x[:-1]), out, x[-1], node.args[0], node.args[1]),)


def _addmm(node: fx.Node) -> tuple[Product, ...]:
    return _product_of(node.args[1], node.args[2])


def _matmul(node: fx.Node) -> tuple[Product, ...]:
    return _product_of(node.args[0], node.args[1])


def _product_of(left: Any, right: Any) -> tuple[Product, ...]:
    """matmul's broadcasting rule: batch dims multiply, a shared right operand folds them into m."""
    a, b = _shape(left), _shape(right)
    rows, inner = (1, a[-1]) if len(a) == 1 else (a[-2], a[-1])
    columns = 1 if len(b) == 1 else b[-1]
    batch = math.prod(torch.broadcast_shapes(a[:-2], b[:-2]))
    if math.prod(b[:-2]) == 1:
        return (Product(1, batch * rows, columns, inner, left, right),)
    return (Product(batch, rows, columns, inner, left, right),)


def _grouped_mm(node: fx.Node) -> tuple[Product, ...]:
    """Rows split over the groups, taken as balanced: tokens/groups rows each (no routing is known)."""
    a, b = _shape(node.args[0]), _shape(node.args[1])
    groups, rows, inner = a[0], a[-2], a[-1]
    if len(a) == 2 and len(b) == 3:
        groups, rows = b[0], a[0] / b[0]
    elif len(a) == 2:  # the groups split the contracted dim
        groups = outputs_of(node)[0].shape[0]
        inner = a[1] / groups
    return (Product(groups, rows, b[-1], inner, node.args[0], node.args[1], "grouped_gemm"),)


def _convolution(node: fx.Node, transposed: bool) -> tuple[Product, ...]:
    """Implicit GEMM: a row a output point (input point when transposed), k = channels x filter."""
    x, weight = _shape(node.args[0]), _shape(node.args[1])
    out = tuple(outputs_of(node)[0].shape)
    spatial = len(weight) - 2
    batch = x[0] if len(x) == len(weight) else 1
    channels_in, channels_out = x[-spatial - 1], out[-spatial - 1]
    if transposed:
        groups = channels_out // weight[1]
        columns = channels_out // groups * math.prod(weight[2:])
        rows, inner = batch * math.prod(x[-spatial:]), channels_in // groups
    else:
        groups = channels_in // weight[1]
        columns, inner = channels_out // groups, math.prod(weight[1:])
        rows = batch * math.prod(out[-spatial:])
    return (Product(groups, rows, columns, inner, node.args[0], node.args[1]),)


def _recurrent(node: fx.Node) -> tuple[Product, ...]:
    """lstm, gru, rnn: of a layer's two weights the first takes all steps at once, the second one by one."""
    x = _shape(node.args[0])
    steps, batch = (x[1], x[0]) if node.args[-1] else (x[0], x[1])
    products: list[Product] = []
    for weight in _sequence(node.args[2]):
        shape = _shape(weight)
        if len(shape) == 2:
            at_once = len(products) % 2 == 0
            count, rows = (1, steps * batch) if at_once else (steps, batch)
            left = node.args[0] if at_once else node
            products.append(Product(count, rows, shape[0], shape[1], left, weight))
    return tuple(products)


def _forward_convolution(node: fx.Node) -> tuple[Product, ...]:
    return _convolution(node, transposed=op_name(node) == "convolution" and bool(node.args[6]))


def _transposed_convolution(node: fx.Node) -> tuple[Product, ...]:
    return _convolution(node, transposed=True)


def _einsum(node: fx.Node) -> tuple[Product, ...]:
    """Operands contracted two at a time, left to right (torch's default path without opt_einsum)."""
    equation = str(node.args[0]).replace(" ", "")
    operands = [_shape(argument) for argument in _sequence(node.args[1])]
    inputs, _, output = equation.partition("->")
    terms = inputs.split(",")
    if "." in equation or not output or len(terms) != len(operands):
        raise UnsupportedOpError(
            f"einsum equation {equation!r} of node {node.name} cannot be priced: expected explicit letters "
            "on both sides of '->' with no ellipsis; write it out in the model, e.g. 'bsh,oh->bso'."
        )
    nodes: list[Any] = [*_sequence(node.args[1])]
    sizes = {letter: size for term, shape in zip(terms, operands) for letter, size in zip(term, shape)}
    products: list[Product] = []
    current = terms[0]
    for index, term in enumerate(terms[1:], start=1):
        later = set("".join(terms[index + 1 :])) | set(output)
        left = nodes[0] if index == 1 else node
        products.append(_pair((current, left), (term, nodes[index]), later, sizes))
        current = "".join(letter for letter in dict.fromkeys(current + term) if letter in later)
    return tuple(products)


def _pair(left: tuple[str, Any], right: tuple[str, Any], kept: set[str], sizes: dict[str, int]) -> Product:
    def extent(letters: Iterable[str]) -> int:
        return math.prod(sizes[letter] for letter in letters)

    shared = set(left[0]) & set(right[0])
    return Product(
        count=extent(shared & kept),
        m=extent(c for c in left[0] if c not in shared),
        n=extent(c for c in right[0] if c not in shared),
        k=extent(shared - kept),
        left=left[1],
        right=right[1],
    )


def _sequence(argument: Any) -> Sequence[Any]:
    assert isinstance(argument, (list, tuple))
    return argument


PRODUCTS: dict[str, Formula] = {
    "linear": _linear,
    "mm": _matmul,
    "bmm": _matmul,
    "matmul": _matmul,
    "mv": _matmul,
    "dot": _matmul,
    "addmm": _addmm,
    "baddbmm": _addmm,
    "addbmm": _addmm,
    "addmv": _addmm,
    "_grouped_mm": _grouped_mm,
    "grouped_mm_fallback": _grouped_mm,
    "grouped_product": _grouped_mm,
    "einsum": _einsum,
    "conv1d": _forward_convolution,
    "conv2d": _forward_convolution,
    "conv3d": _forward_convolution,
    "convolution": _forward_convolution,
    "conv_transpose1d": _transposed_convolution,
    "conv_transpose2d": _transposed_convolution,
    "conv_transpose3d": _transposed_convolution,
    "lstm": _recurrent,
    "gru": _recurrent,
    "rnn_tanh": _recurrent,
    "rnn_relu": _recurrent,
}
