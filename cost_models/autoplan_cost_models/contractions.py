"""Kernels of contractions: products and attention, forward and backward, in FLOPs and bytes.

Comes in: a contraction node and which nodes need gradients. Goes out: its kernels. FLOPs are those of
``torch.utils.flop_counter`` where it has a formula, of :mod:`products` where it has none (pre-dispatch
linear, matmul, einsum, grouped products), of ``meta["flops"]`` for opaque ops.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

from torch import fx
from torch.utils.flop_counter import flop_registry

from autoplan.deferral import deferred_weight
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
from autoplan_cost_models.products import PRODUCTS, Product

# Backward of flash attention computes five products where the forward has two:
# FlashAttention-2 (arXiv 2307.08691), section 4.1, counts 2.5x.
ATTENTION_BACKWARD_FLOPS = 2.5

ATTENTION = ("scaled_dot_product_attention", "ring_attention")
# A name with one of these words in it multiplies matrices: it must never be priced as a pass over memory.
CONTRACTION_WORDS = re.compile(
    r"(^|_)((?!comm)\w*mm|\w*matmul|conv(?!ert)\w*|einsum|\w*linear|lstm|gru|rnn|\w*attention)(_|\d|$)"
)
NOT_CONTRACTIONS = ("upsample", "grid_sampler")


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
    if name.startswith(NOT_CONTRACTIONS) or not CONTRACTION_WORDS.search(name):
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
        later = deferred_weight(node) is not None
        for p in products:
            if p.left in needing:
                backward.append(_gemm(p, p.m, p.k, p.n, dtype, share))
            if p.right in needing:
                backward.append(replace(_gemm(p, p.k, p.n, p.m, dtype, share), deferrable=later))
        backward.extend(replace(one, deferrable=later) for one in _bias_gradient(node, needing, dtype))
    return products[0].kind, forward, tuple(backward)


def _bias_gradient(node: fx.Node, needing: frozenset[fx.Node], dtype: str) -> list[Kernel]:
    place = 0 if op_name(node).startswith("add") else 2
    bias = node.args[place] if len(node.args) > place else node.kwargs.get("bias")
    if not op_name(node).startswith(("add", "linear", "conv")) or bias not in needing:
        return []
    return [Kernel("memory", dtype, float(node_bytes(node) + node_bytes(bias)))]


def _gemm(product: Product, m: float, n: float, k: float, dtype: str, traffic: float) -> Kernel:
    flops = 2.0 * product.count * m * n * k
    return Kernel(product.kind, dtype, traffic, flops, product.count, m, n, k)


def _attention(node: fx.Node) -> tuple[Kernel, Kernel]:
    """FLOPs of ``sdpa_flop_count``; causal square attention does half of the work.

    On a ring (``meta["ring"]``: ranks, and whether zigzag evens out the causal work) the rows meet the keys
    of every rank, block by block; without zigzag the last rank's rows see nearly all of them.
    """
    query, key, value = (tensor_argument(node.args[i]) for i in range(3))
    assert query is not None and key is not None and value is not None
    ranks, even = node.meta.get("ring", (1, True))
    place = 4 if op_name(node) == "ring_attention" else 5
    causal = bool(node.args[place] if len(node.args) > place else node.kwargs.get("is_causal", False))
    batch, rows, columns = math.prod(query.shape[:-2]), query.shape[-2], key.shape[-2]
    seen = ranks * (1.0 if not causal else 0.5 if even else 1 - 0.5 / ranks)
    flops = 2.0 * batch * rows * columns * (query.shape[-1] + value.shape[-1]) * seen
    traffic = float(bytes_of(query) + ranks * (bytes_of(key) + bytes_of(value)) + node_bytes(node))
    head_dim = (query.shape[-1] + value.shape[-1]) / 2
    dtype = dtype_name(query)
    shape = (float(batch), float(rows), float(columns), head_dim, causal)
    forward = Kernel("attention", dtype, traffic, flops, *shape, launches=ranks)
    # The backward reads q, k, v, out and the output's gradient, and writes three gradients.
    backward = Kernel(
        "attention", dtype, 2 * traffic, ATTENTION_BACKWARD_FLOPS * flops, *shape, launches=ranks
    )
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
    """A whole sub-module or custom op: its FLOPs as one large product.

    An opaque one (``meta["flops"]``) runs its forward again in backward; a custom op has a backward.
    """
    traffic = float(node_bytes(node) + sum(node_bytes(source) for source in node.all_input_nodes))
    outputs = outputs_of(node)
    rows = max(1.0, math.prod(outputs[0].shape[:-1]) if outputs else 1.0)
    side = max(1.0, math.sqrt(flops / 2.0 / rows))
    dtype = kernel_dtype(node)
    forward = Kernel("gemm", dtype, traffic, flops, 1.0, rows, side, side)
    factor = 3.0 if "flops" in node.meta else 2.0
    backward = Kernel("gemm", dtype, factor * traffic, factor * flops, 1.0, rows, side, side)
    return "gemm", (forward,), (backward,) if node in needing else ()
