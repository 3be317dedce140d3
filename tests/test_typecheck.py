"""The type check accepts every graph that the pass makes and finds, at its op, everything taken from it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from graph_fixture import functional_graph
from mutants import Mutant, mutants
from test_experts import CASES as EXPERT_CASES
from test_experts import graph_of as expert_graph
from test_experts import layout_of as expert_layouts
from test_shard import MODELS, WAYS, graph_of, layout_of
from torch import fx, nn

from autoplan.plan import AxisLayout, Layout
from autoplan_passes.calls import op_name, output_nodes
from autoplan_passes.conversions import TABLE
from autoplan_passes.faults import Fault, TypeFault
from autoplan_passes.shard import AxisStep, dry_groups, shard_region
from autoplan_passes.states import State
from autoplan_passes.transitions import TRANSITIONS, move_of
from autoplan_passes.typecheck import Borders, check_placements, dual

# Odd layouts use the conversions that good ones never need.
ODD = ["fused split/1", "one kv head/0", "embedding/0", "state space/1"]
CUTS = ("alone chosen", "and features 0", "round a ring chosen", "in zigzag chosen")
CUT_TOKENS = [f"{name}/tokens {kind}" for name in MODELS for kind in CUTS]
KEYS = [*(f"{name}/chosen" for name in MODELS), *ODD, *CUT_TOKENS]
MUTATED = [
    "averaged",
    *(f"{name}/chosen" for name in ("grouped", "experts", "head")),
    "fused split/1",
    "one kv head/0",
    "grouped fused/tokens and features chosen",
    "attention by hand/tokens in zigzag chosen",
]


class Averaged(nn.Module):
    """A mean over features that a layout may cut."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(8, 16), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.norm(x)).mean(-1).tanh()


AVERAGED = AxisLayout(
    WAYS,
    parameters={"p_up_weight": "S(0)", "p_up_bias": "S(0)"},
    rules={"linear": "R*,S(0),S(0)->S(2)", "mean": "S(2)->P average_of_parts"},
)


@cache
def averaged() -> fx.GraphModule:
    return functional_graph(Averaged().double(), [torch.rand(2, 4, 8, dtype=torch.float64)])


def placed_of(key: str) -> AxisLayout:
    return AVERAGED if key == "averaged" else layout_of(key).tp


def whole_of(key: str) -> fx.GraphModule:
    return averaged() if key == "averaged" else graph_of(key.split("/")[0])


@cache
def sharded(key: str) -> fx.GraphModule:
    return shard_region(whole_of(key), Layout("block", {"tp": placed_of(key)}))


def check(graph: fx.GraphModule, key: str) -> dict[str, State]:
    return check_placements(whole_of(key), graph, Borders.of(placed_of(key), "tp"))


def fault_of(graph: fx.GraphModule, key: str) -> Fault:
    with pytest.raises(TypeFault) as error:
        check(graph, key)
    return error.value.fault


def assert_found(mutant: Mutant, key: str) -> None:
    fault = fault_of(mutant.graph, key)
    assert mutant.near & {fault.op, *fault.path}, (mutant.what, mutant.node, str(fault))
    assert fault.expected and fault.found


@pytest.mark.parametrize("key", KEYS)
def test_what_the_pass_makes_is_accepted(key: str) -> None:
    """The check knows no rules: where it accepts, it finds the states of the layout's rules again."""
    found = check(sharded(key), key)
    for name, rule in placed_of(key).rules.items():
        planned, _, implementation = rule.partition("->")[2].partition(" ")
        if name in found and not implementation and ":" not in planned:
            assert str(found[name]) == planned, name


@pytest.mark.parametrize("key", MUTATED)
def test_every_mutant_is_found_at_its_op(key: str) -> None:
    """A collective or a scale too few or too many trains on, to another loss."""
    made = list(mutants(sharded(key), WAYS))
    for mutant in made:
        assert_found(mutant, key)
    assert len(made) >= 2


@pytest.mark.parametrize(("name", "how"), EXPERT_CASES)
def test_rows_at_their_experts_are_checked(name: str, how: str) -> None:
    """Rows of another rank's tokens have the right shape wherever they are used."""
    whole, _ = expert_graph(name)
    layout, steps = expert_layouts(whole, how), list[AxisStep]()
    with dry_groups(layout):
        shard_region(whole, layout, steps)
        for step in steps:
            borders = Borders.of(step.layout, step.axis)
            check_placements(step.whole, step.local, borders)
            made = list(mutants(step.local, -1)) if how == "ep2" or step.axis == "tp" else []
            for mutant in (one for one in made if step.axis in twin(step.local, one).args):
                with pytest.raises(TypeFault) as error:
                    check_placements(step.whole, mutant.graph, borders)
                fault = error.value.fault
                assert mutant.near & {fault.op, *fault.path}, (mutant.what, mutant.node, str(fault))


def twin(graph: fx.GraphModule, mutant: Mutant) -> fx.Node:
    return next(node for node in graph.graph.nodes if node.name == mutant.node)


class Doubled(nn.Module):
    """Linear, so that a tensor in any state may pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2.0


@pytest.mark.parametrize("pair", TABLE, ids=lambda pair: f"{pair[0]} to {pair[1]}")
def test_every_kind_of_collective_is_graded(pair: tuple[str, str]) -> None:
    """Mutants of what common layouts use would grade half a checker."""
    source, target = (text.replace("S", f"S({dim})") for text, dim in zip(pair, (0, 1)))
    placed = AxisLayout(
        WAYS, rules={"mul": f"{target}->{target}"}, inputs={"x": source}, outputs={"0": target}
    )
    whole = functional_graph(Doubled(), [torch.rand(4, 6)])
    local = shard_region(whole, Layout("", {"tp": placed}))
    assert [n.target for n in local.graph.nodes if move_of(n)] == [TABLE[pair][2]]
    check_placements(whole, local, Borders.of(placed, "tp"))
    for mutant in mutants(local, WAYS):
        with pytest.raises(TypeFault) as error:
            check_placements(whole, mutant.graph, Borders.of(placed, "tp"))
        assert mutant.near & {error.value.fault.op, *error.value.fault.path}


@pytest.mark.parametrize("pair", TABLE, ids=lambda pair: f"{pair[0]} to {pair[1]}")
def test_transitions_agree_with_the_conversions(pair: tuple[str, str]) -> None:
    """The two tables are written apart: what one chooses, the other must read as the same change."""
    sent_forward, sent_backward, function = TABLE[pair]
    source, target = (State(kind, 0 if kind == "S" else -1) for kind in pair)
    found = TRANSITIONS[function]
    assert (found.before, found.after) == tuple("R" if s.kind == "R*" else s.kind for s in (source, target))
    assert (found.passes, found.arrives) == (dual(source).kind, dual(target).kind)
    assert found.sends == (sent_forward, sent_backward)


def another_op(node: fx.Node) -> None:
    node.target = torch.ops.aten.sub.Tensor


def another_order(node: fx.Node) -> None:
    node.args = node.args[::-1]


def other_sizes(node: fx.Node) -> None:
    node.update_arg(1, [2, 8, 1, -1])


FOREIGN: dict[str, tuple[str, Callable[[fx.Node], None]]] = {
    "another op": ("aten.add", another_op),
    "another order": ("aten.add", another_order),
    "other sizes": ("aten.reshape", other_sizes),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_other_changes_are_found(what: str) -> None:
    """Not only collectives: the rank's ops must be the unsplit region's, with their sizes."""
    key = "fused split/chosen"
    graph = shard_region(whole_of(key), layout_of(key))
    name, change = FOREIGN[what]
    node = next(n for n in graph.graph.nodes if op_name(n) == name)
    change(node)
    assert fault_of(graph, key).op == node.name


def test_a_dropped_op_is_found() -> None:
    """The rest of the graph may still run."""
    key = "fused split/chosen"
    graph = shard_region(whole_of(key), layout_of(key))
    node = next(n for n in graph.graph.nodes if op_name(n) == "aten.gelu")
    user = next(iter(node.users))
    node.replace_all_uses_with(node.args[0])
    graph.graph.erase_node(node)
    assert fault_of(graph, key).op == user.name


def test_borders_are_held() -> None:
    """A neighbour that wants its piece must not be handed the whole."""
    key = "grouped/chosen"
    given = placed_of(key)
    wanted = AxisLayout(given.size, given.parameters, given.rules, outputs={"0": "S(1)"})
    borders = Borders.of(wanted, "tp")
    with pytest.raises(TypeFault, match=r"S\(1\) at the region's border"):
        check_placements(whole_of(key), sharded(key), borders)
    met = shard_region(whole_of(key), Layout("", {"tp": wanted}))
    states = check_placements(whole_of(key), met, borders)
    assert str(states[output_nodes(met.graph)[0].name]) == "S(1)"
