"""The forward half of the type check: what each tensor of a rank's graph is, and how it lies on one axis.

The unsplit graph and the rank's graph come in. Parameters lie as they are stored, collectives change
placements as ``transitions`` says, and every op must be the unsplit graph's next op under a rule of the
table, written as ``local_ops`` writes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from torch import fx

from autoplan.plan import AxisLayout
from autoplan_passes.calls import is_tensor, output_nodes, shape_of, tensor_inputs
from autoplan_passes.candidates import find_differentiable
from autoplan_passes.faults import Fault, TypeFault, call_text, fault_at, located
from autoplan_passes.local_ops import local_call, propagate
from autoplan_passes.rules import Rule
from autoplan_passes.states import (
    REPLICATE,
    State,
    divides,
    is_at_experts,
    local_shape,
    parse_state,
)
from autoplan_passes.transitions import Move, move_of
from autoplan_passes.typecheck_experts import EP, Routes
from autoplan_passes.typecheck_rules import nearest_rules, possible_rules, value_of

MOST_CALLS = 6  # that one op is written as


@dataclass(frozen=True)
class Borders:
    """How a region's borders and parameters lie on one axis; placeholders and outputs not named are R."""

    axis: str
    size: int
    parameters: Mapping[str, State] = field(default_factory=dict[str, State])
    inputs: Mapping[str, State] = field(default_factory=dict[str, State])
    outputs: Mapping[int, State] = field(default_factory=dict[int, State])

    @staticmethod
    def of(layout: AxisLayout, axis: str) -> Borders:
        """What a layout says of the borders; its rules are not read."""
        stored, inputs = (
            {name: parse_state(text) for name, text in texts.items()}
            for texts in (layout.parameters, layout.inputs)
        )
        outputs = {int(position): parse_state(text) for position, text in layout.outputs.items()}
        return Borders(axis, layout.size, stored, inputs, outputs)

    def placeholder(self, source: fx.Node) -> State:
        """How a placeholder of the region arrives or is stored."""
        given = self.parameters if source.meta.get("kind") == "parameter" else self.inputs
        return fitted(given.get(source.name, REPLICATE), source)

    def output(self, position: int, source: fx.Node) -> State:
        """How an output of the region leaves it."""
        return fitted(self.outputs.get(position, REPLICATE), source)


@dataclass(frozen=True)
class Step:
    """One op of the unsplit graph in the rank's graph: its nodes there, the last of which is the result."""

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    rules: tuple[Rule, ...]


class Forward:
    """``of`` says which tensor of the unsplit graph each node is, ``state`` how it lies (R, S or P)."""

    def __init__(self, whole: fx.GraphModule, local: fx.GraphModule, borders: Borders) -> None:
        self.whole, self.local, self.borders = whole, local, borders
        self.differentiable = find_differentiable(whole.graph)
        self.of: dict[fx.Node, fx.Node] = {}
        self.state: dict[fx.Node, State] = {}
        self.moves: dict[fx.Node, Move] = {}
        self.steps: dict[fx.Node, Step] = {}
        self.routes = Routes(whole.graph) if borders.axis == EP else None
        self._also: dict[fx.Node, list[tuple[State, Step]]] = {}
        self._value: dict[fx.Node, Any] = {}
        self._path: dict[fx.Node, tuple[str, ...]] = {}

    def infer(self) -> None:
        """Walk both graphs in step. Raises :class:`TypeFault`."""
        self._match_placeholders()
        sources = iter([n for n in self.whole.graph.nodes if n.op == "call_function"])
        nodes = [n for n in self.local.graph.nodes if n.op == "call_function"]
        while nodes:
            if self._take(nodes[0]):
                del nodes[0]
                continue
            source = next(sources, None)
            if source is None:
                raise fault_at(nodes[0], "no further op: the unsplit region has none", call_text(nodes[0]))
            del nodes[: len(self._step(source, nodes).nodes)]
        left = next(sources, None)
        if left is not None:
            raise fault_at(self.local.graph.output_node(), f"the op {call_text(left)} before it", "none")
        self._match_outputs()

    def _take(self, node: fx.Node) -> bool:
        """Whether the node is this axis's own: a collective, or a route of rows to their experts."""
        if self.routes is not None and self.routes.add(node):
            self._route(node, self.routes)
            return True
        move = self.routes.move_of(node) if self.routes is not None else move_of(node)
        if move is None or move.axis != self.borders.axis:
            return False
        self._move(move)
        return True

    def _route(self, node: fx.Node, routes: Routes) -> None:
        for tensor in node.all_input_nodes:
            found = self.state.get(tensor, "no tensor of the region")
            known = tensor in routes.states or tensor in routes.parts
            if not known and found != REPLICATE:
                raise fault_at(node, f"{tensor.name} as R", str(found))
        self._value[node] = self._rerun(node, node.all_input_nodes)
        told = routes.stands_for(node, self.of)
        if told is not None:
            self._keep(node, *told, self._value[node])

    def _rerun(self, node: fx.Node, inputs: Sequence[fx.Node]) -> Any:
        """The value of a node as it is, on fake tensors."""
        scratch = fx.Graph()
        copied = scratch.node_copy(node, self._placeholders(scratch, inputs).__getitem__)
        with located(node):
            return propagate(copied).meta["val"]

    def _match_placeholders(self) -> None:
        pairs = [[n for n in g.graph.nodes if n.op == "placeholder"] for g in (self.whole, self.local)]
        if [n.name for n in pairs[0]] != [n.name for n in pairs[1]]:
            wanted, found = (", ".join(n.name for n in nodes) for nodes in pairs)
            raise TypeFault(Fault("placeholders", wanted, found))
        for source, node in zip(*pairs):
            self._keep(node, source, value_of(self.borders.placeholder(source)), node.meta["val"])

    def _keep(self, node: fx.Node, source: fx.Node, state: State, value: Any) -> None:
        """Record what a node is; its shape must be that of its placement."""
        self.of[node], self.state[node], self._value[node] = source, state, value
        if not is_tensor(source) or is_at_experts(state):
            return
        shape, size = shape_of(source), self.borders.size
        if not divides(shape, state, size):
            raise fault_at(node, f"a dim of {list(shape)} that {size} ranks divide", str(state))
        noted = node.meta.get("val", value)
        if isinstance(source.meta["val"], (tuple, list)):
            pieces = [[list(piece.shape) for piece in listed] for listed in (value, noted)]
            if pieces[0] != pieces[1]:
                raise fault_at(node, f"pieces {pieces[1]}", str(pieces[0]))
            return
        wanted = local_shape(shape, state, size)
        for found in (value, noted):
            if tuple(found.shape) != wanted:
                expected = f"{list(wanted)}, {state} of {list(shape)} on {size} ranks"
                raise fault_at(node, expected, str(list(found.shape)))

    def _move(self, move: Move) -> None:
        """A collective: what it takes must lie as it expects."""
        node, tensor = move.node, move.tensor
        if tensor not in self.of or not self._become(tensor, fitted(move.before, self.of[tensor])):
            expected = f"{tensor.name} as {move.before}"
            found = str(self.state.get(tensor, "no tensor of the region"))
            raise fault_at(node, expected, found, self._path.get(tensor, ()))
        self.moves[node] = move
        made = self._rerun(node, node.all_input_nodes)
        if move.after.kind == "P":
            self._path[node] = (node.name,)
        self._keep(node, self.of[tensor], fitted(move.after, self.of[tensor]), made)

    def _placeholders(self, scratch: fx.Graph, nodes: Iterable[fx.Node]) -> dict[fx.Node, fx.Node]:
        """Stand-ins for nodes in another graph, with the values found so far."""
        held: dict[fx.Node, fx.Node] = {}
        for node in nodes:
            held[node] = scratch.placeholder(node.name)
            held[node].meta["val"] = self._value[node]
        return held

    def _step(self, source: fx.Node, nodes: Sequence[fx.Node]) -> Step:
        """The next op of the unsplit graph, under a rule whose inputs lie as they were found.

        Of several results that the nodes may have, all are kept: a value that is the same along a dim may be
        cut there in any order.
        """
        given = self._given(source, nodes)
        inputs = tuple(given[n] for n in tensor_inputs(source))
        mismatches: list[TypeFault] = []
        fits: list[tuple[State, Step]] = []
        for rules in self._legal(source, nodes[0], inputs):
            planned = self._planned(source, rules[0], given, nodes[0])
            found = planned if isinstance(planned, TypeFault) else planned.differs(nodes)
            if isinstance(planned, TypeFault) or found is not None:
                mismatches += [found] if found is not None else []
                continue
            step = Step(tuple(nodes[: len(planned.calls)]), inputs, rules)
            fits.append((value_of(rules[0].output), step))
            if len(fits) == 1:
                self._finish(source, step, planned.calls[-1].meta["val"])
        if not fits:
            raise mismatches[0]
        result = fits[0][1].nodes[-1]
        self._also[result] = [one for one in fits[1:] if self._may_be(source, one[0])]
        return fits[0][1]

    def _given(self, source: fx.Node, nodes: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
        """The node that stands for each input of an op, which may be written as several calls."""
        wanted = set(source.all_input_nodes)
        for count in range(1, min(MOST_CALLS, len(nodes)) + 1):
            own = set(nodes[:count])
            taken = [n for node in nodes[:count] for n in node.all_input_nodes if n not in own]
            given = {self.of.get(n, n): n for n in taken}
            if set(given) == wanted:
                return given
        expected = f"the next op of the unsplit region, {call_text(source)}"
        raise fault_at(nodes[0], expected, call_text(nodes[0]))

    def _may_be(self, source: fx.Node, state: State) -> bool:
        return divides(shape_of(source), state, self.borders.size)

    def _become(self, node: fx.Node, state: State) -> bool:
        """Whether a node lies as ``state``, or may be taken to."""
        if self.state[node] == state:
            return True
        step = next((step for other, step in self._also.get(node, ()) if other == state), None)
        if step is None:
            return False
        self.state[node], self.steps[node] = state, step
        return True

    def _legal(self, source: fx.Node, node: fx.Node, inputs: Sequence[fx.Node]) -> list[tuple[Rule, ...]]:
        """Rules that fit the inputs found, those with the same value together."""
        options = [[self.state[n], *(state for state, _ in self._also.get(n, ()))] for n in inputs]
        for states in product(*options):
            known = self._known_rules(source, states)
            alike: dict[tuple[State, str], list[Rule]] = {}
            for rule in known:
                if tuple(map(value_of, rule.inputs)) == states:
                    alike.setdefault((value_of(rule.output), rule.implementation), []).append(rule)
            if alike:
                for tensor, state in zip(inputs, states):
                    self._become(tensor, state)
                return [tuple(rules) for rules in alike.values()]
        states = tuple(self.state[n] for n in inputs)
        found = ", ".join(f"{n.name} {s}" for n, s in zip(inputs, states))
        path = [name for n in inputs for name in self._path.get(n, ())]
        raise fault_at(node, nearest_rules(self._known_rules(source, states), states), found, path)

    def _known_rules(self, source: fx.Node, states: Sequence[State]) -> tuple[Rule, ...]:
        rules = self.routes.rules(source, states) if self.routes is not None else None
        if rules is not None:
            return rules
        return possible_rules(source, states, self.borders.size, self.differentiable)

    def _planned(
        self, source: fx.Node, rule: Rule, given: Mapping[fx.Node, fx.Node], at: fx.Node
    ) -> _Planned | TypeFault:
        """What a rank should do for an op under a rule, or why it cannot."""
        scratch = fx.Graph()
        held = self._placeholders(scratch, given.values())
        inputs = {tensor: held[node] for tensor, node in given.items()}
        try:
            with located(at):
                local_call(scratch, source, rule, inputs, self.borders.axis, self.borders.size)
        except TypeFault as unfit:
            return unfit
        calls = tuple(n for n in scratch.nodes if n.op == "call_function")
        return _Planned(source, rule, {scratch: node for node, scratch in held.items()}, calls)

    def _finish(self, source: fx.Node, step: Step, value: Any) -> None:
        result, state = step.nodes[-1], value_of(step.rules[0].output)
        self.steps[result] = step
        if state.kind == "P":
            before = [name for n in step.inputs for name in self._path.get(n, ())]
            self._path[result] = (*dict.fromkeys(before), step.nodes[0].name)
        self._keep(result, source, state, value)

    def _match_outputs(self) -> None:
        output = self.local.graph.output_node()
        sources, nodes = output_nodes(self.whole.graph), output_nodes(self.local.graph)
        if len(sources) != len(nodes):
            raise fault_at(output, f"{len(sources)} outputs", str(len(nodes)))
        for position, (source, node) in enumerate(zip(sources, nodes)):
            if self.of.get(node) is not source:
                raise fault_at(output, f"{source.name} as output {position}", node.name)
            wanted = value_of(self.borders.output(position, source))
            if not self._become(node, wanted):
                expected = f"{wanted} at the region's border, output {position}"
                raise fault_at(node, expected, str(self.state[node]), self._path.get(node, ()))


@dataclass(frozen=True)
class _Planned:
    """The calls that a rule makes of an op, in a graph of their own; ``names`` leads back to the rank's."""

    source: fx.Node
    rule: Rule
    names: Mapping[fx.Node, fx.Node]
    calls: tuple[fx.Node, ...]

    def differs(self, nodes: Sequence[fx.Node]) -> TypeFault | None:
        """Where the nodes that are there are not these calls."""
        names = dict(self.names)
        for call, node in zip(self.calls, [*nodes, None]):
            wanted: Any = fx.map_arg((call.args, call.kwargs), names.__getitem__)
            if node is None or call.target is not node.target or wanted != (node.args, node.kwargs):
                found = "the region's end" if node is None else call_text(node)
                follows = node is not None and not set(node.all_input_nodes).isdisjoint(names.values())
                expected = f"{call_text(call, *wanted)} for {self.source.name} under {self.rule}"
                return fault_at(node if node is not None and follows else nodes[0], expected, found)
            names[call] = node
        return None


def fitted(state: State, source: fx.Node) -> State:
    """The state as a tensor of this shape has it: plain where one section is the whole dim."""
    return state.fitted(shape_of(source)) if state.is_shard else state
