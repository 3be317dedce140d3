"""The sharding pass: an unsharded region graph and its Layout become the graph that one rank runs.

Parameters shrink to their pieces, sizes in views and factories become local, ops with a sharded
implementation are replaced, and each conversion between placements is inserted once per tensor and state.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import fx

from autoplan.errors import BadPlanError
from autoplan.plan import NO_AXIS, AxisLayout, Layout
from autoplan_passes import collectives
from autoplan_passes.calls import Call, is_tensor, output_nodes, shape_of, tensor_inputs
from autoplan_passes.candidates import find_differentiable
from autoplan_passes.conversions import Conversion, chains
from autoplan_passes.dispatch import DryExperts
from autoplan_passes.experts import Routes, chain_ends, chain_experts
from autoplan_passes.fuel import Fuel, limited
from autoplan_passes.implementations import SENT_ON_THE_WAY, implementation_sends
from autoplan_passes.local_ops import find_fake_mode, local_call, propagate
from autoplan_passes.padding import made_divisible
from autoplan_passes.placements import place_on
from autoplan_passes.rules import Rule
from autoplan_passes.shifted_loss import keep_all_positions
from autoplan_passes.states import REPLICATE, State, is_at_experts, local_shape, parse_state

# The axes inside a region, in the order in which they are applied.
REGION_AXES = ("cp", "ep", "tp")


def parse_rule(text: str) -> Rule:
    """``"R*,S(0)->S(2)"``, optionally followed by the implementation; inverse of ``str(rule)``."""
    states, _, implementation = text.partition(" ")
    inputs, _, output = states.partition("->")
    parsed = tuple(parse_state(part) for part in inputs.split(",") if part)
    return Rule(parsed, parse_state(output), implementation or "local")


def layout_rules(graph: fx.GraphModule, layout: AxisLayout, region_class: str = "") -> dict[fx.Node, Rule]:
    """The rule of every call of the graph; a node that the layout does not name runs replicated.

    Raises BadPlanError where the layout names a node that the graph lacks, or gives it other inputs.
    """
    nodes = {n.name: n for n in graph.graph.nodes if n.op == "call_function"}
    unknown = sorted(set(layout.rules) - set(nodes))
    if unknown:
        raise BadPlanError(
            f"The layout of {region_class!r} names {unknown[0]!r}, which is no op of this "
            "region. The plan belongs to another model or version; search again: autoplan search MODEL.py"
        )
    rules: dict[fx.Node, Rule] = {}
    for name, node in nodes.items():
        count = len(tensor_inputs(node))
        rule = (
            parse_rule(layout.rules[name]) if name in layout.rules else Rule((REPLICATE,) * count, REPLICATE)
        )
        if len(rule.inputs) != count:
            raise BadPlanError(
                f"The rule of {name!r} in the layout should have {count} input states; it is "
                f"{layout.rules[name]!r}. Search again: autoplan search MODEL.py"
            )
        rules[node] = _fitted(rule, node)
    return rules


def _fitted(rule: Rule, node: fx.Node) -> Rule:
    """The rule in the states that the node's own shapes give: another micro-batch has other sections."""
    inputs = tuple(state.fitted(shape_of(n)) for n, state in zip(tensor_inputs(node), rule.inputs))
    output = rule.output.fitted(shape_of(node)) if rule.output.is_shard else rule.output
    return Rule(inputs, output, rule.implementation)


def parameter_states(graph: fx.GraphModule, layout: AxisLayout) -> dict[fx.Node, State]:
    """The stored state of every parameter placeholder (R where the layout does not say)."""
    return {
        node: parse_state(layout.parameters.get(node.name, "R"))
        for node in graph.graph.nodes
        if node.meta.get("kind") == "parameter"
    }


def boundary_states(graph: fx.GraphModule, layout: AxisLayout) -> dict[fx.Node, State]:
    """The state in which each input of the region arrives."""
    inputs = [node for node in graph.graph.nodes if node.meta.get("kind") == "input"]
    return {node: _state_of(node, layout.inputs.get(node.name, "R")) for node in inputs}


def _state_of(node: fx.Node, text: str) -> State:
    state = parse_state(text)
    return state.fitted(shape_of(node)) if state.is_shard else state


def output_states(graph: fx.GraphModule, layout: AxisLayout) -> list[tuple[fx.Node, State]]:
    """Every output of the region, in order, with the state in which it leaves."""
    return [
        (node, _state_of(node, layout.outputs.get(str(position), "R")))
        for position, node in enumerate(output_nodes(graph.graph))
    ]


@dataclass(frozen=True)
class AxisStep:
    """One application of the pass: the graph before and after one axis."""

    axis: str
    layout: AxisLayout
    whole: fx.GraphModule
    local: fx.GraphModule


def shard_region(
    graph: fx.GraphModule,
    layout: Layout,
    steps: list[AxisStep] | None = None,
    fuel: Fuel | None = None,
) -> fx.GraphModule:
    """The graph of one rank under every axis of the layout, in the order of ``REGION_AXES``.

    ``steps``, where given, receives what was done on each axis, for the type check; ``fuel`` limits it.
    """
    used = [axis for axis in REGION_AXES if layout.on(axis).size > 1]
    local = keep_all_positions(graph) if "cp" in used else graph
    with dry_groups(layout):  # what one axis inserts is run again on the next
        for axis in used or ["tp"]:
            placed = layout.on(axis) if used else NO_AXIS
            if axis == "tp":
                local = made_divisible(local, placed.size)
            if fuel is not None:
                placed = limited(placed, local.graph, layout.region_class, axis, fuel)
            step = AxisStep(axis, placed, local, shard_axis(local, placed, axis, layout.region_class))
            local = step.local
            if steps is not None:
                steps.append(step)
    return local


def shard_axis(
    graph: fx.GraphModule, layout: AxisLayout, axis: str, region_class: str = ""
) -> fx.GraphModule:
    """The graph of one of ``layout.size`` ranks of one axis, with local shapes in ``meta["val"]``.

    ::

        y = linear(x, p_up); z = linear(gelu(y), p_down)
        --> x_1 = copy_to(x, "tp"); y = linear(x_1, p_up); z = reduce_from(linear(gelu(y), p_down), "tp")

    Placeholders keep their order; parameters get ``meta["state"]`` and ``meta["global_shape"]``. Every node
    that sends has ``meta["collective"]``: tuples (sent forward, sent backward, bytes, bytes, axis).
    """
    shards = _Sharder(graph, layout, axis, region_class)
    with dry_group(axis, layout.size), shards.mode:
        for node in graph.graph.nodes:
            shards.copy(node)
    result = fx.GraphModule(graph, shards.graph)
    result.graph.lint()
    result.recompile()
    return result


@contextmanager
def dry_group(axis: str, size: int, rank: int = 0) -> Generator[None]:
    """Bind the axis, beside those bound already, to a group that sends nothing, for running local graphs on
    fake tensors."""
    bound, group = collectives.GROUPS.get(axis), collectives.DryGroup(rank, size)
    if axis == "ep":
        group = DryExperts(rank, size, bound.imbalance if isinstance(bound, DryExperts) else 1.0)
    before = collectives.bind({**collectives.GROUPS, axis: group})
    try:
        yield
    finally:
        collectives.bind(before)


@contextmanager
def uneven_experts(imbalance: float) -> Generator[None]:
    """Dry groups bound inside show the rank whose experts get ``imbalance`` times the mean of the rows."""
    before = collectives.bind({**collectives.GROUPS, "ep": DryExperts(0, 1, imbalance)})
    try:
        yield
    finally:
        collectives.bind(before)


@contextmanager
def dry_groups(layout: Layout) -> Generator[None]:
    """:func:`dry_group` for every axis of a layout."""
    with ExitStack() as stack:
        for axis in REGION_AXES:
            stack.enter_context(dry_group(axis, layout.on(axis).size))
        yield


@dataclass
class _Sharder:
    """Builds the local graph of one axis node by node, keeping each tensor's local nodes by state."""

    source: fx.GraphModule
    layout: AxisLayout
    axis: str
    region_class: str
    graph: fx.Graph = field(default_factory=fx.Graph)
    made: dict[tuple[fx.Node, State], fx.Node] = field(default_factory=dict[tuple[fx.Node, State], fx.Node])

    def __post_init__(self) -> None:
        self.rules = layout_rules(self.source, self.layout, self.region_class)
        self.parameters = parameter_states(self.source, self.layout)
        self.inputs = boundary_states(self.source, self.layout)
        self.outputs = output_states(self.source, self.layout)
        self.differentiable = find_differentiable(self.source.graph)
        self.mode = find_fake_mode(self.source.graph)
        self.wanted = self._wanted_states()
        self.ends, self.experts = chain_ends(self.rules), chain_experts(self.rules)
        self.routes = Routes(self.graph, self.axis)
        self.own: dict[fx.Node, State] = {}

    def _wanted_states(self) -> dict[fx.Node, frozenset[State]]:
        """The states that the users of each tensor ask for, the region's boundary among them."""
        wanted: dict[fx.Node, set[State]] = {}
        for node, rule in self.rules.items():
            for tensor, state in zip(tensor_inputs(node), rule.inputs):
                wanted.setdefault(tensor, set()).add(state)
        for tensor, state in self.outputs:
            wanted.setdefault(tensor, set()).add(state)
        return {node: frozenset(states) for node, states in wanted.items()}

    def copy(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self._copy_placeholder(node)
        elif node.op == "output":
            states = iter(self.outputs)
            self.graph.node_copy(node, lambda n: self.fetch(n, next(states)[1]))
        else:
            self._copy_call(node)

    def _copy_placeholder(self, node: fx.Node) -> None:
        copied = self.graph.node_copy(node)
        state = self.parameters.get(node) or self.inputs.get(node, REPLICATE)
        if node in self.parameters:
            states = {**node.meta.get("states", {}), self.axis: str(state)}
            copied.meta |= {
                "states": states,
                "state": str(
                    place_on({a: parse_state(s) for a, s in states.items()}, node.meta.get("padded", ()))
                ),
            }
            copied.meta.setdefault("global_shape", shape_of(node))
        if is_tensor(node) and (node in self.parameters or state.is_shard):
            value = node.meta["val"]
            local = local_shape(shape_of(node), state, self.layout.size)
            copied.meta["val"] = value.new_empty(local).requires_grad_(value.requires_grad)
        self._keep(node, state, copied)

    def _keep(self, node: fx.Node, state: State, local: fx.Node) -> None:
        self.own[node] = state
        self.made[node, state] = local

    def fetch(self, node: fx.Node, state: State) -> fx.Node:
        """The local node that holds ``node`` in ``state``, converting it if it is not there yet."""
        own = self.own[node]
        if (node, state) not in self.made and (is_at_experts(own) or is_at_experts(state)):
            self.made[node, state] = self._reroute(node, state)
        if (node, state) not in self.made:
            wanted = self.wanted[node] if is_tensor(node) else frozenset[State]()
            for step in chains(own, wanted, node in self.differentiable):
                if (node, step.target) not in self.made:
                    self.made[node, step.target] = self._convert(node, step)
        return self.made[node, state]

    def _reroute(self, node: fx.Node, state: State) -> fx.Node:
        """Rows to the ranks of their experts, or back; the ends of the experts' groups as they are there."""
        if not is_at_experts(state):
            return _traced(self.routes.send_back(self.own[node], self.made[node, self.own[node]]), node)
        if node is self.ends[state]:
            return self.routes.own_ends(state)
        held = self.fetch(node, REPLICATE)
        self.routes.route(state, held, self.fetch(self.ends[state], REPLICATE))
        by_number = node is self.experts.get(state)
        moved = self.routes.own_experts(state) if by_number else self.routes.send(state, held)
        return _traced(moved, node)

    def _convert(self, node: fx.Node, step: Conversion) -> fx.Node:
        sections = step.sections(shape_of(node))
        value = self.made[node, step.source]
        local = self.graph.call_function(step.function, (value, *step.arguments, self.axis, *sections))
        _traced(propagate(local), node)
        size = float(tensor_bytes(node)) / (self.layout.size if step.forward == "all_to_all" else 1)
        sent = (
            step.forward,
            step.backward,
            size * (step.forward != "none"),
            size * (step.backward != "none"),
        )
        if sent[2] or sent[3]:
            local.meta["collective"] = ((*sent, self.axis),)
        return local

    def _copy_call(self, node: fx.Node) -> None:
        rule = self.rules[node]
        states = dict(zip(tensor_inputs(node), rule.inputs))
        inputs = {n: self.fetch(n, states.get(n, REPLICATE)) for n in node.all_input_nodes}
        local = local_call(self.graph, node, rule, inputs, self.axis, self.layout.size)
        inside = rule.implementation not in SENT_ON_THE_WAY  # what comes before the op is noted there
        sends = implementation_sends(rule.implementation, Call(node)) if inside else ()
        sent = tuple((*one, self.axis) for one in sends)
        sent += _of_earlier_axes(node, local)
        if sent:
            local.meta["collective"] = sent
        self._keep(node, rule.output, local)


def _of_earlier_axes(node: fx.Node, local: fx.Node) -> tuple[tuple[str, str, float, float, str], ...]:
    """What earlier axes send at this node, of the piece that is left of it."""
    share = tensor_bytes(local) / max(tensor_bytes(node), 1)
    sent = node.meta.get("collective", ())
    return tuple((there, back, share * a, share * b, axis) for there, back, a, b, axis in sent)


def _traced(local: fx.Node, node: fx.Node) -> fx.Node:
    """The local node, with the place in the user's model that ``node`` comes from."""
    local.meta |= {key: node.meta[key] for key in ("nn_module_stack", "stack_trace") if key in node.meta}
    return local


def tensor_bytes(node: fx.Node) -> int:
    """Bytes of the whole tensor (of all tensors of a list)."""
    value = node.meta["val"]
    tensors = [value] if isinstance(value, torch.Tensor) else value
    return sum(v.numel() * v.element_size() for v in tensors if isinstance(v, torch.Tensor))
