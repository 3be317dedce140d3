"""The attention ops of a region graph: which head counts they have, and which tp degrees cut them all.

Repeated key-value heads (expand and reshape, ``repeat_interleave``) are traced back to the heads that the
model stores.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import fx

from autoplan_passes import table_dims
from autoplan_passes.calls import Call, op_name, overload_name, shape_of
from autoplan_passes.rules import form_of

ATTENTION = "aten.scaled_dot_product_attention"
PRODUCTS = ("aten.matmul", "aten.bmm")
SOFTMAX = ("aten.softmax", "aten._softmax")
SAME_HEADS = ("aten.clone", "aten.contiguous", "aten.alias", "aten._to_copy", *table_dims.ROWS)
# Between scores and weights of attention written by hand: scaling, masks, casts, dropout.
BETWEEN = 8


def attention_heads(graph: fx.GraphModule) -> list[tuple[fx.Node, int, int]]:
    """(node, query heads, key-value heads) of every attention op, fused or written as two products."""
    return [(node, query_heads, _stored_heads(key)) for node, query_heads, key in _attention(graph.graph)]


def attention_outputs(graph: fx.Graph) -> list[fx.Node]:
    """The attention ops, or the softmax of those written by hand: their dim -3 counts query heads."""
    return [node for node, _, _ in _attention(graph)]


def is_causal(graph: fx.Graph) -> bool:
    """Whether some attention op of the graph sees earlier positions alone."""
    fused = (node for node, _, _ in _attention(graph) if op_name(node) == ATTENTION)
    return any(Call(node).arguments["is_causal"] for node in fused)


def _attention(graph: fx.Graph) -> Iterator[tuple[fx.Node, int, fx.Node]]:
    """(op or softmax, query heads, keys) of every attention."""
    for node in graph.nodes:
        if op_name(node) == ATTENTION and len(shape_of(node)) > 3:
            query, key = Call(node).tensors[:2]
            yield node, shape_of(query)[-3], key
        elif op_name(node) in SOFTMAX and (product := _scores(node)) is not None:
            yield node, shape_of(node)[-3], Call(product).tensors[1]


def head_degrees(query_heads: int, key_heads: int) -> tuple[int, ...]:
    """The degrees that attention may be cut by along heads; fewer kv heads than ranks are repeated."""
    divisors = (n for n in range(1, query_heads + 1) if query_heads % n == 0)
    return tuple(n for n in divisors if key_heads % n == 0 or n % key_heads == 0)


def tp_degrees(graph: fx.GraphModule) -> tuple[int, ...]:
    """The degrees by which every attention op may be cut along heads; () without attention.

    Key-value heads divide, or are shared by as many neighbours each (in fused attention).
    """
    found = [cut_degrees(node, query, key) for node, query, key in attention_heads(graph)]
    return tuple(sorted(set.intersection(*map(set, found)))) if found else ()


def cut_degrees(node: fx.Node, query_heads: int, key_heads: int) -> tuple[int, ...]:
    """The degrees by which one attention op may be cut along heads."""
    plain = math.gcd(query_heads, key_heads)
    shared = head_degrees(query_heads, key_heads) if _shares_heads(node) else ()
    return tuple(t for t in range(1, query_heads + 1) if plain % t == 0 or t in shared)


def _shares_heads(node: fx.Node) -> bool:
    """Whether neighbours may share a key-value head of an attention op."""
    if op_name(node) != ATTENTION or Call(node).arguments.get("dropout_p"):
        return False
    return all(shape[-3:-2] in ((), (1,)) for shape in Call(node).shapes[3:])


def _scores(softmax: fx.Node) -> fx.Node | None:
    """The product of queries and keys under a softmax over [samples, heads, queries, keys]."""
    node = softmax
    for _ in range(BETWEEN):
        same = [n for n in node.all_input_nodes if "val" in n.meta and shape_of(n) == shape_of(softmax)]
        if len(shape_of(softmax)) != 4 or not same:
            return None
        node = same[0]
        if op_name(node) in PRODUCTS:
            return node
        if node.op == "placeholder":
            return None
    return None


def _stored_heads(key: fx.Node) -> int:
    """Heads of ``key`` before they were repeated for the groups of query heads."""
    node, tracked = key, {len(shape_of(key)) - 3}
    heads = math.prod(shape_of(node)[d] for d in tracked)
    while {op_name(node), overload_name(node)} & set(SAME_HEADS) and len(Call(node).tensors) == 1:
        form = form_of(node)
        if form is None or form.parts is not None:
            break
        atoms = {atom for d in tracked for atom in form.output[d]}
        source = {d for d, dim in enumerate(form.inputs[0]) if atoms & set(dim)}
        if any(set(form.inputs[0][d]) - atoms for d in source):
            break
        node, tracked = Call(node).tensors[0], source
        heads = math.prod(shape_of(node)[d] for d in tracked)
    return heads
