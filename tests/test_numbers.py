"""Numbers walked down: at every level the inputs make the value, and the ends name a source."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from autoplan.capture import capture_model
from autoplan.cli import main
from autoplan.errors import BadInputError
from autoplan.hardware import load_profile
from autoplan.plan import Plan
from autoplan.planner.driver import search_plan
from autoplan.planner.fusion_space import fused_kernels
from autoplan.planner.model_costs import ModelCosts
from autoplan.report.numbers import SUM, Number, Numbers
from autoplan_cost_models import CostModel

MODEL = Path(__file__).parent / "models" / "tiny_gpt.py"
PINS = {
    "pp2 tp2": ("pp=2", "tp=2", "dp=1", "zero=0", "recompute=full"),
    "zero3": ("pp=1", "tp=1", "dp=4", "zero=3", "recompute=none"),
}


@pytest.fixture(scope="module")
def costs() -> ModelCosts:
    capture = capture_model(MODEL, dtype="fp32", sizes={})
    profile = load_profile("a100-80")
    return ModelCosts(capture, CostModel(profile, capture.dtype), lambda _: None, fused_kernels(profile))


@pytest.fixture(scope="module", params=PINS)
def plan(request: pytest.FixtureRequest) -> Plan:
    pins = PINS[request.param]
    return search_plan(MODEL, hw="a100-80", devices=4, global_batch=16, dtype="fp32", pins=pins)


@pytest.fixture()
def numbers(plan: Plan, costs: ModelCosts) -> Numbers:
    return Numbers(plan, costs)


def walk(number: Number) -> Iterator[Number]:
    yield number
    for one in number.inputs:
        yield from walk(one)


def value(number: Number) -> float:
    """A formula of the report evaluated from its inputs."""
    total, factors = 0.0, 1.0
    for one in number.inputs:
        if one.name.rpartition("/")[2] in ("microbatches", "slowest_device"):
            factors *= one.value
        else:
            total += one.value
    count = number.formula.split(" regions of this kind")[0]
    return total * factors * (int(count) if count.isdigit() else 1)


def test_every_sum_is_the_sum_of_its_inputs(numbers: Numbers) -> None:
    """A formula that does not give its number explains nothing."""
    checked = 0
    for root in ("step_time", "memory", "compute", "tp_communication"):
        for one in walk(numbers.find(root)):
            product = one.formula.startswith("microbatches x") or " regions of this kind" in one.formula
            if one.inputs and (SUM in one.formula or product):
                assert value(one) == pytest.approx(one.value, rel=1e-9), one.name
                checked += 1
    assert checked > 20


def test_ratios_are_their_formulas(numbers: Numbers) -> None:
    mfu, tokens = numbers.find("mfu"), numbers.find("tokens_per_s")
    flops, devices, step_s, peak = (one.value for one in mfu.inputs)
    assert mfu.value == pytest.approx(flops / (devices * step_s * peak))
    batch, each, step_s = (one.value for one in tokens.inputs)
    assert tokens.value == pytest.approx(batch * each / step_s)


def test_every_end_has_a_source_or_a_formula(numbers: Numbers) -> None:
    for root in numbers.roots:
        for one in walk(numbers.find(root)):
            assert one.source or one.formula, one.name
            assert one.inputs or SUM not in one.formula, f"{one.name} is the sum of nothing"


def test_recompute_is_walked_down(costs: ModelCosts) -> None:
    pins = PINS["pp2 tp2"]
    plan = search_plan(MODEL, hw="a100-80", devices=4, global_batch=16, dtype="fp32", pins=pins)
    again = Numbers(plan, costs).find("recompute")
    assert again.value > 0 and value(again) == pytest.approx(again.value, rel=1e-9)


def test_paths_lead_to_kernels_and_unknown_names_list_the_known(numbers: Numbers) -> None:
    region = next(one for one in numbers.find("compute").inputs if one.inputs)
    deep = numbers.find(region.inputs[0].inputs[0].name)
    assert deep.name == region.inputs[0].inputs[0].name and any(one.source for one in deep.inputs)
    with pytest.raises(BadInputError, match="step_time, tokens_per_s"):
        numbers.find("step")
    with pytest.raises(BadInputError, match="microbatches"):
        numbers.find("compute/nobody")


def test_the_command(plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.yaml"
    plan.save(path)
    assert main(["explain", str(path), "--number", "compute", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert plan.prediction is not None and told["value"] == plan.prediction.breakdown_s["compute"]
    assert main(["explain", str(path), "--number", "mfu"]) == 0
    assert "peak_flops" in capsys.readouterr().out
    assert main(["explain", str(path), "--number", "nothing"]) == 2
