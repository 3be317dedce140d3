"""The forward half of the type check: what each tensor of a rank's graph is, and how it lies on one axis.

The unsplit graph and the rank's graph come in. Parameters lie as they are stored, collectives change
placements as ``transitions`` says, and every op must be the unsplit graph's next op under a rule of the
table, written as ``local_ops`` writes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from autoplan.plan import AxisLayout
from autoplan_passes.calls import Call, is_tensor, output_nodes, shape_of, tensor_inputs
from autoplan_passes.candidates import find_differentiable
from autoplan_passes.dims import OUTPUT, Form, carry, narrow, place
from autoplan_passes.faults import Fault, TypeFault, call_text, fault_at, located
from autoplan_passes.local_ops import local_call, propagate
from autoplan_passes.rules import Facts, Rule, form_of, rules_for
from autoplan_passes.states import (
    REPLICATE,
    State,
    divides,
    is_at_experts,
    local_shape,
    parse_state,
    shard,
)
from autoplan_passes.transitions import Move, move_of
from autoplan_passes.typecheck_experts import EP, Routes

MOST_RULES_SHOWN = 4


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
            if tensor not in routes.states and found != REPLICATE:
                raise fault_at(node, f"{tensor.name} as R", str(found))
        self._value[node] = self._rerun(node, node.all_input_nodes)
        ends = routes.ends_of(node)
        if ends is not None:
            self._keep(node, self.of[ends[0]], ends[1], self._value[node])

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
        found = self.state.get(tensor, "no tensor of the region")
        if tensor not in self.of or found != fitted(move.before, self.of[tensor]):
            expected = f"{tensor.name} as {move.before}"
            raise fault_at(node, expected, str(found), self._path.get(tensor, ()))
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
        """The next op of the unsplit graph, under a rule whose inputs lie as they were found."""
        node = nodes[0]
        given = {self.of.get(n, n): n for n in node.all_input_nodes}
        if set(given) != set(source.all_input_nodes):
            raise fault_at(node, f"the next op of the unsplit region, {call_text(source)}", call_text(node))
        inputs = tuple(given[n] for n in tensor_inputs(source))
        mismatches: list[TypeFault] = []
        for rules in self._legal(source, node, inputs):
            planned = self._planned(source, rules[0], given, node)
            found = planned if isinstance(planned, TypeFault) else planned.differs(nodes)
            if isinstance(planned, TypeFault) or found is not None:
                mismatches += [found] if found is not None else []
                continue
            step = Step(tuple(nodes[: len(planned.calls)]), inputs, rules)
            self._finish(source, step, planned.calls[-1].meta["val"])
            return step
        raise mismatches[0]

    def _legal(self, source: fx.Node, node: fx.Node, inputs: Sequence[fx.Node]) -> list[tuple[Rule, ...]]:
        """Rules that fit the inputs found, those with the same value together."""
        states = tuple(self.state[n] for n in inputs)
        known = self._known_rules(source, states)
        alike: dict[tuple[State, str], list[Rule]] = {}
        for rule in known:
            if tuple(map(value_of, rule.inputs)) == states:
                alike.setdefault((value_of(rule.output), rule.implementation), []).append(rule)
        if not alike:
            found = ", ".join(f"{n.name} {s}" for n, s in zip(inputs, states))
            path = [name for n in inputs for name in self._path.get(n, ())]
            raise fault_at(node, _nearest(known, states), found, path)
        return [tuple(rules) for rules in alike.values()]

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
            if self.state[node] != wanted:
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
                text = call_text(call, *wanted)
                return fault_at(nodes[0], f"{text} for {self.source.name} under {self.rule}", found)
            names[call] = node
        return None


def possible_rules(
    node: fx.Node, inputs: Sequence[State], size: int, differentiable: frozenset[fx.Node]
) -> tuple[Rule, ...]:
    """The rules of a node on ``size`` ranks among the cuts of ``inputs`` and what can follow from them."""
    if not is_tensor(node):
        return (Rule((REPLICATE,) * len(inputs), REPLICATE),)
    cuts = {n: frozenset([s]) for n, s in zip(tensor_inputs(node), inputs) if s.is_shard}
    shape = shape_of(node)
    outputs = {s for d in range(len(shape)) if divides(shape, s := shard(d), size)}
    form = form_of(node)
    if form is not None:
        outputs |= set(_carried(form, Call(node), cuts, size))
    return rules_for(node, size, Facts(differentiable, {**cuts, node: frozenset(outputs)}))


def _carried(form: Form, call: Call, cuts: Mapping[fx.Node, frozenset[State]], size: int) -> Iterator[State]:
    """The output's cuts that follow from those of the inputs, by atoms and by sections."""
    for i, node in enumerate(call.tensors):
        for state in cuts.get(node, ()):
            cut = carry(form, i, state, size)
            if cut is not None and (output := place(form, OUTPUT, cut)) is not None:
                yield output
    parts = form.parts
    if parts is None:
        return
    if parts.whole != OUTPUT:
        whole = call.tensors[parts.whole]
        for state in cuts.get(whole, ()):
            own = narrow(state.sections_of(shape_of(whole)[state.dim]), *parts.pieces[0][1:])
            if state.dim == parts.dim and own is not None:
                yield shard(parts.dim, own)
        return
    sections: list[int] = []
    for i, _, extent in parts.pieces:
        states = cuts.get(call.tensors[i], frozenset())
        sections += next((s.sections_of(extent) for s in states if s.dim == parts.dim), (extent,))
    yield shard(parts.dim, sections)


def fitted(state: State, source: fx.Node) -> State:
    """The state as a tensor of this shape has it: plain where one section is the whole dim."""
    return state.fitted(shape_of(source)) if state.is_shard else state


def value_of(state: State) -> State:
    """How the value alone lies: R* is R."""
    return REPLICATE if state.kind == "R*" else state


def _nearest(rules: Sequence[Rule], states: Sequence[State]) -> str:
    """The rules that share most inputs with what was found, for an error."""

    def distance(rule: Rule) -> int:
        return sum(value_of(a) != b for a, b in zip(rule.inputs, states))

    if not rules:
        return "an op that keeps rows apart"
    shown = sorted(rules, key=distance)[:MOST_RULES_SHOWN]
    more = f" or {len(rules) - len(shown)} more" if len(rules) > len(shown) else ""
    return f"inputs as in {' or '.join(map(str, shown))}{more}"
