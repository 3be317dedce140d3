"""Context parallelism equals one process: both kinds of attention on cp, beside every other axis.

The reference is plain eager PyTorch on the whole global batch, in fp64, tolerance 1e-9.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from run_fixture import HandPlans

from autoplan.capture import capture_model, load_model_source
from autoplan.errors import BadInputError
from autoplan.hardware import load_profile
from autoplan.plan import Plan, Workload
from autoplan.planner.context_space import context_options
from autoplan.planner.model_costs import ModelCosts
from autoplan.planner.pricing import Pricing
from autoplan.planner.solve import fits_anywhere
from autoplan.planner.space import candidates, parse_pins
from autoplan.runtime.check import Checker, CheckResult
from autoplan_cost_models import CostModel
from autoplan_passes.attention import head_degrees

HERE = Path(__file__).parent
SOURCES = {
    "padded": (HERE / "models" / "tiny_padded.py", {}),
    "grouped": (HERE / "models" / "tiny_grouped.py", {}),
    "llama": (HERE.parent / "examples" / "tiny_llama.py", {"sequence": 16}),
}
KINDS = ("ulysses", "ring")

_made: dict[str, tuple[HandPlans, Checker]] = {}


def plans_of(model: str) -> tuple[HandPlans, Checker]:
    """Model, trace and reference are made once a model."""
    if model not in _made:
        path, sizes = SOURCES[model]
        plans = HandPlans(capture_model(path, dtype="fp64", sizes=sizes), model)
        _made[model] = (plans, Checker(load_model_source(path), plans.plan(), timeout_s=60))
    return _made[model]


def check(model: str, degrees: Mapping[str, Any]) -> tuple[Plan, CheckResult]:
    plans, checker = plans_of(model)
    plan = plans.plan(**degrees)
    result = checker.check(plan)
    assert result.ok, f"{result.layout} {result.recompute}: {result}"
    assert result.gradients > 10
    return plan, result


def sent(plan: Plan, kind: str) -> int:
    return sum(layout.collectives_forward.get(kind, 0) for layout in plan.layouts.values())


def test_attention_alone_sends() -> None:
    """By heads: queries, keys, values and output of each block; round a ring: keys and values once. Gradients
    of parameters wait for the end of the step."""
    by_heads, ring = (plans_of("llama")[0].plan(cp=2, cp_kind=kind) for kind in KINDS)
    layouts = [layout for plan in (by_heads, ring) for layout in plan.layouts.values()]
    assert {kind for layout in layouts for kind in layout.collectives_backward} == {"all_to_all", "ring"}
    assert (sent(by_heads, "all_to_all"), sent(ring, "ring"), sent(ring, "all_to_all")) == (4, 1, 0)
    assert {s for layout in layouts for s in layout.on("cp").parameters.values()} == {"R*"}
    crossing = [set(layout.on("cp").inputs.values()) for layout in layouts]
    assert set.union(*crossing) == {"S(1)", "Z(1)"}


BESIDE = {
    "alone": {"cp": 2},
    "cp2xtp2": {"cp": 2, "tp": 2},
    "cp2xtp2, sp": {"cp": 2, "tp": 2, "sp": True, "recompute": ("full",)},
    "dp2xcp2": {"dp": 2, "cp": 2, "micro_batch": 1},
    "cp2xpp2": {"cp": 2, "pp": 2, "micro_batch": 1},
    "ZeRO-3, recompute": {"dp": 2, "cp": 2, "zero": 3, "recompute": ("full",)},
    "all axes": {"pp": 2, "cp": 2, "tp": 2, "micro_batch": 1, "recompute": ("full", "selective")},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BESIDE)
def test_beside_other_axes(name: str, kind: str) -> None:
    """Masks, positions and labels follow the tokens, some ranks have no label, the loss drops a position;
    heads go to tp and cp, stages send pieces of a sequence, replicas are dp x cp."""
    check("padded", {**BESIDE[name], "cp_kind": kind})


FURTHER = {
    "cp4": {"cp": 4},
    "ZeRO-1": {"dp": 2, "cp": 2, "zero": 1},
    "interleaved": {"cp": 2, "pp": 2, "vpp": 2, "schedule": "interleaved_1f1b", "micro_batch": 1},
    "cp2xtp2": {"cp": 2, "tp": 2},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FURTHER)
def test_causal_model(name: str, kind: str) -> None:
    """The causal flag instead of a mask, rotary positions, kv heads repeated in the model."""
    check("llama", {**FURTHER[name], "cp_kind": kind})


@pytest.mark.parametrize("kind", KINDS)
def test_recompute_changes_no_bit(kind: str) -> None:
    """A ring that recomputes sends again, on every rank; nothing may be reduced in another order."""
    check("llama", {"cp": 2, "cp_kind": kind})
    for recompute in ("full", "selective"):
        _, result = check("llama", {"cp": 2, "cp_kind": kind, "recompute": (recompute,)})
        assert result.bitwise


def test_few_heads_are_repeated() -> None:
    """Two kv heads on four ranks: each rank gets the one that its query heads need."""
    plan, _ = check("grouped", {"cp": 4})
    rules = [rule for layout in plan.layouts.values() for rule in layout.on("cp").rules.values()]
    assert any(rule.endswith("repeated_heads") for rule in rules)


def test_head_degrees() -> None:
    """A degree of 40 was refused for 40 heads because the 8 kv heads do not divide by it."""
    assert head_degrees(40, 8) == (1, 2, 4, 8, 40)
    assert head_degrees(16, 2) == (1, 2, 4, 8, 16)
    assert head_degrees(12, 12) == (1, 2, 3, 4, 6, 12)


LONG = HERE / "models" / "long_dense.py"
SAMPLES, DEVICES = 16, 16


@cache
def long_costs() -> ModelCosts:
    capture = capture_model(LONG, dtype="bf16")
    return ModelCosts(capture, CostModel(load_profile("h200"), "bf16"), lambda _: None)


def long_pricing(*pins: str) -> Pricing:
    """Every legal candidate on one node pair of H200, tp and pp at 1."""
    costs, parsed = long_costs(), parse_pins(("tp=1", "pp=1", *pins))
    contexts = context_options(costs, DEVICES, SAMPLES, [1], parsed)
    found = candidates(DEVICES, SAMPLES, [1], len(costs.regions), parsed, contexts=contexts)
    workload = Workload(DEVICES, SAMPLES, tokens_per_sample=256000)
    return Pricing(costs, load_profile("h200"), workload, parsed, found)


def test_long_samples_need_context_parallelism() -> None:
    """60 layers x 256,000 tokens x 5,376 x 2 bytes = 165 GB are kept of one sample with everything
    recomputed: more than a device has, and what is left falls as 1 / cp."""
    assert not fits_anywhere(long_pricing("cp=1"))
    pricing = long_pricing("cp=4", "recompute=full", "zero=3", "micro_batch=1")
    assert fits_anywhere(pricing)
    (candidate,) = pricing.candidates
    assert (candidate.mesh.cp, candidate.mesh.dp) == (4, 4)
    saved = [item.saved_bytes[2] for item in pricing.chain(candidate).items]
    assert sum(saved[1:-1]) == pytest.approx(60 * 256000 / 4 * 5376 * 2, rel=0.02)


def test_long_samples_are_tried_on_powers_of_two() -> None:
    """Free, cp is searched where samples are long, by one kind of attention; short samples are left alone."""
    tried = context_options(long_costs(), DEVICES, SAMPLES, [1, 2], parse_pins(()))
    assert {tp: list(found) for tp, found in tried.items()} == {1: [2, 4, 8, 16], 2: [2, 4, 8, 16]}
    assert all(len(kinds) == 1 for found in tried.values() for kinds in found.values())
    plans, _ = plans_of("llama")
    short = ModelCosts(plans.capture, CostModel(load_profile("h200"), "bf16"), lambda _: None)
    assert not any(context_options(short, DEVICES, SAMPLES, [1, 2], parse_pins(())).values())


def test_illegal_degree_names_the_legal_ones() -> None:
    """A bare divisibility error says neither what counts nor what would do."""
    with pytest.raises(BadInputError) as caught:
        long_pricing("cp=3")
    assert "32 heads with 16 key-value heads and 256000 tokens a sample" in str(caught.value)
    assert "ulysses: 1, 2, 4, 8, 16; ring: 1, 2, 4, 5, 8, 10, 16" in str(caught.value)
