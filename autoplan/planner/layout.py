"""The layout of one region class on one mesh axis: a region graph and prices come in, a Layout goes out.

A linear program chooses one rule for every op and the conversions between them. With

    x[n, r]       node n runs by rule r (states of its inputs -> state of its output)
    g[e, a -> b]  edge e = (v, n) carries v from state a to state b
    c[v, a -> b]  that conversion of v is made; once, however many users share it

    minimise  sum price(n, r) x + sum price(v, a -> b) c + memory price * parameter bytes x
    (one rule)  sum_r x[n, r] = 1                                                   for every n
    (flow)      sum_{r: out = s} x[v, r] + sum_a g[e, a -> s] - sum_b g[e, s -> b]
                    = sum_{r: in_e = s} x[n, r]                             for every e, state s
    (shared)    g[e, a -> b] <= c[v, a -> b]                                        for every e

What a region takes and gives is in the states of its :class:`Boundary`. Solved by HiGHS; where the relaxation
is not integral, as a mixed-integer program. The price of memory rises until most of what can be cut is cut:
a rank of a tp group that holds everything would be wasted. It does not rise so far that whole logits are
sent for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from autoplan.errors import BadInputError
from autoplan.plan import AxisLayout, Layout
from autoplan.planner.layout_pricing import LayoutPrices, LayoutSettings, Pricing
from autoplan.planner.linear import LinearProgram, solve
from autoplan_passes import collectives, table_contractions
from autoplan_passes.attention import attention_heads, tp_degrees
from autoplan_passes.calls import Call, is_tensor, op_name, output_nodes, shape_of, tensor_inputs
from autoplan_passes.candidates import find_active, find_facts
from autoplan_passes.conversions import Conversion, chains, conversion
from autoplan_passes.implementations import implementation_sends
from autoplan_passes.padding import made_divisible
from autoplan_passes.rules import Facts, Rule, row_of, rules_for
from autoplan_passes.shard import tensor_bytes
from autoplan_passes.states import PARTIAL, REPLICATE, REPLICATE_PARTIAL_GRADIENT, State

__all__ = [
    "Boundary",
    "LayoutPrices",
    "LayoutSettings",
    "attention_heads",
    "choose_layout",
    "price_layout",
    "tp_degrees",
]


@dataclass(frozen=True)
class Boundary:
    """States in which a region's inputs (by placeholder name) and outputs (by position) cross its boundary.

    Those not named are R. S and P may be named, of tensors through which gradients flow.
    """

    inputs: Mapping[str, State] = field(default_factory=dict[str, State])
    outputs: Mapping[int, State] = field(default_factory=dict[int, State])


WHOLE = Boundary()


@dataclass(frozen=True)
class PricedLayout:
    """A layout with its objective in seconds: operations, conversions and the price of memory."""

    layout: Layout
    objective_s: float
    integral: bool
    resident_bytes: float


def choose_layout(
    graph: fx.GraphModule,
    size: int,
    prices: LayoutPrices,
    *,
    pinned_parameters: Mapping[str, State] | None = None,
    settings: LayoutSettings | None = None,
    region_class: str = "",
    axis: str = "tp",
    boundary: Boundary = WHOLE,
) -> Layout:
    """The cheapest layout of a region on ``size`` ranks of ``axis`` that cuts most of its parameters.

    ``pinned_parameters`` fixes how parameters are stored, by placeholder name. ``graph`` is the local graph
    of the axes before this one. Raises BadInputError where a pinned state does not divide.
    """
    priced = price_layout(
        graph,
        size,
        prices,
        pinned_parameters or {},
        settings or LayoutSettings(),
        axis=axis,
        boundary=boundary,
    )
    return replace(priced.layout, region_class=region_class)


def price_layout(
    graph: fx.GraphModule,
    size: int,
    prices: LayoutPrices,
    pinned_parameters: Mapping[str, State],
    settings: LayoutSettings,
    *,
    axis: str = "tp",
    boundary: Boundary = WHOLE,
) -> PricedLayout:
    """Build the program of the module's docstring, and solve it at rising prices of memory."""
    if size == 1:
        return PricedLayout(Layout(""), 0.0, True, 0.0)
    graph = made_divisible(graph, size) if axis == "tp" else graph
    pinned = _pinned_nodes(graph.graph, pinned_parameters)
    builder = Builder(graph.graph, size, prices, settings, pinned, axis, boundary)
    builder.build()
    whole, least = builder.resident_bytes(max), builder.resident_bytes(min)
    limit_bytes = settings.sent_limit * builder.activation_bytes()
    first, *dearer = settings.memory_s_per_byte
    found = builder.solve(first)
    for memory_s_per_byte in dearer:
        if whole - found.resident_bytes >= settings.cut_share * (whole - least):
            break
        forced = builder.solve(memory_s_per_byte)
        if forced.layout.collective_bytes_forward <= limit_bytes:
            found = forced
    return found


def _pinned_nodes(graph: fx.Graph, pinned: Mapping[str, State]) -> dict[fx.Node, State]:
    nodes = {n.name: n for n in graph.nodes if n.meta.get("kind") == "parameter"}
    unknown = sorted(set(pinned) - set(nodes))
    if unknown:
        raise BadInputError(f"Expected a pinned parameter to be one of {sorted(nodes)}; got {unknown[0]!r}.")
    return {nodes[name]: state for name, state in pinned.items()}


@dataclass
class Builder:
    """Makes the variables and rows; each method builds one family."""

    graph: fx.Graph
    size: int
    prices: LayoutPrices
    settings: LayoutSettings
    pinned: Mapping[fx.Node, State]
    axis: str = "tp"
    boundary: Boundary = WHOLE
    program: LinearProgram = field(default_factory=LinearProgram)
    rules: dict[fx.Node, tuple[Rule, ...]] = field(default_factory=dict[fx.Node, tuple[Rule, ...]])
    x: dict[tuple[fx.Node, int], int] = field(default_factory=dict[tuple[fx.Node, int], int])
    resident: dict[int, float] = field(default_factory=dict[int, float])

    def build(self) -> None:
        self.facts: Facts = find_facts(self.graph, self.size, self.pinned, self.settings.cutting)
        self.pricing = Pricing(self.size, self.prices, self.settings, self.facts.differentiable)
        self.outputs = self._output_states()
        self.active = find_active(self.graph, self.facts.differentiable)
        for node in self.graph.nodes:
            if node in self.active and node.op != "output":
                self._choose_one_rule(node)
        for node in list(self.rules):
            self._connect_users(node)

    def _choose_one_rule(self, node: fx.Node) -> None:
        """(one rule)"""
        rules = (
            self._source_rules(node) if node.op == "placeholder" else rules_for(node, self.size, self.facts)
        )
        self.rules[node] = rules
        variables = [self.program.add_variable(self.pricing.rule_s(node, rule)) for rule in rules]
        self.x |= {(node, i): variable for i, variable in enumerate(variables)}
        if node.meta.get("kind") == "parameter":
            self.resident |= {
                v: self.pricing.resident_bytes(node, r.output) for v, r in zip(variables, rules)
            }
        self.program.add_row([(variable, 1.0) for variable in variables], 1.0, 1.0)

    def _source_rules(self, node: fx.Node) -> tuple[Rule, ...]:
        """Inputs come as the boundary says; a parameter is stored whole or cut, or as pinned.

        Stored R*, its gradient is summed over the ranks once a step instead of once a micro-batch.
        """
        if node in self.pinned:
            state = self.pinned[node]
            if state.is_shard and state not in self.facts.cuts.get(node, frozenset()):
                raise BadInputError(
                    f"Parameter {node.name!r} of shape {shape_of(node)} cannot be stored as {state} on "
                    f"{self.axis}={self.size}: the dim does not divide. Pin R, or another {self.axis}."
                )
            return (Rule((), state),)
        if node.meta.get("kind") != "parameter":
            return (Rule((), self.boundary.inputs.get(node.name, REPLICATE)),)
        whole = [REPLICATE]
        if node in self.facts.differentiable:
            whole.append(REPLICATE_PARTIAL_GRADIENT)
        return tuple(Rule((), state) for state in (*whole, *self.facts.stored_cuts(node)))

    def _output_states(self) -> dict[fx.Node, set[State]]:
        """The states in which the boundary wants each output."""
        wanted: dict[fx.Node, set[State]] = {}
        for position, node in enumerate(output_nodes(self.graph)):
            wanted.setdefault(node, set()).add(self.boundary.outputs.get(position, REPLICATE))
        return wanted

    def _steps(self, node: fx.Node, states: list[State]) -> list[Conversion]:
        """Possible conversions of a tensor; a parameter stored cut is used cut, unless a pin says so."""
        if not isinstance(node.meta["val"], (tuple, list)):
            steps = [conversion(a, b, node in self.facts.differentiable) for a in states for b in states]
            stored = node.meta.get("kind") == "parameter" and node not in self.pinned
            return [s for s in steps if s is not None and not (stored and s.source.is_shard)]
        return []

    def _connect_users(self, node: fx.Node) -> None:
        """(flow) and (shared)"""
        edges = [wanted for user in node.users for wanted in self._readers(user, node)]
        asked = {state for wanted in edges for state in wanted}
        made = {rule.output for rule in self.rules[node]}
        hubs = {REPLICATE}
        if node in self.facts.differentiable:
            hubs |= (
                {REPLICATE_PARTIAL_GRADIENT, PARTIAL}
                if asked & {REPLICATE_PARTIAL_GRADIENT, PARTIAL}
                else set()
            )
        states = sorted(asked | made | (hubs if edges else set()))
        steps = self._steps(node, states) if edges else []
        price = {step: self.pricing.conversion_s(node, step) for step in steps}
        shared = len(edges) > 1
        made_once = {step: self.program.add_variable(price[step]) for step in steps} if shared else {}
        for wanted in edges:
            flow = {step: self.program.add_variable(0.0 if shared else price[step]) for step in steps}
            for step, variable in made_once.items():
                self.program.add_row([(variable, 1.0), (flow[step], -1.0)], 0.0, float("inf"))
            for state in states:
                terms = [(self.x[node, i], 1.0) for i, r in enumerate(self.rules[node]) if r.output == state]
                terms += [(variable, 1.0) for step, variable in flow.items() if step.target == state]
                terms += [(variable, -1.0) for step, variable in flow.items() if step.source == state]
                terms += [(variable, -1.0) for variable in wanted.get(state, [])]
                fixed = 1.0 if -1 in wanted.get(state, []) else 0.0
                row = [(variable, factor) for variable, factor in terms if variable >= 0]
                if row or fixed:
                    self.program.add_row(row, fixed, fixed)

    def _readers(self, user: fx.Node, node: fx.Node) -> list[dict[State, list[int]]]:
        """For each read of ``node``: variables of the user's rules by the state they want of it; -1 for an
        output of the region."""
        if user.op == "output":
            return [{state: [-1]} for state in sorted(self.outputs[node])]
        if user not in self.rules:
            return []
        position = tensor_inputs(user).index(node)
        wanted: dict[State, list[int]] = {}
        for i, rule in enumerate(self.rules[user]):
            wanted.setdefault(rule.inputs[position], []).append(self.x[user, i])
        return [wanted]

    def solve(self, memory_s_per_byte: float) -> PricedLayout:
        """The optimum at one price of memory."""
        costs = enumerate(self.program.costs)
        priced = [cost + memory_s_per_byte * self.resident.get(i, 0.0) for i, cost in costs]
        solution = solve(LinearProgram(priced, self.program.rows))
        chosen = {
            node: max(enumerate(rules), key=lambda item: solution.values[self.x[node, item[0]]])[1]
            for node, rules in self.rules.items()
        }
        parameters = [n for n in chosen if n.meta.get("kind") == "parameter"]
        resident = sum(self.pricing.resident_bytes(n, chosen[n].output) for n in parameters)
        return PricedLayout(self.read_layout(chosen), solution.objective, solution.integral, resident)

    def resident_bytes(self, choose: Callable[[list[float]], float]) -> float:
        """Parameter bytes on one rank, each parameter in the state that ``choose`` (min or max) picks."""
        parameters = [n for n in self.rules if n.meta.get("kind") == "parameter"]
        return sum(
            choose([self.pricing.resident_bytes(n, r.output) for r in self.rules[n]]) for n in parameters
        )

    def activation_bytes(self) -> float:
        """Of every contraction, the smallest activation that it reads or makes, summed up."""
        total = 0.0
        for node in self.rules:
            if op_name(node) in table_contractions.ROWS:
                tensors = [n for n in (*tensor_inputs(node), node) if n.meta.get("kind") != "parameter"]
                moved = [tensor_bytes(n) for n in tensors if n in self.facts.differentiable]
                total += min(moved, default=0.0)  # nothing differentiable under frozen parameters
        return total

    def read_layout(self, chosen: Mapping[fx.Node, Rule]) -> Layout:
        """States as text, and what they send, counted from the conversions that they need."""
        parameters = {n.name: str(r.output) for n, r in chosen.items() if n.meta.get("kind") == "parameter"}
        whole = [
            n for n in self.graph.nodes if n.op == "call_function" and n in self.active and row_of(n) is None
        ]
        sent = list(self.sent_by(chosen))
        rules = {n.name: str(r) for n, r in chosen.items() if n.op == "call_function" and _is_special(r)}
        inputs = {name: str(state) for name, state in self.boundary.inputs.items() if state != REPLICATE}
        outputs = {str(i): str(state) for i, state in self.boundary.outputs.items() if state != REPLICATE}
        return Layout(
            region_class="",
            axes={self.axis: AxisLayout(self.size, parameters, rules, inputs, outputs)},
            collectives_forward=dict(Counter(kind for kind, _, _, _ in sent if kind != "none")),
            collectives_backward=dict(Counter(kind for _, kind, _, _ in sent if kind != "none")),
            collective_bytes_forward=float(sum(size for kind, _, size, _ in sent if kind != "none")),
            collective_bytes_backward=float(sum(size for _, kind, _, size in sent if kind != "none")),
            replicated_ops=tuple(sorted({op_name(n) for n in whole})),
        )

    def sent_by(self, chosen: Mapping[fx.Node, Rule]) -> list[tuple[str, str, float, float]]:
        """Every collective of the layout: kinds and bytes, forward and backward."""
        sent: list[tuple[str, str, float, float]] = []
        for node, steps in self.conversions_of(chosen):
            for step in steps:
                size = tensor_bytes(node) / (self.size if step.forward == "all_to_all" else 1)
                if step.function is collectives.gather_reduce and self._is_multiplied(node, steps, chosen):
                    sent.append(("none", step.forward, 0.0, size))  # kept as a piece, gathered again
                sent.append((step.forward, step.backward, size, size))
        for node, rule in chosen.items():
            if node.op == "call_function":
                sent += implementation_sends(rule.implementation, Call(node))
        return sent

    def _is_multiplied(
        self, node: fx.Node, steps: Sequence[Conversion], chosen: Mapping[fx.Node, Rule]
    ) -> bool:
        """Whether a gathered tensor is read by products alone (:mod:`autoplan.regather`)."""
        state = REPLICATE_PARTIAL_GRADIENT
        readers = [
            user
            for user in node.users
            if user in chosen and chosen[user].inputs[tensor_inputs(user).index(node)] == state
        ]
        passed_on = any(step.source == state for step in steps) or state in self.outputs.get(node, set())
        return not passed_on and all(
            op_name(user) == "aten.linear" and user.args[0] is node for user in readers
        )

    def conversions_of(self, chosen: Mapping[fx.Node, Rule]) -> list[tuple[fx.Node, tuple[Conversion, ...]]]:
        """The conversions of each tensor that the chosen rules need."""
        found: list[tuple[fx.Node, tuple[Conversion, ...]]] = []
        for node, rule in chosen.items():
            wanted: set[State] = set()
            for user in node.users:
                if user.op == "output":
                    wanted |= self.outputs[node]
                elif user in chosen:
                    wanted.add(chosen[user].inputs[tensor_inputs(user).index(node)])
            if is_tensor(node) and wanted:
                found.append(
                    (node, chains(rule.output, frozenset(wanted), node in self.facts.differentiable))
                )
        return found


def _is_special(rule: Rule) -> bool:
    """Rules other than all-R are written down."""
    return rule.output != REPLICATE or any(state != REPLICATE for state in rule.inputs)
