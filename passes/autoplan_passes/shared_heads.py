"""Repeated key-value heads: a region graph comes in, one whose attention shares the stored heads goes out.

Where more ranks than key-value heads cut the query heads, a head goes to the ranks that need it instead of
being repeated on all of them::

    attention(q, reshape(expand(unsqueeze(k, 2), [2, 2, 4, 16, 8]), [2, 8, 16, 8]), ...)
      --> attention(q, k, ..., enable_gqa=True)
"""

from __future__ import annotations

import copy

from torch import fx

from autoplan_passes.calls import Call, op_name, overload_name, shape_of
from autoplan_passes.local_ops import find_fake_mode, propagate

ATTENTION = "aten.scaled_dot_product_attention"
REARRANGED = (
    "aten.clone",
    "aten.contiguous",
    "aten.flatten",
    "aten.reshape",
    "aten.view",
    "aten._unsafe_view",
)
WHOLE_SLICES = ("aten.slice", "aten.unsqueeze", "aten.alias")


def share_heads(graph: fx.GraphModule, size: int) -> fx.GraphModule:
    """A copy in which no attention repeats key-value heads that ``size`` ranks outnumber; the graph itself
    where none does."""
    names = {node.name for node in graph.graph.nodes if _repeats(node, size)}
    if not names:
        return graph
    shared = fx.GraphModule(graph, copy.deepcopy(graph.graph))
    with find_fake_mode(graph.graph):
        for node in [n for n in shared.graph.nodes if n.name in names]:
            for repeated in Call(node).tensors[1:3]:
                stored = _stored(repeated)
                assert stored is not None
                node.replace_input_with(repeated, stored)
            node.kwargs = {**node.kwargs, "enable_gqa": True}
            propagate(node)
    shared.graph.eliminate_dead_code()
    shared.graph.lint()
    shared.recompile()
    return shared


def _repeats(node: fx.Node, size: int) -> bool:
    if op_name(node) != ATTENTION or len(shape_of(node)) != 4 or Call(node).arguments.get("enable_gqa"):
        return False
    heads, stored = shape_of(node)[1], [_stored(tensor) for tensor in Call(node).tensors[1:3]]
    if any(tensor is None for tensor in stored):
        return False
    few = {shape_of(tensor)[1] for tensor in stored if tensor is not None}
    return len(few) == 1 and 1 < (kv := few.pop()) < size and size % kv == 0 and heads % size == 0


def _stored(repeated: fx.Node) -> fx.Node | None:
    """The tensor [samples, kv heads, tokens, size] whose heads are repeated, each as many times in a row."""
    if overload_name(repeated) == "aten.repeat_interleave.self_int":
        call = Call(repeated)
        return call.tensors[0] if call.dim() == 1 and len(call.output) == 4 else None
    node = repeated
    while op_name(node) in REARRANGED:
        node = Call(node).tensors[0]
    samples, heads, *rest = shape_of(repeated)
    if op_name(node) != "aten.expand" or len(shape_of(node)) != 5 or node is repeated:
        return None
    groups = shape_of(node)
    source = Call(node).tensors[0]
    if (groups[0], groups[1] * groups[2], *groups[3:]) != (samples, heads, *rest):
        return None
    wanted = (samples, groups[1], *rest)
    if shape_of(source) != (samples, groups[1], 1, *rest):
        return None
    while op_name(source) in WHOLE_SLICES:
        before = Call(source).tensors[0]
        if shape_of(before) == wanted:
            return before
        if shape_of(before) != shape_of(source):
            return None
        source = before
    return None
