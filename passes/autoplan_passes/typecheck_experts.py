"""The type check on the ``ep`` axis: whether rows are with their tokens (R) or at their experts (``E(k)``).

An op of the unsplit graph and the states of its inputs come in, the rules that hold there go out. The ranks
of ``ep`` have different tokens, so nothing may be gathered or summed along it: whatever reads tokens is R
throughout, or runs row by row where the experts are. Gradients of whole parameters stay this rank's share,
to be averaged with those of all replicas. ``E(k)`` is its own gradient.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from autoplan_passes import dispatch
from autoplan_passes.calls import Call, tensor_inputs
from autoplan_passes.experts import (
    BY_EXPERT,
    ROUTED,
    is_grouped_product,
    is_lookup,
    is_row_wise,
    sorted_experts,
    token_nodes,
)
from autoplan_passes.rules import Rule, form_of
from autoplan_passes.states import REPLICATE, State, at_experts, is_at_experts
from autoplan_passes.transitions import Move

EP = "ep"
ENDS = ROUTED.index("ends")
NO_SENDS = ("all_to_all", "all_to_all")


@dataclass
class Routes:
    """The routes of a rank's graph as they are met: ``states`` their ``E(k)``, ``parts`` what they give."""

    whole: fx.Graph
    states: dict[fx.Node, State] = field(default_factory=dict[fx.Node, State])
    parts: dict[fx.Node, tuple[fx.Node, int]] = field(default_factory=dict[fx.Node, tuple[fx.Node, int]])

    def __post_init__(self) -> None:
        self.of_tokens = token_nodes(self.whole)

    def add(self, node: fx.Node) -> bool:
        """Whether the node is a route or one of its results; the k-th route leads to ``E(k)``."""
        if node.target is dispatch.route and node.args[2] == EP:
            self.states[node] = at_experts(len(self.states))
            return True
        if node.target is operator.getitem and node.args[0] in self.states:
            self.parts[node] = (node.all_input_nodes[0], int(str(node.args[1])))
            return True
        return node.target is dispatch.own_experts and all(n in self.parts for n in node.all_input_nodes)

    def stands_for(self, node: fx.Node, of: Mapping[fx.Node, fx.Node]) -> tuple[fx.Node, State] | None:
        """What a result of a route is of the unsplit graph, and ``E(k)``: the ends of the groups at the
        experts, or the numbers of the rows' experts. ``of`` are the nodes that local ones stand for."""
        if node.target is dispatch.own_experts:
            route, index = self.parts[node.all_input_nodes[1]]
            experts = sorted_experts(of[route.all_input_nodes[0]]) if index == ENDS else None
            return (experts, self.states[route]) if experts is not None else None
        route, index = self.parts.get(node, (node, -1))
        return (of[route.all_input_nodes[0]], self.states[route]) if index == ENDS else None

    def move_of(self, node: fx.Node) -> Move | None:
        """Rows to their experts or back, by the results of one route."""
        if node.target not in (dispatch.dispatch, dispatch.combine) or node.args[3] != EP:
            return None
        rows, splits, order = node.all_input_nodes[:3]
        routes = {self.parts.get(part, (part, -1))[0] for part in (splits, order)}
        at = self.states.get(routes.pop()) if len(routes) == 1 else None
        if at is None:
            return None
        before, after = (REPLICATE, at) if node.target is dispatch.dispatch else (at, REPLICATE)
        return Move(node, rows, EP, before, after, arrives=after, passes=before, sends=NO_SENDS)

    def rules(self, node: fx.Node, states: Sequence[State]) -> tuple[Rule, ...] | None:
        """The rules of an op whose inputs lie as ``states``; None for any rule, where it reads no tokens."""
        inputs = tensor_inputs(node)
        there = {state for state in states if is_at_experts(state)}
        if not there:
            return (Rule((REPLICATE,) * len(inputs), REPLICATE),) if node in self.of_tokens else None
        at, by_node = there.pop(), dict(zip(inputs, states))
        if is_grouped_product(node):
            wanted = dict(zip(Call(node).tensors, (at, BY_EXPERT, at)))
            return (Rule(tuple(wanted[n] for n in inputs), at),)
        if is_lookup(node):
            return (Rule((BY_EXPERT, at), at),)
        rows = frozenset(n for n in inputs if is_at_experts(by_node[n]))
        if there or not is_row_wise(node, rows, self.of_tokens - rows):
            return ()
        return (Rule(tuple(_row_state(node, n, at) for n in inputs), at),)


def _row_state(node: fx.Node, tensor: fx.Node, at: State) -> State:
    """At the experts where the tensor has the op's rows, else whole."""
    form = form_of(node)
    assert form is not None  # the op is row-wise
    dims = form.inputs[Call(node).tensors.index(tensor)]
    return at if dims and form.output[0][0] in dims[0] else REPLICATE
