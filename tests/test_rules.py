"""Every row of the rule tables, cut over simulated ranks, against the op itself, forward and backward."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, local
from typing import Any

import pytest
import torch
from rule_cases import CASES, Case, elementwise_cases
from torch import fx

from autoplan_passes import collectives, table_pointwise
from autoplan_passes.calls import Call, op_name, overload_name, tensor_inputs
from autoplan_passes.local_ops import local_call
from autoplan_passes.rules import ROWS, Facts, Rule, plain_facts, rules_for
from autoplan_passes.states import PARTIAL, REPLICATE_PARTIAL_GRADIENT, State, cut_tensor, join_tensors, shard

WAYS = 2
RANDOM = {"aten.dropout", "aten.native_dropout"}
UNDEFINED_VALUES = {"aten.empty_like", "aten.new_empty"}


class Threads:
    """A group of threads that add up tensors: what one process needs to play all ranks at once."""

    def __init__(self, size: int) -> None:
        self.own, self.count = local(), size
        self.barrier, self.board = Barrier(size), [torch.empty(0)] * size

    def rank(self) -> int:
        return self.own.rank

    def size(self) -> int:
        return self.count

    def reduce(self, x: torch.Tensor, axis: str, how: str = "sum") -> torch.Tensor:
        if axis != "tp":
            return x.clone()
        self.board[self.own.rank] = x.detach()
        self.barrier.wait()
        stacked = torch.stack(self.board)
        self.barrier.wait()
        return stacked.amax(0) if how == "max" else stacked.sum(0)


def graph_of(case: Case) -> list[fx.Node]:
    """The call and, for a list-valued op, the item taken of it; real tensors are the values."""
    graph = fx.Graph()
    leaves: dict[int, fx.Node] = {}

    def leaf(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in leaves:
            leaves[id(value)] = graph.placeholder(f"x{len(leaves)}")
            leaves[id(value)].meta["val"] = value
        return leaves[id(value)]

    args = torch.utils._pytree.tree_map(leaf, case.args)
    call = graph.call_function(case.op, args, case.kwargs)
    call.meta["val"] = case.op(*case.args, **case.kwargs)
    if case.item is None:
        return [call]
    item = graph.call_function(operator.getitem, (call, case.item))
    item.meta["val"] = call.meta["val"][case.item]
    return [call, item]


def facts_for(nodes: Sequence[fx.Node], case: Case) -> Facts:
    """Everything that divides may be cut, and the case's sections; integers carry no gradient."""
    plain = [plain_facts(node, WAYS) for node in nodes]
    cuts = {node: set(states) for facts in plain for node, states in facts.cuts.items()}
    inputs = Call(nodes[0]).tensors
    for position, dim, sections in case.cuts:
        for node in [inputs[position]] if position >= 0 else nodes:
            cuts[node].add(shard(dim, sections))
    if case.cuts and len(nodes) > 1:
        whole = [shard(dim, sections) for _, dim, sections in case.cuts]
        cuts[nodes[0]] |= set(whole)
        runs = [(i, j) for i in range(4) for j in range(i + 1, 5)]
        cuts[nodes[1]] |= {shard(state.dim, state.sections[i:j]) for state in whole for i, j in runs}
    differentiable = {n for facts in plain for n in facts.differentiable}
    floating = {n for n in differentiable if n.op == "placeholder" or n.meta["val"] is not None}
    no_gradient = [n for n in nodes if not requires_gradient(n, case)]
    return Facts(frozenset(floating - set(no_gradient)), {n: frozenset(s) for n, s in cuts.items()})


def requires_gradient(node: fx.Node, case: Case) -> bool:
    """Whether torch gives the op's (or the item's) result a gradient."""
    leaves = [x.detach().clone() for x in tensors_of(case)]
    for x in leaves:
        x.requires_grad_(x.is_floating_point())
    with torch.enable_grad():
        output = call_with(case, leaves)
    output = output if node.target is not operator.getitem else output[case.item]
    parts = [output] if isinstance(output, torch.Tensor) else list(output)
    return any(part.requires_grad for part in parts)


def tensors_of(case: Case) -> list[torch.Tensor]:
    found = [x for x in torch.utils._pytree.tree_leaves(case.args) if isinstance(x, torch.Tensor)]
    return list({id(x): x for x in found}.values())


def call_with(case: Case, leaves: Sequence[torch.Tensor]) -> Any:
    by_id = {id(x): leaf for x, leaf in zip(tensors_of(case), leaves)}
    args = torch.utils._pytree.tree_map(lambda x: by_id.get(id(x), x), case.args)
    return case.op(*args, **case.kwargs)


def split_value(x: torch.Tensor, state: State, generator: torch.Generator) -> list[torch.Tensor]:
    """What each rank holds of a value in a state; a partial sum is two random parts."""
    if state == PARTIAL:
        part = torch.randn(x.shape, dtype=x.dtype, generator=generator)
        return [part, x - part]
    return [cut_tensor(x, state, rank, WAYS).clone() for rank in range(WAYS)]


def gradient_state(state: State) -> State:
    return {PARTIAL: State("R"), REPLICATE_PARTIAL_GRADIENT: PARTIAL}.get(state, state)


def assert_state(pieces: Sequence[torch.Tensor], state: State, whole: torch.Tensor, what: str) -> None:
    """The ranks' pieces make up ``whole`` as the state says."""
    if state == PARTIAL:
        found = [pieces[0] + pieces[1]]
    elif state.is_shard:
        found = [join_tensors(pieces, state)]
    else:
        found = list(pieces)
    for value in found:
        close = 1e-5 if "_to_copy" in what else 1e-10  # the sample casts to single precision
        tolerances = {"rtol": close, "atol": close, "equal_nan": True}
        torch.testing.assert_close(value, whole, **tolerances, msg=lambda m: f"{what}: {m}")


def run_rank(nodes: Sequence[fx.Node], rules: Sequence[Rule], leaves: dict[fx.Node, torch.Tensor]) -> Any:
    """The local ops of one rank, run on its tensors."""
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node, value in leaves.items():
        made[node] = graph.placeholder(node.name)
        made[node].meta["val"] = value
    for node, rule in zip(nodes, rules):
        torch.manual_seed(7)
        made[node] = local_call(graph, node, rule, made, "tp", WAYS)
    return made[nodes[-1]].meta["val"]


def check(case: Case, nodes: Sequence[fx.Node], rules: Sequence[Rule], facts: Facts) -> None:
    """Run the rules on all ranks; outputs and gradients must make up those of the op."""
    generator = torch.Generator().manual_seed(1)
    inputs = tensor_inputs(nodes[0])
    full = [n.meta["val"].detach().clone().requires_grad_(n in facts.differentiable) for n in inputs]
    torch.manual_seed(7)
    expected = call_with(case, full)
    expected = expected if case.item is None else expected[case.item]
    held = {n: split_value(x.detach(), s, generator) for n, x, s in zip(inputs, full, rules[0].inputs)}
    for node, pieces in held.items():
        for piece in pieces:
            piece.requires_grad_(node in facts.differentiable)
    outputs = run_ranks(nodes, rules, held)
    what = f"{op_name(nodes[0])} {rules[0]}"
    if op_name(nodes[0]) in UNDEFINED_VALUES:
        assert all(x.shape == cut_tensor(expected, rules[-1].output, 0, WAYS).shape for x in outputs)
        return
    if isinstance(expected, torch.Tensor):
        assert_state([x.detach() for x in outputs], rules[-1].output, expected.detach(), f"output of {what}")
    if nodes[-1] in facts.differentiable:
        check_gradients(nodes[-1], rules, facts, outputs, expected, dict(zip(inputs, full)), held, what)


def check_gradients(
    last: fx.Node,
    rules: Sequence[Rule],
    facts: Facts,
    outputs: Sequence[Any],
    expected: torch.Tensor,
    full: dict[fx.Node, torch.Tensor],
    held: dict[fx.Node, list[torch.Tensor]],
    what: str,
) -> None:
    generator = torch.Generator().manual_seed(2)
    gradient = torch.randn(expected.shape, dtype=expected.dtype, generator=generator)
    try:
        expected.backward(gradient)
    except RuntimeError as error:
        assert "derivative for" in str(error)  # torch has none: the op is for forward only
        return
    pieces = split_value(gradient, gradient_state(rules[-1].output), generator)
    backward_ranks(outputs, pieces)
    for (node, pieces_of), state in zip(held.items(), rules[0].inputs):
        if node in facts.differentiable:
            wanted = full[node].grad if full[node].grad is not None else torch.zeros_like(full[node])
            found = [p.grad if p.grad is not None else torch.zeros_like(p) for p in pieces_of]
            assert_state(found, gradient_state(state), wanted, f"gradient of {node} in {what}")


GROUP = Threads(WAYS)
ALONE = collectives.DryGroup(0, 1)  # a group of one: nothing is sent, values are real


def run_ranks(
    nodes: Sequence[fx.Node], rules: Sequence[Rule], held: dict[fx.Node, list[torch.Tensor]]
) -> list[Any]:
    """One rank after the other; where ranks talk, each in a thread."""

    def run(rank: int) -> Any:
        GROUP.own.rank = rank
        return run_rank(nodes, rules, {n: pieces[rank] for n, pieces in held.items()})

    if rules[0].implementation.endswith("_cross_entropy"):
        with ThreadPoolExecutor(WAYS) as pool:
            return list(pool.map(run, range(WAYS)))
    return [run(rank) for rank in range(WAYS)]


def backward_ranks(outputs: Sequence[Any], gradients: Sequence[torch.Tensor]) -> None:
    for rank, (output, gradient) in enumerate(zip(outputs, gradients)):
        GROUP.own.rank = rank
        if output.requires_grad:
            output.backward(gradient)


@pytest.fixture(autouse=True)
def simulated_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.manual_seed(0)
    before = collectives.bind({"tp": GROUP, "cp": collectives.DryGroup(0, WAYS), "ep": ALONE})
    monkeypatch.setattr(collectives, "_all_reduce", GROUP.reduce)
    yield
    collectives.bind(before)


def all_rules(nodes: Sequence[fx.Node], facts: Facts) -> Iterator[list[Rule]]:
    """Rules of the call; with an item, every pair that agrees on the list's state."""
    for rule in rules_for(nodes[0], WAYS, facts):
        if len(nodes) == 1:
            yield [rule]
        else:
            items = rules_for(nodes[1], WAYS, facts)
            yield from ([rule, item] for item in items if item.inputs[0] == rule.output)


def check_case(case: Case) -> list[list[Rule]]:
    nodes = graph_of(case)
    facts = facts_for(nodes, case)
    rules = list(all_rules(nodes, facts))
    for chosen in rules:
        check(case, nodes, chosen, facts)
    return rules


def case_name(case: Case) -> str:
    return getattr(case.op, "__qualname__", str(case.op)).removeprefix("aten.")


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_every_rule_equals_the_op(case: Case) -> None:
    """A selected dim was taken for a summed one; a squeeze swallowed a cut dim of local size 1."""
    assert check_case(case)


@pytest.mark.parametrize("name", table_pointwise.ELEMENTWISE)
def test_elementwise_rules_equal_the_op(name: str) -> None:
    """Overloads hide ops that are not elementwise: ``min`` of one tensor is a reduction."""
    by_hand = [case for case in CASES if op_name(graph_of(case)[0]) == f"aten.{name}"]
    cases = by_hand or list(elementwise_cases(name))
    assert cases, f"no overload of {name} ran: the row is dead"
    for case in cases:
        assert len(check_case(case)) >= 3, "R, R* or cuts of both dims are missing"


def test_every_row_has_a_case() -> None:
    """A row without a case is a rule without a proof."""
    nodes = [graph_of(case) for case in CASES]
    names = {name for call in nodes for node in call for name in (op_name(node), overload_name(node))}
    names |= {f"aten.{name}" for name in (*table_pointwise.ELEMENTWISE, *table_pointwise.LINEAR)}
    proved_elsewhere = {"aten._grouped_mm", "transformers.grouped_mm_fallback"}  # no fp64: in test_shard
    proved_elsewhere |= {"hide_classes"}  # overwrites what it is given: in test_uneven
    rows = {name for name, row in ROWS.items() if not row.replicated and "tests" not in name}
    missing = rows - names - proved_elsewhere
    assert not missing, sorted(missing)
