"""Products and attention: the shapes each contraction op multiplies, forward and backward.

Comes in: a node whose op sums over a dimension. Goes out: its kernels, with FLOPs equal to those of
``torch.utils.flop_counter`` where that has a formula (tests compare), own formulas where it has none
(pre-dispatch linear, matmul, einsum, grouped products, opaque ops).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from autoplan.errors import UnsupportedOpError
from autoplan_cost_models.kernels import Kernel, Kind
from autoplan_cost_models.node_facts import (
    bytes_of,
    dtype_name,
    kernel_dtype,
    node_bytes,
    op_name,
    outputs_of,
    tensor_argument,
)

# Backward of flash attention computes five products where the forward has two:
# FlashAttention-2 (arXiv 2307.08691), section 4.1, counts 2.5x.
ATTENTION_BACKWARD_FLOPS = 2.5


@dataclass(frozen=True)
class Product:
    """``count`` products [m, k] x [k, n]; ``left`` and ``right`` are the operands' places in ``args``."""

    count: float
    m: float
    n: float
    k: float
    left: int = 0
    right: int = 1
    kind: Kind = "gemm"


Formula = Callable[[fx.Node], tuple[Product, ...]]


def _shape(argument: Any) -> tuple[int, ...]:
    tensor = tensor_argument(argument)
    assert tensor is not None
    return tuple(int(size) for size in tensor.shape)


def _linear(node: fx.Node) -> tuple[Product, ...]:
    x, weight = _shape(node.args[0]), _shape(node.args[1])
    out = weight[0] if len(weight) == 2 else 1
    return (Product(1, math.prod(x[:-1]), out, x[-1]),)


def _addmm(node: fx.Node) -> tuple[Product, ...]:
    return _product_of(_shape(node.args[1]), _shape(node.args[2]), 1, 2)


def _matmul(node: fx.Node) -> tuple[Product, ...]:
    return _product_of(_shape(node.args[0]), _shape(node.args[1]), 0, 1)


def _product_of(a: tuple[int, ...], b: tuple[int, ...], left: int, right: int) -> tuple[Product, ...]:
    """matmul's broadcasting rule: batch dims multiply, a shared right operand folds them into m."""
    rows, inner = (1, a[-1]) if len(a) == 1 else (a[-2], a[-1])
    columns = 1 if len(b) == 1 else b[-1]
    batch = math.prod(torch.broadcast_shapes(a[:-2], b[:-2]))
    if math.prod(b[:-2]) == 1:
        return (Product(1, batch * rows, columns, inner, left, right),)
    return (Product(batch, rows, columns, inner, left, right),)


def _grouped_mm(node: fx.Node) -> tuple[Product, ...]:
    """Rows split over the groups, taken as balanced: tokens/groups rows each (no routing is known)."""
    a, b = _shape(node.args[0]), _shape(node.args[1])
    if len(a) == 2 and len(b) == 3:
        return (Product(b[0], a[0] / b[0], b[2], a[1], kind="grouped_gemm"),)
    if len(a) == 2 and len(b) == 2:
        groups = outputs_of(node)[0].shape[0]
        return (Product(groups, a[0], b[1], a[1] / groups, kind="grouped_gemm"),)
    return (Product(a[0], a[1], b[-1], a[-1], kind="grouped_gemm"),)


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
        return (Product(groups, batch * math.prod(x[-spatial:]), columns, channels_in // groups),)
    groups = channels_in // weight[1]
    rows = batch * math.prod(out[-spatial:])
    return (Product(groups, rows, channels_out // groups, math.prod(weight[1:])),)


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
    sizes = {letter: size for term, shape in zip(terms, operands) for letter, size in zip(term, shape)}
    products: list[Product] = []
    current = terms[0]
    for index, term in enumerate(terms[1:], start=1):
        later = set("".join(terms[index + 1 :])) | set(output)
        products.append(_pair(current, term, later, sizes, index))
        current = "".join(letter for letter in dict.fromkeys(current + term) if letter in later)
    return tuple(products)


def _pair(left: str, right: str, kept: set[str], sizes: dict[str, int], index: int) -> Product:
    def extent(letters: Sequence[str]) -> int:
        return math.prod(sizes[letter] for letter in letters)

    shared = set(left) & set(right)
    return Product(
        count=extent([c for c in shared if c in kept]),
        m=extent([c for c in left if c not in shared]),
        n=extent([c for c in right if c not in shared]),
        k=extent([c for c in shared if c not in kept]),
        left=0,
        right=index,
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
    "einsum": _einsum,
    "conv1d": _forward_convolution,
    "conv2d": _forward_convolution,
    "conv3d": _forward_convolution,
    "convolution": _forward_convolution,
    "conv_transpose1d": _transposed_convolution,
    "conv_transpose2d": _transposed_convolution,
    "conv_transpose3d": _transposed_convolution,
}
ATTENTION = ("scaled_dot_product_attention",)
# A name with one of these in it multiplies matrices: it must never be priced as a pass over memory.
CONTRACTION_WORDS = ("mm", "matmul", "conv", "einsum", "linear", "attention", "bilinear", "lstm", "gru")
NOT_CONTRACTIONS = ("comm", "linear_fill", "upsample_bilinear2d", "upsample_linear1d", "upsample_trilinear3d")


def is_contraction(node: fx.Node) -> bool:
    name = op_name(node)
    in_tables = name in PRODUCTS or name in ATTENTION
    return in_tables or "flops" in node.meta or _registered_formula(node) is not None


def contraction_kernels(
    node: fx.Node, needing: frozenset[fx.Node]
) -> tuple[Kind, tuple[Kernel, ...], tuple[Kernel, ...]]:
    """Kind, forward kernels and backward kernels of a contraction node."""
    name = op_name(node)
    if "flops" in node.meta:
        return _opaque(node, needing, float(node.meta["flops"]))
    if name in ATTENTION:
        forward, backward = _attention(node)
        return "attention", (forward,), (backward,) if node in needing else ()
    if name in PRODUCTS:
        return _products(node, needing, PRODUCTS[name](node))
    formula = _registered_formula(node)
    assert formula is not None
    return _opaque(node, needing, formula)


def refuse_unpriced_contraction(node: fx.Node) -> None:
    """Raise when an op that is not in the tables looks like a contraction: it must not cost 0 FLOPs."""
    name = op_name(node).lower()
    if any(word in name for word in NOT_CONTRACTIONS) or not any(word in name for word in CONTRACTION_WORDS):
        return
    raise UnsupportedOpError(
        f"op {node.target} (node {node.name}) looks like a matrix product but has no FLOPs formula. Expected "
        f"one of {', '.join(sorted([*PRODUCTS, *ATTENTION]))}. Register one with "
        "torch.utils.flop_counter.register_flop_formula, or keep its module whole with --opaque NAME."
        + _where(node)
    )


def _where(node: fx.Node) -> str:
    trace = str(node.meta.get("stack_trace") or "").strip().splitlines()
    files = [line.strip() for line in trace if line.strip().startswith("File ")]
    return f" Used at {files[-1]}." if files else ""


def _products(
    node: fx.Node, needing: frozenset[fx.Node], products: tuple[Product, ...]
) -> tuple[Kind, tuple[Kernel, ...], tuple[Kernel, ...]]:
    dtype = kernel_dtype(node)
    traffic = float(node_bytes(node) + sum(node_bytes(source) for source in node.all_input_nodes))
    share = traffic / len(products)
    forward = tuple(_gemm(p, p.m, p.n, p.k, dtype, share) for p in products)
    backward: list[Kernel] = []
    if node in needing:
        operands = _operands(node)
        for p in products:
            if operands(p.left) in needing or (p.right > 1 and p.left == 0):
                backward.append(_gemm(p, p.m, p.k, p.n, dtype, share))
            if operands(p.right) in needing:
                backward.append(_gemm(p, p.k, p.n, p.m, dtype, share))
        backward.extend(_bias_gradient(node, needing, dtype))
    return products[0].kind, forward, tuple(backward)


def _operands(node: fx.Node) -> Callable[[int], Any]:
    arguments = _sequence(node.args[1]) if op_name(node) == "einsum" else node.args

    def operand(place: int) -> Any:
        return arguments[place] if place < len(arguments) else None

    return operand


def _bias_gradient(node: fx.Node, needing: frozenset[fx.Node], dtype: str) -> list[Kernel]:
    place = 0 if op_name(node).startswith("add") else 2
    bias = node.args[place] if len(node.args) > place else node.kwargs.get("bias")
    if op_name(node) == "einsum" or not isinstance(bias, fx.Node) or bias not in needing:
        return []
    return [Kernel("memory", dtype, float(node_bytes(node) + node_bytes(bias)))]


def _gemm(product: Product, m: float, n: float, k: float, dtype: str, traffic: float) -> Kernel:
    flops = 2.0 * product.count * m * n * k
    return Kernel(product.kind, dtype, traffic, flops, product.count, m, n, k)


def _attention(node: fx.Node) -> tuple[Kernel, Kernel]:
    """FLOPs of ``sdpa_flop_count``; causal square attention does half of the work."""
    query, key, value = (tensor_argument(node.args[i]) for i in range(3))
    assert query is not None and key is not None and value is not None
    causal = bool(node.args[5] if len(node.args) > 5 else node.kwargs.get("is_causal", False))
    batch, rows, columns = math.prod(query.shape[:-2]), query.shape[-2], key.shape[-2]
    flops = 2.0 * batch * rows * columns * (query.shape[-1] + value.shape[-1]) * (0.5 if causal else 1.0)
    traffic = float(bytes_of(query) + bytes_of(key) + bytes_of(value) + node_bytes(node))
    head_dim = (query.shape[-1] + value.shape[-1]) / 2
    dtype = dtype_name(query)
    shape = (float(batch), float(rows), float(columns), head_dim, causal)
    forward = Kernel("attention", dtype, traffic, flops, *shape)
    # The backward reads q, k, v, out and the output's gradient, and writes three gradients.
    backward = Kernel("attention", dtype, 2 * traffic, ATTENTION_BACKWARD_FLOPS * flops, *shape)
    return forward, backward


def _registered_formula(node: fx.Node) -> float | None:
    """FLOPs by a formula registered with ``torch.utils.flop_counter`` (e.g. for a user's custom op)."""
    packet: Any = getattr(node.target, "overloadpacket", None)
    if packet is None or packet not in flop_registry:
        return None

    def value(argument: fx.Node) -> Any:
        return argument.meta.get("val")

    arguments: Any = fx.map_arg(list(node.args), value)
    keywords: Any = fx.map_arg(dict(node.kwargs), value)
    return float(flop_registry[packet](*arguments, **keywords, out_val=node.meta.get("val")))


def _opaque(
    node: fx.Node, needing: frozenset[fx.Node], flops: float
) -> tuple[Kind, tuple[Kernel, ...], tuple[Kernel, ...]]:
    """A whole sub-module or custom op: its FLOPs as one large product; backward is re-run plus two."""
    traffic = float(node_bytes(node) + sum(node_bytes(source) for source in node.all_input_nodes))
    outputs = outputs_of(node)
    rows = max(1.0, math.prod(outputs[0].shape[:-1]) if outputs else 1.0)
    side = max(1.0, math.sqrt(flops / 2.0 / rows))
    dtype = kernel_dtype(node)
    forward = Kernel("gemm", dtype, traffic, flops, 1.0, rows, side, side)
    factor = 3.0 if node.meta.get("opaque", "flops" in node.meta) else 2.0
    backward = Kernel("gemm", dtype, factor * traffic, factor * flops, 1.0, rows, side, side)
    return "gemm", (forward,), (backward,) if node in needing else ()
