"""Expert parallelism: a region graph comes in, its placements on the ``ep`` axis go out.

Experts are found by structure, not by model: grouped products ``rows [n, i] x weights [experts, i, o]`` that
share the ends of their groups. Their weights are cut along the experts, ``S(0)``; what lies between the
first and the last of them, row by row, runs where the experts are: state ``E(k)`` for the k-th such chain.
Rows go to ``E(k)`` by :func:`~autoplan_passes.dispatch.dispatch` and back by ``combine``; everything else is
each rank's own and stays as it is (R: the ranks of ``ep`` hold different tokens).

::

    y = _grouped_mm(rows, w_up, ends); z = _grouped_mm(silu(y), w_down, ends)
    --> splits, order, ends_1 = route(ends, rows, "ep")
        y = _grouped_mm(dispatch(rows, splits, order, "ep"), w_up, ends_1)  # w_up: its own experts
        z = combine(_grouped_mm(silu(y), w_down, ends_1), splits, order, "ep")

The gradient of a weight S(0) sums over the tokens of all ranks of ``ep``, of one that is R over the rank's.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import fx

from autoplan.plan import AxisLayout
from autoplan_passes import dispatch
from autoplan_passes.calls import Call, op_name, shape_of, tensor_inputs
from autoplan_passes.dims import OUTPUT, carry, place
from autoplan_passes.local_ops import propagate
from autoplan_passes.rules import Rule, form_of, row_of
from autoplan_passes.states import REPLICATE, State, at_experts, is_at_experts, shard
from autoplan_passes.table_contractions import GROUPED

BY_EXPERT = shard(0)
ROUTED = ("splits", "order", "ends")


@dataclass(frozen=True)
class ExpertChain:
    """Grouped products over the same groups of rows.

    ``ends`` are the ends of the groups; ``weights`` the parameters and what is made of them expert by
    expert; ``rows`` the ops that run row by row from the first product to the last, with what they look
    up in parameters by the row's expert (biases).
    """

    ends: fx.Node
    experts: int
    weights: frozenset[fx.Node]
    rows: frozenset[fx.Node]

    @property
    def parameters(self) -> list[fx.Node]:
        return [n for n in self.ends.graph.nodes if n.op == "placeholder" and n in self.weights]


def find_expert_chains(graph: fx.Graph) -> tuple[ExpertChain, ...]:
    """The chains that can be cut along their experts, in graph order."""
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if is_grouped_product(node):
            groups.setdefault(group_ends(node), []).append(node)
    of_tokens = token_nodes(graph)
    found = (_chain(ends, products, of_tokens) for ends, products in groups.items())
    return tuple(chain for chain in found if chain is not None)


def token_nodes(graph: fx.Graph) -> frozenset[fx.Node]:
    """Nodes that depend on the region's inputs: every rank of ``ep`` has values of its own for them."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.meta.get("kind") == "input" or any(source in found for source in node.all_input_nodes):
            found.add(node)
    return frozenset(found)


def is_grouped_product(node: fx.Node) -> bool:
    """Whether the node is ``[n, i] x [experts, i, o]``, rows grouped by one end an expert."""
    return row_of(node) is GROUPED and [len(shape) for shape in Call(node).shapes] == [2, 3, 1]


def group_ends(product: fx.Node) -> fx.Node:
    """The ends of a grouped product's groups."""
    return Call(product).tensors[2]


def _chain(ends: fx.Node, products: list[fx.Node], of_tokens: frozenset[fx.Node]) -> ExpertChain | None:
    """The chain of some products; None where weights are no expert's own or an op mixes rows."""
    experts = shape_of(ends)[0]
    weights: set[fx.Node] = set()
    for product in products:
        if not _gather_weights(Call(product).tensors[1], experts, weights):
            return None
    between = _between(products)
    lookups = [node for node in _lookups(ends, between) if _gather_weights(_table(node), experts, weights)]
    alone = {*products, *lookups}
    rows = frozenset({*between, *lookups})
    used_elsewhere = any(user not in weights and user not in alone for node in weights for user in node.users)
    mixed = not all(node in alone or is_row_wise(node, rows, of_tokens) for node in rows)
    if used_elsewhere or mixed or not weights.isdisjoint(of_tokens):
        return None
    return ExpertChain(ends, experts, frozenset(weights), rows)


def _gather_weights(node: fx.Node, experts: int, found: set[fx.Node]) -> bool:
    """Add what ``node`` is made of, expert by expert, down to parameters; False where it is not so made."""
    if node in found:
        return True
    if node.op == "placeholder":
        found.add(node)
        return node.meta.get("kind") == "parameter" and shape_of(node)[:1] == (experts,)
    form = form_of(node) if node.op == "call_function" else None
    cut = carry(form, OUTPUT, BY_EXPERT, 1) if form is not None else None
    if form is None or cut is None:
        return False
    found.add(node)
    placed = [(tensor, place(form, i, cut)) for i, tensor in enumerate(Call(node).tensors)]
    return all(
        state is None or (state == BY_EXPERT and _gather_weights(tensor, experts, found))
        for tensor, state in placed
    )


def _between(products: list[fx.Node]) -> frozenset[fx.Node]:
    """The products and what lies on a path from one to another."""
    after: set[fx.Node] = set(products)
    for node in products[0].graph.nodes:
        if any(source in after for source in node.all_input_nodes):
            after.add(node)
    before: set[fx.Node] = set()
    pending = [Call(product).tensors[0] for product in products]
    while pending:
        node = pending.pop()
        if node in after and node not in before:
            before.add(node)
            pending.extend(node.all_input_nodes)
    return frozenset({*before, *products})


def _lookups(ends: fx.Node, rows: frozenset[fx.Node]) -> list[fx.Node]:
    """Ops that give ``rows`` alone an entry of a table by the row's expert."""
    ids = sorted_experts(ends)
    found = [node for node in ids.users if is_lookup(node) and rows.issuperset(node.users)] if ids else []
    return [node for node in found if Call(node).tensors[1:] == (ids,)]


def is_lookup(node: fx.Node) -> bool:
    """``table[ids]``: whole rows of dim 0."""
    call = Call(node)
    if call.name == "aten.index":
        return len(call.tensors) == 2 and isinstance(call.arguments["indices"][0], fx.Node)
    return call.name == "aten.embedding" or (call.name == "aten.index_select" and call.dim(default=0) == 0)


def _table(lookup: fx.Node) -> fx.Node:
    return Call(lookup).tensors[0]


def sorted_experts(ends: fx.Node) -> fx.Node | None:
    """The sorted expert numbers whose counts the ends of the groups are made of, op by op."""
    node = ends
    while len(node.all_input_nodes) == 1:
        (node,) = node.all_input_nodes
        if op_name(node) == "getitem" and op_name(node.all_input_nodes[0]) == "aten.sort":
            return node if node.args[1] == 0 else None
    return None


def is_row_wise(node: fx.Node, rows: frozenset[fx.Node], of_tokens: frozenset[fx.Node]) -> bool:
    """Whether every row of the output is made of the same row of the inputs, and of no other token."""
    form = form_of(node)
    if form is None or not form.output or len(form.output[0]) != 1:
        return False
    (atom,) = form.output[0]
    if atom in form.blocked:
        return False
    for tensor, dims in zip(Call(node).tensors, form.inputs):
        holds = [dim for dim, atoms in enumerate(dims) if atom in atoms]
        by_row = holds == [0] and dims[0] == (atom,)
        if not by_row and (holds or tensor in rows or tensor in of_tokens):
            return False
    return True


def expert_layout(graph: fx.GraphModule, size: int) -> AxisLayout:
    """Placements on an ``ep`` axis of ``size`` ranks; of size 1 where no chain's experts divide by it."""
    chains = [chain for chain in find_expert_chains(graph.graph) if chain.experts % size == 0]
    if size == 1 or not chains:
        return AxisLayout(1)
    parameters = {node.name: str(BY_EXPERT) for chain in chains for node in chain.parameters}
    rules = {
        node.name: str(rule) for k, chain in enumerate(chains) for node, rule in _rules(chain, at_experts(k))
    }
    return AxisLayout(size, parameters, rules)


def _rules(chain: ExpertChain, state: State) -> Iterator[tuple[fx.Node, Rule]]:
    for node in chain.ends.graph.nodes:
        inputs = tensor_inputs(node)
        if node in chain.rows:
            yield node, Rule(tuple(_input_state(node, n, chain, state) for n in inputs), state)
        elif node in chain.weights and node.op == "call_function":
            states = tuple(BY_EXPERT if n in chain.weights else REPLICATE for n in inputs)
            yield node, Rule(states, BY_EXPERT)


def _input_state(node: fx.Node, tensor: fx.Node, chain: ExpertChain, state: State) -> State:
    if tensor in chain.weights:
        return BY_EXPERT
    if tensor in chain.rows or tensor is chain.ends:
        return state
    if is_grouped_product(node) or is_lookup(node):
        return state
    form = form_of(node)
    assert form is not None  # rows hold products and what is_row_wise allows
    position = Call(node).tensors.index(tensor)
    return state if form.output[0][0] in {a for dim in form.inputs[position] for a in dim} else REPLICATE


@dataclass
class Routes:
    """Moves tensors between R and ``E(k)`` in a local graph; each chain's counts are exchanged once."""

    graph: fx.Graph
    axis: str
    made: dict[State, tuple[fx.Node, fx.Node, fx.Node]] = field(
        default_factory=dict[State, tuple[fx.Node, fx.Node, fx.Node]]
    )

    def route(self, state: State, rows: fx.Node, ends: fx.Node) -> None:
        """The first time, exchange the counts of ``rows``, sorted by expert in groups up to ``ends``."""
        if state not in self.made:
            routed = self._call(dispatch.route, ends, rows)
            routed.meta["collective"] = (("all_to_all", "none", float(bytes_of(ends)), 0.0, self.axis),)
            splits, order, own = (self._part(routed, i, name) for i, name in enumerate(ROUTED))
            self.made[state] = (splits, order, own)

    def send(self, state: State, rows: fx.Node) -> fx.Node:
        """Rows to where their experts are."""
        return self._move(dispatch.dispatch, rows, state)

    def send_back(self, state: State, rows: fx.Node) -> fx.Node:
        """Rows at their experts to the ranks that they came from."""
        return self._move(dispatch.combine, rows, state)

    def own_ends(self, state: State) -> fx.Node:
        """The ends of this rank's experts' groups of the rows that arrived."""
        return self.made[state][2]

    def own_experts(self, state: State) -> fx.Node:
        """The numbers that those rows' experts have here."""
        return self._call(dispatch.own_experts, *self.made[state][1:], on_axis=False)

    def _move(self, function: object, rows: fx.Node, state: State) -> fx.Node:
        splits, order, _ = self.made[state]
        moved = self._call(function, rows, splits, order)
        size = float(bytes_of(rows))
        moved.meta["collective"] = (("all_to_all", "all_to_all", size, size, self.axis),)
        return moved

    def _part(self, routed: fx.Node, index: int, name: str) -> fx.Node:
        """One of several results, by a name of its own: those of the user's graph stay as they are."""
        part = self.graph.create_node(
            "call_function", operator.getitem, (routed, index), name=f"{routed.name}_{name}"
        )
        return propagate(part)

    def _call(self, function: object, *arguments: fx.Node, on_axis: bool = True) -> fx.Node:
        given = (*arguments, self.axis) if on_axis else arguments
        call = self.graph.call_function(function, given)  # pyright: ignore[reportArgumentType] - any callable
        return propagate(call)


def bytes_of(node: fx.Node) -> int:
    value = node.meta["val"]
    return value.numel() * value.element_size()


def chain_experts(rules: Mapping[fx.Node, Rule]) -> dict[State, fx.Node]:
    """The sorted expert numbers of every state ``E(k)`` by which the rules look something up."""
    return {
        rule.output: Call(node).tensors[1]
        for node, rule in rules.items()
        if is_at_experts(rule.output) and is_lookup(node)
    }


def chain_ends(rules: Mapping[fx.Node, Rule]) -> dict[State, fx.Node]:
    """The ends of the groups of every state ``E(k)`` that the rules name."""
    return {
        rule.output: group_ends(node)
        for node, rule in rules.items()
        if is_at_experts(rule.output) and is_grouped_product(node)
    }
