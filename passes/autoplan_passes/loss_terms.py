"""A loss that adds terms up in, the vector of its terms out: each can then be weighted for itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autoplan_passes import collectives

# Ops that leave a single number as it is; what they say about its shape does not hold for a vector.
RESHAPES = frozenset({"view", "reshape", "squeeze", "unsqueeze"})
PASSED_ON = RESHAPES | {"_to_copy", "clone", "alias", "contiguous"}
LINEAR = frozenset({"mul", "div", "neg"})
# What the sharding pass may put between the numbers of a loss: each works on elements alone.
CONVERSIONS: frozenset[Any] = frozenset(
    {
        collectives.copy_to,
        collectives.reduce_from,
        collectives.on_first_rank,
        collectives.once,
        collectives.first_of,
    }
)

aten: Any = torch.ops.aten


def op_name(node: fx.Node) -> str:
    """The name of an ATen op, or an empty text."""
    schema = getattr(node.target, "_schema", None)
    return str(schema.name).partition("::")[2] if schema is not None else ""


def loss_leaves(loss: fx.Node) -> list[fx.Node]:
    """The terms that sums, differences and factors before ``loss`` make it from, left to right."""
    if _is_sum_of_two(loss):
        return [leaf for source in loss.all_input_nodes for leaf in loss_leaves(source)]
    if _passes_through(loss):
        return loss_leaves(loss.all_input_nodes[0])
    return [loss]


def split_loss(graph: fx.GraphModule, position: int, terms: int) -> fx.GraphModule:
    """The region's graph with output ``position``, the loss, as a vector of its terms; in place.

    ::

        loss = add(ce, mul(aux, 0.01))
        --> terms = cat([reshape(ce, [1]), mul(reshape(aux, [1]), 0.01)])

    Raises ValueError where the graph has another number of terms.
    """
    (outputs,) = graph.graph.output_node().args
    assert isinstance(outputs, (tuple, list))
    loss = outputs[position]
    assert isinstance(loss, fx.Node)
    if len(loss_leaves(loss)) != terms:
        raise ValueError(f"expected {terms} terms, found {len(loss_leaves(loss))}")
    with graph.graph.inserting_before(graph.graph.output_node()):
        parts = _vectors(graph.graph, loss)
        dtype = loss.meta["val"].dtype
        same = [_call(graph.graph, _cast(dtype), part) for part in parts]
        joined = graph.graph.call_function(aten.cat.default, (same,))
    joined.meta["val"] = loss.meta["val"].new_empty(terms)
    graph.graph.output_node().args = ((*outputs[:position], joined, *outputs[position + 1 :]),)
    graph.graph.eliminate_dead_code()
    graph.graph.lint()
    graph.recompile()
    return graph


def _vectors(graph: fx.Graph, node: fx.Node) -> list[fx.Node]:
    """Vectors that hold the terms of a node, one each."""
    if _is_sum_of_two(node):
        first, second = node.all_input_nodes
        alpha: Any = node.kwargs.get("alpha", 1)
        scale = alpha if op_name(node) == "add" else -alpha
        later = _vectors(graph, second)
        scaled = [_call(graph, lambda g, v: _mul(g, v, scale), v) for v in later] if scale != 1 else later
        return [*_vectors(graph, first), *scaled]
    if _passes_through(node):
        (source,) = node.all_input_nodes
        return [_call(graph, lambda g, v: _again(g, node, source, v), v) for v in _vectors(graph, source)]
    leaf = graph.call_function(aten.reshape.default, (node, [1]))
    leaf.meta["val"] = node.meta["val"].new_empty(1)
    return [leaf]


def _again(graph: fx.Graph, node: fx.Node, source: fx.Node, vector: fx.Node) -> fx.Node:
    """The op of ``node`` on a vector instead of the single number ``source``."""
    if op_name(node) in RESHAPES:
        return vector
    return graph.node_copy(node, lambda n: vector if n is source else n)


def _mul(graph: fx.Graph, vector: fx.Node, factor: Any) -> fx.Node:
    return graph.call_function(aten.mul.Tensor, (vector, factor))


def _cast(dtype: torch.dtype) -> Callable[[fx.Graph, fx.Node], fx.Node]:
    def cast(graph: fx.Graph, vector: fx.Node) -> fx.Node:
        if vector.meta["val"].dtype == dtype:
            return vector
        made = graph.call_function(aten._to_copy.default, (vector,), {"dtype": dtype})
        made.meta["val"] = vector.meta["val"].to(dtype)
        return made

    return cast


def _call(graph: fx.Graph, make: Callable[[fx.Graph, fx.Node], fx.Node], vector: fx.Node) -> fx.Node:
    """A new node on a vector, with the vector's shape where it has none of its own."""
    made = make(graph, vector)
    if made is not vector:
        dtype = made.meta["val"].dtype if "val" in made.meta else vector.meta["val"].dtype
        made.meta["val"] = vector.meta["val"].to(dtype)
    return made


def _is_sum_of_two(node: fx.Node) -> bool:
    """Adding two tensors, or taking one from the other (two different ones)."""
    return op_name(node) in ("add", "sub") and len(node.all_input_nodes) == 2


def _passes_through(node: fx.Node) -> bool:
    """One tensor in, each of its elements times a number out."""
    if node.op != "call_function" or len(node.all_input_nodes) != 1 or not _is_single(node):
        return False
    if not _is_single(node.all_input_nodes[0]):
        return False
    return op_name(node) in PASSED_ON | LINEAR or node.target in CONVERSIONS


def _is_single(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.numel() == 1
