"""Plans for other frameworks: each can be run there as it stands, and its proof is of what runs there."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from captured_models import small_source

from autoplan.capture import Capture, capture_model
from autoplan.cli import main
from autoplan.errors import BadInputError
from autoplan.hardware import HardwareProfile, load_profile
from autoplan.importing.rules import findings
from autoplan.importing.settings import read_settings
from autoplan.plan import Mesh, Plan
from autoplan.planner.chain import Cut
from autoplan.planner.driver import Finder, Request, model_costs, search_capture
from autoplan.planner.pricing import Pricing
from autoplan.planner.solve import solve
from autoplan.planner.space import Pins, parse_pins
from autoplan.planner.what_if import with_memory
from autoplan.region_runs import container_of
from autoplan.targets import Choice, refusals, target_named, targets
from autoplan_codegen.exports.export import export_plan

GPT = Path(__file__).parent.parent / "examples" / "gpt.py"
OTHERS = tuple(name for name in targets() if name != "autoplan")

CHOICES = {
    "zero bubble": (Choice(Mesh(pp=2), "zb_h1"), {"megatron": "schedule", "torchtitan": "vpp"}),
    "looped zero bubble": (Choice(Mesh(pp=2), "zb_h1", 2, 4), {"megatron": "schedule", "torchtitan": ""}),
    "interleaved": (Choice(Mesh(pp=2), "interleaved_1f1b", 2, 4), {"megatron": "", "torchtitan": ""}),
    "unfilled": (Choice(Mesh(pp=2), "interleaved_1f1b", 2, 3), dict.fromkeys(OTHERS, "micro_batch")),
    "chunks of one rank": (Choice(Mesh(dp=2), "interleaved_1f1b", 2, 4), dict.fromkeys(OTHERS, "vpp")),
    "zero 1": (Choice(Mesh(dp=2), zero=1), {"megatron": "", "torchtitan": "zero"}),
    "zero 3 in stages": (Choice(Mesh(2, 2), zero=3), {"megatron": "zero", "torchtitan": ""}),
    "ulysses": (Choice(Mesh(cp=2), cp_kind="ulysses"), {"megatron": "", "torchtitan": "cp"}),
    "ring": (Choice(Mesh(cp=2), cp_kind="ring"), dict.fromkeys(OTHERS, "")),
    "experts by tp": (
        Choice(Mesh(dp=4, tp=2, ep=4), experts=True),
        {"megatron": "sp", "loongforge": "", "torchtitan": "ep"},
    ),
    "expert groups": (
        Choice(Mesh(dp=8, ep=4), zero=1, zero_shard=2, experts=True),
        {"megatron": "zero_shard", "autoplan": ""},
    ),
}


@pytest.mark.parametrize("case", CHOICES)
def test_a_target_refuses_what_it_cannot_run(case: str) -> None:
    """Each fact of the table alone; ours runs them all."""
    choice, expected = CHOICES[case]
    for name, field in {**expected, "autoplan": ""}.items():
        found = [refusal.field for refusal in refusals(target_named(name), choice)]
        assert found == ([field] if field else []), name


MODELS = {
    ("gpt", OTHERS): [(), ("tp=2", "pp=2", "zero=0")],
    ("tiny_llama", ("loongforge",)): [("tp=2", "pp=2")],
    ("qwen3_30b_a3b", ("megatron",)): [("tp=2", "micro_batch=1"), ("ep=4", "micro_batch=1")],
    ("t5", ("megatron",)): [("tp=2", "micro_batch=1", "zero=0")],
}


@pytest.mark.parametrize(("model", "names"), MODELS)
def test_a_plan_for_a_target_is_what_the_target_runs(
    model: str, names: tuple[str, ...], tmp_path: Path
) -> None:
    """Exported to its own target nothing is lost, and the framework's own rules find nothing wrong; the space
    that the certificate speaks of names the target."""
    source = small_source(model, layers=3)
    profile, capture = load_profile("h100"), capture_model(source, dtype="bf16")
    for name in names:
        costs = model_costs(capture, profile, name, lambda _: None)
        for pins in MODELS[model, names]:
            request = Request(model, None, 8, 16, target=name, pins=pins)
            plan = search_capture(capture, profile, request, parse_pins(pins), [], 0.0, lambda _: None, costs)
            assert plan.workload.target == name and plan.certificate is not None
            assert target_named(name).version in plan.certificate.space
            export = export_plan(plan, name)
            assert export.lost == (), (name, pins, export.lost)
            if name != "torchtitan":
                (file,) = export.files
                launch = f'torchrun pretrain.py "${{{name.upper()}_ARGS[@]}}"'
                (tmp_path / file).write_text(f"{export.files[file]}{launch}\n")
                settings = replace(read_settings(tmp_path / file, name), devices=8)
                assert [one for one in findings(settings) if one.severity == "error"] == []
            _require_vocabulary(plan)


def _require_vocabulary(plan: Plan) -> None:
    """Tables are cut as the frameworks cut them."""
    for layout in plan.layouts.values():
        for node, rule in layout.tp.rules.items():
            assert not (node.startswith("embedding") and rule.startswith("S(1)"))


@cache
def _capture() -> Capture:
    return capture_model(GPT, dtype="bf16")


def _pricing(target: str, profile: HardwareProfile, pins: Pins) -> Pricing:
    capture = _capture()
    costs = model_costs(capture, profile, target, lambda _: None)
    finder = Finder(capture, profile, costs, Request("", None, 4, 32, target=target), pins, lambda _: None)
    return finder.pricing(4, 32, pins)


@pytest.mark.parametrize("target", OTHERS)
def test_the_proof_holds_for_every_plan_of_the_target(target: str) -> None:
    """Memory so small that blocks must be recomputed: every cut with every legal recompute, priced, is no
    faster than the bound; the best of them is the plan found."""
    pins = Pins(pp=2, tp=1, zero=0, micro_batch=4)
    base = load_profile("h100")
    free = solve(_pricing("autoplan", base, replace(pins, recompute="none", schedule="1f1b")), lambda _: None)
    assert free.best is not None
    peak = max(stage.memory_peak_bytes for stage in free.best.stages)
    limit = free.best.stages[0].memory_limit_bytes
    pricing = _pricing(target, with_memory(base, 0.8 * peak - limit), pins)
    outcome = solve(pricing, lambda _: None)
    assert outcome.best is not None
    steps_s: list[float] = []
    for candidate in pricing.candidates:
        for cut in _cuts(pricing, candidate.mesh.pp * candidate.vpp, target, candidate.vpp):
            priced = pricing.priced(candidate, cut)
            if priced.fits:
                steps_s.append(priced.prediction.step_time_s)
    if any(candidate.vpp == 1 for candidate in pricing.candidates):
        assert "full" in {region.recompute for s in outcome.best.part.stages for region in s.regions}
    best_s = outcome.best.prediction.step_time_s
    assert outcome.bound_s <= min(steps_s) * (1 + 1e-9)
    assert min(steps_s) == pytest.approx(best_s, rel=0.003)


def _cuts(pricing: Pricing, stages: int, target: str, vpp: int) -> list[Cut]:
    """All boundaries with all that the target may recompute under them, written out by hand."""
    names = [region.name for region in pricing.costs.regions]
    blocks = [bool(container_of(name)) for name in names]
    found: list[Cut] = []
    for inner in combinations(range(1, len(names)), stages - 1):
        ends = (*inner, len(names))
        spans = list(pairwise((0, *ends)))
        held = [sum(blocks[first:end]) for first, end in spans]
        counts = [[n] * stages for n in range(max(held) + 1)]
        if target == "torchtitan":
            counts = [[0] * stages, held]
        elif target == "loongforge" and vpp == 1:
            counts = [[a, b] for a in range(held[0] + 1) for b in range(held[1] + 1)]
        for own in counts:
            recompute: list[str] = []
            for (first, end), left in zip(spans, own):
                for region in range(first, end):
                    recompute.append("full" if blocks[region] and left > 0 else "none")
                    left -= blocks[region]
            found.append(Cut(ends, tuple(recompute)))
    return found


def test_pins_against_a_target_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A user must learn which pin the framework cannot have, and of a wrong name which there are."""
    cases = [
        ("megatron", "schedule=zb_h1", "zb_h1"),
        ("megatron", "recompute=selective", "recompute=selective"),
        ("megatron", "embed:recompute=full", "blocks alone"),
        ("torchtitan", "zero=1", "ZeRO 1"),
        ("torchtitan", "cp_kind=ulysses", "cp_kind=ulysses"),
    ]
    for target, pin, said in cases:
        with pytest.raises(BadInputError, match=said):
            pricing = _pricing(target, load_profile("h100"), parse_pins((pin, "pp=2", "tp=1")))
            pricing.chain(pricing.candidates[0])
    arguments = ["search", str(GPT), "--hw", "cpu", "--devices", "2", "--global-batch", "4"]
    assert main([*arguments, "--target", "megaton"]) == 2
    assert "expected one of autoplan, megatron" in capsys.readouterr().err
    output = tmp_path / "plan.yaml"
    assert main([*arguments, "--target", "torchtitan", "-o", str(output), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["target"] == "torchtitan"
    assert Plan.load(output).workload.target == "torchtitan"
