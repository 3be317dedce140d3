"""The parallel run of a plan equals one process: loss, every gradient and the norm, on forked gloo ranks.

The reference is plain eager PyTorch on the whole global batch, in fp64, tolerance 1e-9.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from run_fixture import HandPlans

from autoplan.capture import capture_model, load_model_source
from autoplan.runtime.check import Checker, CheckResult

MODELS = Path(__file__).parent / "models"
EXAMPLES = Path(__file__).parent.parent / "examples"
SOURCES = {
    "gpt": (MODELS / "tiny_gpt.py", {}),
    "llama": (EXAMPLES / "tiny_llama.py", {"sequence": 16}),
    "llama_hf": (MODELS / "tiny_llama_hf.py", {}),
    "bert": (MODELS / "tiny_bert.py", {}),
    "vit": (MODELS / "tiny_vit.py", {}),
}
SEQUENCES = {
    **{name: SOURCES[name] for name in ("gpt", "llama", "llama_hf", "bert")},
    "t5": (MODELS / "tiny_t5.py", {}),
    "vlm": (EXAMPLES / "vlm.py", {}),
}
FORCED = [{"dp": 2}, {"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}, {"dp": 2, "tp": 2}]

_made: dict[str, tuple[HandPlans, Checker]] = {}


def check(model: str, degrees: Mapping[str, Any]) -> CheckResult:
    """Make the plan by hand and check it; model, trace and reference are made once a model."""
    if model not in _made:
        path, sizes = {**SOURCES, **SEQUENCES}[model]
        plans = HandPlans(capture_model(path, dtype="fp64", sizes=sizes), model)
        _made[model] = (plans, Checker(load_model_source(path), plans.plan(), timeout_s=60))
    plans, checker = _made[model]
    return checker.check(plans.plan(**degrees))


def assert_parity(result: CheckResult) -> None:
    assert result.ok, f"{result.layout} {result.recompute}: {result}"
    assert result.gradients > 10


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("degrees", FORCED, ids=lambda d: "x".join(f"{k}{v}" for k, v in d.items()))
@pytest.mark.parametrize("model", SOURCES)
def test_forced_layouts(model: str, degrees: dict[str, int], recompute: str) -> None:
    """Replicated parameters on shards, tied tables, grouped heads: each once gave a wrong gradient."""
    assert_parity(check(model, {**degrees, "recompute": (recompute,)}))


FURTHER = {
    "selective": {"tp": 2, "recompute": ("selective",)},
    "selective on stages": {"pp": 2, "tp": 2, "recompute": ("selective",)},
    "mixed recompute": {"pp": 2, "recompute": ("none", "selective", "full")},
    "ZeRO-3": {"dp": 2, "zero": 3},
    "ZeRO-3, recompute": {"dp": 2, "zero": 3, "recompute": ("full",)},
    "ZeRO-3, selective": {"dp": 2, "zero": 3, "recompute": ("selective",)},
    "ZeRO-3 on stages": {"pp": 2, "dp": 2, "zero": 3, "recompute": ("full",)},
    "ZeRO-3 of pieces": {"dp": 2, "tp": 2, "zero": 3},
    "ZeRO-2": {"dp": 2, "zero": 2},
    "ZeRO-2 on stages, recompute": {"pp": 2, "dp": 2, "zero": 2, "recompute": ("full",)},
    "ZeRO-1": {"dp": 2, "zero": 1, "recompute": ("full",)},
    "ZeRO-1 of pieces on stages": {"pp": 2, "dp": 2, "tp": 2, "zero": 1},
    "ZeRO-1 in groups": {"pp": 2, "dp": 4, "zero": 1, "zero_shard": 2, "micro_batch": 1},
    "ZeRO-3 in groups": {"dp": 4, "tp": 2, "zero": 3, "zero_shard": 2, "micro_batch": 1},
    "uneven stages": {"pp": 3},
    "a stage a region": {"pp": 4, "micro_batch": 1},
    "gpipe": {"pp": 2, "schedule": "gpipe"},
    "fewer micro-batches than stages": {"pp": 4, "micro_batch": 4},
    "one micro-batch": {"pp": 2, "micro_batch": 8},
    "all axes": {"pp": 2, "dp": 2, "tp": 2},
    "tp4": {"tp": 4},
    "interleaved": {"pp": 2, "vpp": 2, "schedule": "interleaved_1f1b"},
    "interleaved pieces": {
        "pp": 2,
        "vpp": 2,
        "tp": 2,
        "schedule": "interleaved_1f1b",
        "recompute": ("full",),
    },
    "interleaved ZeRO-3": {"pp": 2, "vpp": 2, "dp": 2, "zero": 3, "schedule": "interleaved_1f1b"},
    "interleaved replicas": {"pp": 2, "vpp": 2, "dp": 2, "schedule": "interleaved_1f1b"},
    "interleaved in odd groups": {
        "pp": 2,
        "vpp": 2,
        "micro_batch": 1,
        "dp": 1,
        "schedule": "interleaved_1f1b",
    },
    "stages of one rank": {"vpp": 4, "schedule": "interleaved_1f1b"},
    "gpipe over stages": {"pp": 2, "vpp": 2, "schedule": "gpipe"},
    "zero bubble": {"pp": 2, "schedule": "zb_h1"},
    "zero bubble, recompute": {"pp": 2, "schedule": "zb_h1", "recompute": ("full", "selective")},
    "zero bubble of pieces": {"pp": 2, "tp": 2, "schedule": "zb_h1"},
    "zero bubble of replicas": {"pp": 2, "dp": 2, "schedule": "zb_h1"},
    "zero bubble over stages": {"pp": 2, "vpp": 2, "schedule": "zb_h1", "recompute": ("none", "full")},
    "zero bubble on many ranks": {"pp": 4, "micro_batch": 1, "schedule": "zb_h1"},
}


@pytest.mark.parametrize("name", FURTHER)
def test_further_plans_of_gpt(name: str) -> None:
    """Schedules, ZeRO and recompute in the combinations the search may choose."""
    assert_parity(check("gpt", FURTHER[name]))


@pytest.mark.parametrize("model", SEQUENCES)
@pytest.mark.parametrize(
    "degrees", [{"tp": 2}, {"tp": 2, "pp": 2, "micro_batch": 1, "recompute": ("full", "none")}], ids=str
)
def test_sequence_parallelism(model: str, degrees: dict[str, Any]) -> None:
    """Activations cut along tokens between regions and stages: two lengths (T5), images before text, tables
    tied over stages, one sample, where tokens merged with samples are tokens alone."""
    assert_parity(check(model, {**degrees, "sp": True}))
    layouts = _made[model][0].plan(**degrees, sp=True).layouts.values()
    assert any(state == "S(1)" for layout in layouts for state in layout.tp.inputs.values())
    assert any(state == "R*" for layout in layouts for state in layout.tp.parameters.values())


@pytest.mark.parametrize("kind", ["ulysses", "ring"])
@pytest.mark.parametrize("model", ["llama_hf", "bert", "t5", "vlm"])
def test_context_parallelism(model: str, kind: str) -> None:
    """Tokens cut on an axis of their own: encoders, two lengths with attention across them, images in text.
    (Small models in every product of axes: test_context.)"""
    assert_parity(check(model, {"cp": 2, "cp_kind": kind}))
    layouts = _made[model][0].plan(cp=2, cp_kind=kind).layouts.values()
    assert any(state.endswith("(1)") for layout in layouts for state in layout.on("cp").inputs.values())


FURTHER_SEQUENCES = {
    "replicas": {"dp": 2, "tp": 2},
    "ZeRO-3 of pieces": {"dp": 2, "tp": 2, "zero": 3},
    "all axes, selective": {"pp": 2, "dp": 2, "tp": 2, "recompute": ("selective",)},
    "tp4": {"tp": 4, "micro_batch": 1},
}


@pytest.mark.parametrize("name", FURTHER_SEQUENCES)
def test_sequence_parallelism_with_other_axes(name: str) -> None:
    """Gradients of norms are partial on tp: summed once a step, before or after they are sharded over dp."""
    assert_parity(check("gpt", {**FURTHER_SEQUENCES[name], "sp": True}))


@pytest.mark.parametrize("model", SOURCES)
@pytest.mark.parametrize(
    "degrees",
    [
        {"pp": 2, "micro_batch": 8},
        {"pp": 1, "recompute": ("full",)},
        {"pp": 2, "micro_batch": 8, "recompute": ("full",)},
    ],
    ids=["stages", "recompute", "both"],
)
def test_bits_are_equal(model: str, degrees: dict[str, Any]) -> None:
    """Stages and recompute reduce nothing in another order, so not one bit may change."""
    result = check(model, degrees)
    assert result.bitwise is True


def test_wrong_gradient_is_found_and_named() -> None:
    """A check that cannot fail proves nothing: a stage that scales one weight must be caught by name."""
    plans, checker = _made.get("gpt") or (check("gpt", {}) and _made["gpt"])
    program = checker.prepare(plans.plan(pp=2))
    broken = program.sources[1].text.replace("self.up_weight,", "self.up_weight * 1.001,")
    result = checker.compare(program.with_source(1, broken), "pp2", "none")
    assert not result.ok
    assert result.worst_gradient.name == "blocks.1.up.weight" or result.loss_difference > 1e-9
