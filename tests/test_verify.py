"""``verify`` accepts what the search and the passes make and names region and op of what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from captured_models import small_sizes, small_source
from mutants import Mutant, mutants
from run_fixture import HandPlans
from torch import fx

from autoplan.capture import capture_model
from autoplan.cli import main
from autoplan.plan import AxisLayout, Plan
from autoplan.runtime import local_graphs, verify
from autoplan.runtime.verify import RegionFault, VerifyResult, verify_capture
from autoplan_passes.shard import AxisStep, shard_region

MODELS = Path(__file__).parent / "models"
LLAMA = MODELS / "tiny_llama_hf.py"
TP: dict[str, Any] = {"tp": 2}
STAGES: dict[str, Any] = {"tp": 2, "pp": 3}


@pytest.fixture(scope="module")
def plans() -> HandPlans:
    return HandPlans(capture_model(LLAMA, dtype="fp64"), "llama")


def checked(plans: HandPlans, plan: Plan) -> VerifyResult:
    return verify_capture(plans.capture, plans.regions, plan)


def only_fault(plans: HandPlans, plan: Plan) -> RegionFault:
    (fault,) = checked(plans, plan).faults
    return fault


PLANS: dict[str, dict[str, Any]] = {
    "tp": TP,
    "tp on stages": STAGES,
    "dp": {"dp": 2},
    "a stage a region": {"pp": 4},
    "sp on stages": {"tp": 2, "sp": True, "pp": 2},
    "two stages a rank": {"tp": 2, "pp": 2, "vpp": 2, "schedule": "zb_h1"},
    "by heads": {"cp": 2, "cp_kind": "ulysses", "tp": 2},
    "heads repeated on their way": {"cp": 4, "cp_kind": "ulysses"},
    "round a ring": {"cp": 2, "cp_kind": "ring", "tp": 2, "sp": True, "pp": 2},
}


@pytest.mark.parametrize("name", PLANS)
def test_plans_type_check(name: str, plans: HandPlans) -> None:
    """Once a class, whatever the depth; a stage that makes its own masks has a side region."""
    degrees = PLANS[name]
    result = checked(plans, plans.plan(**degrees))
    assert result.ok, result.faults
    assert len(result.collectives) == degrees.get("pp", 1) * degrees.get("vpp", 1)
    assert max(one.regions for one in result.classes) == 2
    assert bool(result.collectives[-1].forward) == bool({"tp", "cp"} & set(degrees))
    assert result.ops > 100


@pytest.mark.parametrize("degrees", [{"dp": 4, "ep": 4}, {"dp": 2, "ep": 2, "tp": 2, "sp": True}], ids=str)
def test_plans_of_experts_type_check(degrees: dict[str, Any]) -> None:
    """On ep nothing is replicated that reads tokens: every rank has its own."""
    source = small_source("deepseek_v3", 2)
    plans = HandPlans(capture_model(source, dtype="fp32", sizes=small_sizes(source)), "experts")
    result = checked(plans, plans.plan(**degrees))
    assert result.ok, result.faults
    assert any(one.axis == "ep" for one in result.collectives[0].forward)


def mutant_plan(
    plans: HandPlans, monkeypatch: pytest.MonkeyPatch, mutate: Callable[[fx.GraphModule], Mutant | None]
) -> list[Mutant]:
    """Let the pass make a mutant of the first region that ``mutate`` changes."""
    made: list[Mutant] = []

    def broken(
        graph: fx.GraphModule, layout: Any, steps: list[AxisStep] | None = None, fuel: Any = None
    ) -> fx.GraphModule:
        own: list[AxisStep] = []
        local = shard_region(graph, layout, own, fuel)
        mutant = mutate(local) if not made else None
        if mutant is not None:
            made.append(mutant)
            local = mutant.graph
            own[-1] = replace(own[-1], local=local)
        if steps is not None:
            steps += own
        return local

    monkeypatch.setattr(local_graphs, "shard_region", broken)
    return made


@pytest.mark.parametrize("what", ["deleted", "doubled"])
@pytest.mark.parametrize("region", ["embed", "model.layers.0", "head"])
def test_mutants_are_named_with_their_region(
    region: str, what: str, plans: HandPlans, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault somewhere in 126 blocks is no use to anyone."""
    plan = plans.plan(**TP)
    held = next(one.parameters for one in plans.regions if one.name == region)

    def mutate(local: fx.GraphModule) -> Mutant | None:
        sources = [n.meta["source"] for n in local.graph.nodes if n.meta.get("kind") == "parameter"]
        return next((m for m in mutants(local, 2) if m.what == what and sources == list(held)), None)

    made = mutant_plan(plans, monkeypatch, mutate)
    fault = only_fault(plans, plan)
    assert made and (fault.region, fault.axis) == (region, "tp")
    assert made[0].near & {fault.fault.op, *fault.fault.path}
    assert f"region {region} on tp, op {fault.fault.op}: expected" in str(fault)


def with_layout(plan: Plan, region: str, change: Callable[[AxisLayout], AxisLayout]) -> Plan:
    """The plan with another layout on tp for one region class."""
    key = next(e.layout for stage in plan.parts[0].stages for e in stage.regions if e.region == region)
    layout = plan.layouts[key]
    return replace(plan, layouts={**plan.layouts, key: layout.replace_axis("tp", change(layout.tp))})


CHANGED: dict[str, tuple[str, Callable[[AxisLayout], AxisLayout], str]] = {
    "another size": ("head", lambda one: replace(one, size=4), "a layout for tp 2, as in the mesh"),
    "a rule's output": (
        "model.layers.0",
        lambda one: replace(one, rules={n: r.replace("->S(2)", "->R") for n, r in one.rules.items()}),
        "",
    ),
    "a border": (
        "model.layers.0",
        lambda one: replace(one, outputs={"0": "S(1)"}),
        "as model.layers.1 leaves it",
    ),
    "a foreign op": (
        "head",
        lambda one: replace(one, rules={**one.rules, "nonsense": "R->R"}),
        "a layout that fits",
    ),
}


@pytest.mark.parametrize("what", CHANGED)
def test_edited_layouts_are_refused(what: str, plans: HandPlans) -> None:
    """What the pass makes of a wrong layout still runs, or fails deep inside a reshape."""
    region, change, expected = CHANGED[what]
    result = checked(plans, with_layout(plans.plan(**TP), region, change))
    assert not result.ok
    assert any(expected in str(fault) for fault in result.faults)
    assert {fault.region for fault in result.faults} <= {region, "model.layers.1", "head"}


def test_stages_must_meet(plans: HandPlans, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that is sent and not received shifts all those after it."""
    split = verify.split_stages

    def shortened(*args: Any) -> Any:
        first, *rest = split(*args)
        return (replace(first, sends=first.sends[1:]), *rest)

    monkeypatch.setattr(verify, "split_stages", shortened)
    assert only_fault(plans, plans.plan(**STAGES)).region == "stage 0"


def test_costs_count_what_is_sent(plans: HandPlans, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are read off the nodes: a node that says less makes every plan look cheaper."""

    def mutate(local: fx.GraphModule) -> Mutant | None:
        node = next((n for n in local.graph.nodes if n.meta.get("collective")), None)
        if node is None:
            return None
        ((forward, backward, sent, back, axis),) = node.meta["collective"]
        node.meta["collective"] = ((forward, backward, sent / 2, back / 2, axis),)
        return Mutant("halved", node.name, local, frozenset())

    made = mutant_plan(plans, monkeypatch, mutate)
    fault = only_fault(plans, plans.plan(**TP)).fault
    assert made[0].node == fault.op and fault.expected.startswith("the costs to count")


def test_command(plans: HandPlans, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0 and a table, or 1 and the op; one JSON object either way."""
    path = tmp_path / "plan.yaml"
    plans.plan(**TP).save(path)
    assert main(["verify", str(path), str(LLAMA), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] and not answer["faults"] and answer["devices"] == 2
    assert [one["kind"] for one in answer["stages"][0]["forward"]].count("all_reduce") > 3
    assert main(["verify", str(path), str(LLAMA)]) == 0
    assert "model.layers.0" in capsys.readouterr().out

    with_layout(plans.plan(**TP), "model.layers.0", lambda one: replace(one, outputs={"0": "S(1)"})).save(
        path
    )
    assert main(["verify", str(path), str(LLAMA), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["faults"][0]["axis"] == "tp"
    assert main(["verify", str(path), str(LLAMA)]) == 1
    assert "does not type-check:\n  region " in capsys.readouterr().err
    assert main(["verify", str(path), str(MODELS / "tiny_gpt.py")]) == 2
    assert main(["verify", str(path), "nowhere.py"]) == 2
