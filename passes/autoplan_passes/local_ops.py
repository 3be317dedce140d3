"""One op rewritten for one rank: a node, its rule and its local inputs come in, the local node goes out.

The op itself stays where it can, with its sizes made local; an op with a sharded implementation is replaced.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from autoplan.errors import BadPlanError
from autoplan_passes import collectives
from autoplan_passes.calls import Call, first_tensor, op_name, shape_of, tensor_inputs
from autoplan_passes.grouped import grouped_product
from autoplan_passes.implementations import AVERAGE, IMPLEMENTATIONS, repeated_heads_sent, scaled
from autoplan_passes.rows import Local
from autoplan_passes.rules import Rule, row_of
from autoplan_passes.states import is_at_experts, local_shape
from autoplan_passes.table_contractions import RING

# Views whose second argument is their sizes.
SIZED_VIEWS = frozenset({"aten.view", "aten._unsafe_view", "aten.reshape", "aten.expand"})
# The same product by a library's own operator: the code that runs needs torch alone.
OTHER_GROUPED_PRODUCTS = frozenset({"transformers.grouped_mm_fallback"})
VIEWS = {torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default}


def local_call(
    graph: fx.Graph, node: fx.Node, rule: Rule, inputs: Mapping[fx.Node, fx.Node], axis: str, ways: int
) -> fx.Node:
    """Append to ``graph`` what one of ``ways`` ranks does for ``node``, with its local ``meta["val"]``.

    ``inputs`` maps each input of the node to its local node, in the state that the rule asks for. Raises
    BadPlanError where the local tensors do not fit the op.
    """
    if rule.implementation in IMPLEMENTATIONS:
        local = _replaced(graph, node, rule, inputs, axis)
        if rule.implementation == RING:
            local.meta["ring"] = (ways, rule.output.zigzag)
    elif rule.implementation == "repeated_heads":
        local = _with_repeated_heads(graph, node, inputs, axis, ways)
    else:
        local = _with_local_sizes(graph, node, rule, inputs, ways)
        if rule.implementation == AVERAGE:
            local = scaled(graph, propagate(local), ways)
    local.meta = {**node.meta, **local.meta}
    return propagate(local)


def _replaced(
    graph: fx.Graph, node: fx.Node, rule: Rule, inputs: Mapping[fx.Node, fx.Node], axis: str
) -> fx.Node:
    """``embedding(w, ids) -> vocab_embedding(ids, w, padding_idx, axis)`` and the like."""
    implementation = IMPLEMENTATIONS[rule.implementation]
    arguments = implementation.arguments(Call(node), rule.output, axis)
    local = graph.call_function(implementation.function, fx.map_arg(arguments, inputs.__getitem__))
    if op_name(node) == "aten.dropout":
        return graph.call_function(operator.getitem, (propagate(local), 0))
    return local


def _with_repeated_heads(
    graph: fx.Graph, node: fx.Node, inputs: Mapping[fx.Node, fx.Node], axis: str, ways: int
) -> fx.Node:
    """``attention(q, k, v) -> attention(q, all_to_all(repeat_interleave(k, 4, 1), 2, 1, axis), ...)``"""
    made = dict(inputs)
    for tensor, sent in zip(Call(node).tensors[1:3], repeated_heads_sent(Call(node))):
        repeats = ways // shape_of(tensor)[1]
        repeat = torch.ops.aten.repeat_interleave.self_int
        repeated = propagate(graph.call_function(repeat, (inputs[tensor], repeats, 1)))
        made[tensor] = propagate(graph.call_function(collectives.all_to_all, (repeated, 2, 1, axis)))
        made[tensor].meta["collective"] = ((*sent, axis),)
    return graph.node_copy(node, made.__getitem__)


def _with_local_sizes(
    graph: fx.Graph, node: fx.Node, rule: Rule, inputs: Mapping[fx.Node, fx.Node], ways: int
) -> fx.Node:
    """``view(x, [2, 16, 8, 64]) -> reshape(x, [2, 16, 4, 64])``; reshape, as strides may differ by chip.

    A squeeze of all dims of size 1 names them, since a cut dim may come to have size 1 too.
    """
    local = graph.node_copy(node, inputs.__getitem__)
    row = row_of(node)
    if row is not None and row.sizes is not None and rule.is_cut:
        call = Call(node)
        states = dict(zip(tensor_inputs(node), rule.inputs))
        shapes = tuple(tuple(first_tensor(inputs[n]).shape) for n in call.tensors)
        output = local_shape(call.output, rule.output, ways)
        inputs_states = tuple(states[n] for n in call.tensors)
        pieces = max(state.ways(ways) for state in (*inputs_states, rule.output))
        set_arguments(local, call, row.sizes(Local(call, inputs_states, rule.output, shapes, output, pieces)))
    if local.target is torch.ops.aten.squeeze.default:
        ones = [d for d, n in enumerate(shape_of(Call(node).tensors[0])) if n == 1]
        local.target, local.args = torch.ops.aten.squeeze.dims, (local.args[0], ones)
    if is_at_experts(rule.output):
        free_rows(local, node)
    if op_name(node) in OTHER_GROUPED_PRODUCTS:
        local.target, local.args, local.kwargs = grouped_product, (*local.args, *local.kwargs.values()), {}
    if local.target in VIEWS:
        local.target = torch.ops.aten.reshape.default
    return local


def free_rows(local: fx.Node, node: fx.Node) -> None:
    """``view(x, [192, 2, 32]) -> view(x, [-1, 2, 32])``: as many rows as have arrived at their experts."""
    if op_name(node) in SIZED_VIEWS:
        given: Any = node.args[1]
        rest = given[1:] if op_name(node) == "aten.expand" else shape_of(node)[1:]
        local.update_arg(1, [-1, *rest])


def set_arguments(node: fx.Node, call: Call, values: Mapping[str, Any]) -> None:
    """Give named arguments of an op new values, where they stand."""
    names = list(call.arguments)
    for name, value in values.items():
        position = names.index(name)
        if position < len(node.args):
            node.update_arg(position, value)
        else:
            node.update_kwarg(name, value)


def propagate(node: fx.Node) -> fx.Node:
    """Run the node on the values of its inputs, into its ``meta["val"]``."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), _value)
    target: Callable[..., Any] = node.target  # pyright: ignore[reportAssignmentType] - calls only
    try:
        node.meta["val"] = target(*args, **kwargs)
    except (RuntimeError, ValueError, TypeError) as error:
        raise BadPlanError(
            f"The op {node.name} ({node.target}) does not fit its local tensors: {error}. The layout is of "
            "another model or version; search again: autoplan search MODEL.py"
        ) from error
    return node


def _value(node: fx.Node) -> Any:
    return node.meta["val"]


def find_fake_mode(graph: fx.Graph) -> FakeTensorMode:
    """The mode of the graph's own fake tensors; a new one where it has none."""
    for node in graph.nodes:
        if isinstance(node.meta.get("val"), FakeTensor):
            return node.meta["val"].fake_mode
    return FakeTensorMode(allow_non_fake_inputs=True)
