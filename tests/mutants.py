"""Wrong graphs made on purpose: one collective or one scale of a rank's graph deleted, or there twice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from autoplan_passes.dispatch import combine, dispatch, route
from autoplan_passes.transitions import move_of

ROUTED = (dispatch, combine)


@dataclass(frozen=True)
class Mutant:
    """``graph`` with one fault at ``node``; ``near`` are the ops between which it lies."""

    what: str
    node: str
    graph: fx.GraphModule
    near: frozenset[str]


def mutants(graph: fx.GraphModule, ways: int) -> Iterator[Mutant]:
    """Every collective, dispatch and average over ``ways`` parts: deleted, then doubled."""
    for node in graph.graph.nodes:
        counted = node.users and all(user.target is route for user in node.users)  # whatever its state
        if not counted and (move_of(node) is not None or node.target in ROUTED or is_scale(node, ways)):
            yield deleted(graph, node)
            yield doubled(graph, node)


def is_scale(node: fx.Node, ways: int) -> bool:
    return node.target is torch.ops.aten.div.Tensor and node.args[1:] == (ways,)


def copied(graph: fx.GraphModule) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    new, twin = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.graph.nodes:
        twin[node] = new.node_copy(node, twin.__getitem__)
        twin[node].meta = dict(node.meta)
    return fx.GraphModule(graph, new), twin


def deleted(graph: fx.GraphModule, node: fx.Node) -> Mutant:
    result, twin = copied(graph)
    own = twin[node]
    source = own.all_input_nodes[0]
    near = {source.name, *(user.name for user in own.users)}
    own.replace_all_uses_with(source)
    result.graph.erase_node(own)
    result.recompile()
    return Mutant("deleted", node.name, result, frozenset(near))


def doubled(graph: fx.GraphModule, node: fx.Node) -> Mutant:
    result, twin = copied(graph)
    own = twin[node]
    with result.graph.inserting_after(own):
        again = result.graph.node_copy(own)
    again.meta = dict(own.meta)
    own.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)
    again.update_arg(0, own)
    result.recompile()
    return Mutant("doubled", node.name, result, frozenset({own.name, again.name}))
