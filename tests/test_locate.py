"""Fuel bisects the sharding pass, and ``check`` leads a wrong result back to the op that made it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mutants import deleted, doubled
from run_fixture import HandPlans
from torch import fx

from autoplan.capture import capture_model, load_model_source
from autoplan.errors import BadInputError
from autoplan.plan import Plan
from autoplan.runtime import local_graphs, parallel
from autoplan.runtime.check import Checker
from autoplan.runtime.locate import locate
from autoplan.runtime.replication import Replicas, join_replicas
from autoplan_passes import collectives
from autoplan_passes.fuel import VARIABLE, Fuel, fuel_from_environment
from autoplan_passes.shard import shard_region

MODEL = Path(__file__).parent / "models" / "tiny_gpt.py"


@pytest.fixture(scope="module")
def made() -> tuple[HandPlans, Checker]:
    plans = HandPlans(capture_model(MODEL, dtype="fp64"), "gpt")
    return plans, Checker(load_model_source(MODEL), plans.plan())


def rewrites(checker: Checker, plan: Plan) -> int:
    return len(checker.prepare(plan, Fuel()).fuel.asked)


@pytest.mark.parametrize("degrees", [{"tp": 2}, {"tp": 2, "sp": True}], ids=["tp", "sequence parallel"])
def test_every_amount_of_fuel_is_right(degrees: dict[str, Any], made: tuple[HandPlans, Checker]) -> None:
    """A pass stopped halfway must leave a program that trains the same, or bisection finds nothing."""
    plans, checker = made
    plan = plans.plan(**degrees)
    total = rewrites(checker, plan)
    assert total > 15
    for amount in (0, 1, total // 3, total // 2, total - 1, total):
        program = checker.prepare(plan, Fuel(amount))
        assert len(program.fuel.made) == amount
        result = checker.compare(program)
        assert result.ok, (amount, str(program.fuel), result)


def test_no_fuel_cuts_nothing(made: tuple[HandPlans, Checker]) -> None:
    """All ranks do all of it: what is stored cut is gathered, and no op is partial."""
    plans, checker = made
    program = checker.prepare(plans.plan(tp=2), Fuel(0))
    kinds = {one.kind for stage in program.collectives for one in (*stage.forward, *stage.backward)}
    assert kinds == {"all_gather"}


def test_variable(monkeypatch: pytest.MonkeyPatch, made: tuple[HandPlans, Checker]) -> None:
    plans, checker = made
    monkeypatch.setenv(VARIABLE, "3")
    assert fuel_from_environment().amount == 3
    program = checker.prepare(plans.plan(tp=2))
    assert str(program.fuel).startswith("3 of ") and "the last is " in str(program.fuel)
    assert any(note.startswith(VARIABLE) for note in checker.notes)
    monkeypatch.setenv(VARIABLE, "many")
    with pytest.raises(BadInputError, match="AUTOPLAN_FUEL=many: expected how many rewrites"):
        fuel_from_environment()
    monkeypatch.delenv(VARIABLE)
    assert fuel_from_environment().amount is None


def reduction_after(name: str) -> Callable[[fx.Node], bool]:
    """The collective that sums the partial result of an op."""
    return lambda n: n.target is collectives.reduce_from and n.all_input_nodes[0].name == name


def copy_before(name: str) -> Callable[[fx.Node], bool]:
    """The collective that sums the gradient of an op's input."""
    return lambda n: n.target is collectives.copy_to and any(user.name == name for user in n.users)


MUTANTS = {
    "a sum deleted": ("linear_3", reduction_after("linear_3"), deleted),
    "a sum doubled": ("linear_3", reduction_after("linear_3"), doubled),
    "a gradient's sum deleted": ("linear_2", copy_before("linear_2"), deleted),
    "a gradient's sum doubled": ("linear", copy_before("linear"), doubled),
}


@pytest.mark.parametrize("what", MUTANTS)
def test_mutants_are_led_back_to_their_op(
    what: str, made: tuple[HandPlans, Checker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That a check fails says little: which of hundreds of rewrites is wrong is what one has to know."""
    op, is_target, mutate = MUTANTS[what]
    near: set[str] = set()

    def broken(graph: fx.GraphModule, layout: Any, steps: Any = None, fuel: Any = None) -> fx.GraphModule:
        own: list[Any] = []
        local = shard_region(graph, layout, own, fuel)
        node = next((n for n in local.graph.nodes if n.op == "call_function" and is_target(n)), None)
        if node is not None and "Block" in layout.region_class:
            mutant = mutate(local, node)
            near.update(mutant.near)
            own[-1] = replace(own[-1], local=mutant.graph)
        if steps is not None:
            steps += own
        return own[-1].local

    plans, checker = made
    plan = plans.plan(tp=2)
    monkeypatch.setattr(local_graphs, "shard_region", broken)
    assert not checker.check(plan).ok
    static, numeric = locate(checker, plan)
    assert "region blocks.0 on tp" in static and any(f" {name}" in static for name in near)
    assert f": {op} in Block-" in numeric


MEANS: dict[str, tuple[dict[str, Any], int, str]] = {
    "made once too often": ({"tp": 2, "dp": 2}, 4, "0.5 times"),
    "of half the replicas": ({"dp": 4}, 2, "2 times"),
}


@pytest.mark.parametrize("what", MEANS)
def test_a_mean_over_replicas_is_not_blamed_on_the_pass(
    what: str, made: tuple[HandPlans, Checker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One factor on all gradients comes from a mean over ranks, and no rewrite makes it."""
    degrees, divisor, factor = MEANS[what]

    def wrong(*args: Any) -> Mapping[str, Replicas]:
        return {name: replace(one, divisor=divisor) for name, one in join_replicas(*args).items()}

    plans, checker = made
    plan = plans.plan(**degrees)
    monkeypatch.setattr(parallel, "join_replicas", wrong)
    result = checker.check(plan)
    assert not result.ok and f"every gradient is {factor} what it should be" in result.notes[-1]
    assert [note.partition(":")[0] for note in locate(checker, plan)] == ["the sharding pass is not to blame"]
