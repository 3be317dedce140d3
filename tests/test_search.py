"""What the search answers on a small model: everything decided, a bound that holds, runners-up that lose."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest

from autoplan.capture import capture_model
from autoplan.hardware import load_profile
from autoplan.plan import RECOMPUTE, Plan, Workload
from autoplan.planner.balance import balanced_cut
from autoplan.planner.chain import Cut, even_ends, quick_bound_s, without_once
from autoplan.planner.columns import solve_chain
from autoplan.planner.driver import search_plan
from autoplan.planner.interleave import move_ends
from autoplan.planner.measuring import measure_all
from autoplan.planner.mixes import ColumnPricer
from autoplan.planner.model_costs import ModelCosts
from autoplan.planner.pricing import Pricing
from autoplan.planner.solve import TOLERANCE, solve
from autoplan.planner.space import Candidate, Inside, Pins, candidates
from autoplan_cost_models import CostModel

EXAMPLES = Path(__file__).parent.parent / "examples"


GPT = EXAMPLES / "gpt.py"


@pytest.fixture(scope="module")
def gpt_plan() -> Plan:
    return search_plan(GPT, hw="cpu", devices=4, global_batch=16)


def test_plan_states_everything(gpt_plan: Plan) -> None:
    """A plan once came without the assumptions the search had made."""
    assert any("--dtype" in assumption for assumption in gpt_plan.assumptions)
    assert any("--optimizer" in assumption for assumption in gpt_plan.assumptions)
    (part,) = gpt_plan.parts
    assert part.mesh.devices == 4
    assert part.micro_batch * part.microbatches * part.mesh.dp == 16
    assert [r.region for s in part.stages for r in s.regions] == [
        "embed",
        *(f"blocks.{i}" for i in range(4)),
        "head",
    ]


def test_certificate_bounds_the_plan(gpt_plan: Plan) -> None:
    """The bound must never pass the simulated step time."""
    certificate, prediction = gpt_plan.certificate, gpt_plan.prediction
    assert certificate is not None and prediction is not None
    assert 0 < certificate.bound_s <= certificate.objective_s == prediction.step_time_s
    assert certificate.gap == pytest.approx(1 - certificate.bound_s / certificate.objective_s)
    assert sum(prediction.breakdown_s.values()) == pytest.approx(prediction.step_time_s)


def test_runners_up_lose_and_fit(gpt_plan: Plan) -> None:
    """What a plan is compared with must be legal, another mesh or schedule, and no faster."""
    (part,), told = gpt_plan.parts, gpt_plan.prediction
    assert told is not None and len(gpt_plan.runners_up) >= 2
    times = [other.step_time_s for other in gpt_plan.runners_up]
    assert times == sorted(times) and times[0] >= told.step_time_s * (1 - 1e-9)
    limit = min(s.prediction.memory_limit_bytes for s in part.stages if s.prediction)
    for other in gpt_plan.runners_up:
        kinds = [(one.mesh, one.zero, one.schedule, one.vpp) for one in (other, part)]
        assert kinds[0] != kinds[1] and other.memory_peak_bytes <= limit
        assert other.mesh.devices == 4 and sum(other.recompute.values()) == 6
        assert sum(other.breakdown_s.values()) == pytest.approx(other.step_time_s)


@pytest.fixture(scope="module")
def two_nodes() -> Pricing:
    """The whole space of a small model on two nodes of eight."""
    profile = load_profile("h100")
    capture = capture_model(GPT, dtype="bf16")
    costs = ModelCosts(capture, CostModel(profile, "bf16"), lambda _: None)
    workload = Workload(16, 256, dtype="bf16", tokens_per_sample=capture.tokens_per_sample)
    options = candidates(16, 256, costs.tp_degrees(8), len(costs.regions), Pins(), node=8)
    return Pricing(costs, profile, workload, Pins(), options)


def test_zero_options_are_all_replicas_and_groups_of_nodes(two_nodes: Pricing) -> None:
    """ZeRO over half a node, or of one replica, once doubled the space for nothing."""
    found = {(c.mesh.dp, c.mesh.tp, c.zero, c.zero_shard) for c in two_nodes.candidates if c.mesh.pp == 1}
    assert {(z, s) for dp, tp, z, s in found if (dp, tp) == (16, 1)} == {
        (0, 0), (1, 0), (1, 8), (2, 0), (2, 8), (3, 0), (3, 8)
    }  # fmt: skip
    assert {s for dp, tp, z, s in found if (dp, tp) == (8, 2)} == {0, 4}
    assert {s for dp, tp, z, s in found if dp == 1} <= {0}
    pinned = candidates(16, 256, [1], 1, Pins(zero=1, zero_shard=4), node=8)
    assert {(c.zero, c.zero_shard) for c in pinned} == {(1, 4)}


def test_no_plan_beats_its_bounds(two_nodes: Pricing) -> None:
    """A bound that forgot what overlaps, or counted a tied table twice, ruled out better plans unseen."""
    checked = 0
    for candidate in two_nodes.candidates[::3]:
        chain = two_nodes.chain(candidate)
        cut = balanced_cut(ColumnPricer(chain))
        if cut is None:
            continue
        assert two_nodes.could_fit(candidate)
        step_s = two_nodes.priced(candidate, cut).prediction.step_time_s * (1 + 1e-9)
        assert quick_bound_s(without_once(chain)) <= quick_bound_s(chain) <= step_s, candidate
        if candidate.microbatches >= candidate.mesh.pp and checked % 10 == 0:
            assert solve_chain(chain).bound_s <= step_s, candidate
        checked += 1
    assert checked > 60


def test_no_random_plan_beats_a_proved_one(two_nodes: Pricing) -> None:
    """Hundreds of plans chosen whole at random, where memory is short: a bound that left a plan out shows."""
    whole = solve(two_nodes, lambda _: None).best
    assert whole is not None
    states = min(stage.memory_peak_bytes for stage in whole.stages)
    tight = _with_memory(two_nodes, 0.6 * states)
    outcome = solve(tight, lambda _: None)
    assert outcome.best is not None and outcome.best.fits
    draw, fitting, nearest = random.Random(0), 0, float("inf")
    for candidate in draw.choices(tight.candidates, k=500):
        priced = tight.priced(candidate, _random_cut(tight, candidate, draw))
        if priced.fits:
            fitting += 1
            nearest = min(nearest, priced.prediction.step_time_s)
    assert fitting > 100
    assert nearest >= outcome.bound_s * (1 - 1e-9)
    assert nearest >= outcome.best.prediction.step_time_s * (1 - TOLERANCE)


def test_when_time_runs_out_the_gap_is_true(two_nodes: Pricing) -> None:
    """The best plan so far, and a bound on all that was not looked at."""
    early, whole = solve(two_nodes, lambda _: None, until_s=0.0), solve(two_nodes, lambda _: None)
    assert early.best is not None and early.best.fits and not early.finished and whole.finished
    assert whole.best is not None
    steps_s = [outcome.best.prediction.step_time_s for outcome in (whole, early) if outcome.best]
    assert early.bound_s <= whole.bound_s <= steps_s[0] <= steps_s[1]
    assert early.bound_s < steps_s[1] * (1 - TOLERANCE)


def test_measuring_beside_measures_the_same() -> None:
    """Half of the layouts come from another process: they must be those of this one."""
    profile, capture = load_profile("h100"), capture_model(GPT, dtype="bf16")
    costs = [ModelCosts(capture, CostModel(profile, "bf16"), lambda _: None) for _ in range(2)]
    insides = [Inside(tp, sp=sp) for tp in (1, 2, 4) for sp in (False, True)[: 1 + (tp > 1)]]
    measure_all(costs[0], insides)
    for class_id in costs[0].classes:
        for inside in insides:
            one, two = (found.measured(class_id, inside) for found in costs)
            assert one.layout == two.layout
            assert costs[0].cost(class_id, inside, 2) == costs[1].cost(class_id, inside, 2)


def _with_memory(pricing: Pricing, limit_bytes: float) -> Pricing:
    """The same space where a device may hold so much."""
    profile = pricing.profile
    memory = {"memory_bytes": limit_bytes, "reserve_bytes": 0.0, "fragmentation": 0.0}
    small = {name: dataclasses.replace(getattr(profile, name), value=value) for name, value in memory.items()}
    profile = dataclasses.replace(profile, **small)
    costs = pricing.costs.repriced(CostModel(profile, "bf16"))
    return Pricing(costs, profile, pricing.workload, Pins(), pricing.candidates)


def _random_cut(pricing: Pricing, candidate: Candidate, draw: random.Random) -> Cut:
    """Any boundaries where stages may be uneven, else those of the space, and any recompute."""
    chain = pricing.chain(candidate)
    regions = len(chain.items)
    ends = [*sorted(draw.sample(range(1, regions), chain.stages - 1)), regions]
    if chain.vpp > 1:
        ends = move_ends(chain, even_ends(chain), [0] * regions)
    often = [draw.random() for _ in RECOMPUTE]
    return Cut(tuple(ends), tuple(draw.choices(RECOMPUTE, often, k=regions)))


@pytest.mark.parametrize(
    ("pins", "mesh"),
    [
        (("tp=2",), {"tp": 2}),
        (("pp=2",), {"pp": 2}),
        (("dp=4",), {"dp": 4}),
        (("pp=2", "dp=1", "tp=2"), {"pp": 2, "dp": 1, "tp": 2}),
    ],
)
def test_no_pinned_plan_beats_the_free_one(
    gpt_plan: Plan, pins: tuple[str, ...], mesh: dict[str, int]
) -> None:
    """Pins are obeyed, and the certificate holds: no pinned plan is faster than the bound."""
    pinned = search_plan(GPT, hw="cpu", devices=4, global_batch=16, pins=pins)
    found = dataclasses.asdict(pinned.parts[0].mesh)
    assert {axis: found[axis] for axis in mesh} == mesh
    assert pinned.prediction is not None and gpt_plan.certificate is not None
    assert pinned.prediction.step_time_s >= gpt_plan.certificate.bound_s * (1 - 1e-9)


def test_a_module_in_memory_plans_like_its_file(gpt_plan: Plan) -> None:
    """``autoplan.search(model, inputs)`` plans the same model, and leaves its weights alone."""
    import importlib.util

    import torch

    import autoplan

    spec = importlib.util.spec_from_file_location("gpt_in_memory", GPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.build_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plan = autoplan.search(model, module.example_inputs(3), hw="cpu", devices=4, global_batch=16)
    assert plan.model.fingerprint == gpt_plan.model.fingerprint
    assert plan.prediction is not None and gpt_plan.prediction is not None
    assert plan.prediction.step_time_s == pytest.approx(gpt_plan.prediction.step_time_s)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
