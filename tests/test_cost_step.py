"""A whole step: what adds up, what a plan needs in memory, and which numbers were estimated."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from cost_fixture import GIB, Embedding, Head, LlamaBlock, cost_model, fake_region

from autoplan.plan import Mesh, Part, RegionPlan, Stage, Workload
from autoplan_cost_models import (
    CostModel,
    RegionCost,
    RegionWork,
    Span,
    lower_bound_s,
    measure_region,
    price_plan,
)
from autoplan_cost_models.collectives import OVERLAP_SLOWDOWN
from autoplan_cost_models.zero import trailing_s

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")

WIDTH, SEQUENCE, VOCAB, LAYERS = 8192, 1024, 128256, 80


@pytest.fixture(scope="module")
def llama_70b() -> Mapping[str, RegionWork]:
    """Embedding, one block and head of Llama-3-70B at 1,024 tokens."""
    bf16 = torch.bfloat16
    builders = {
        "embed": (lambda: Embedding(WIDTH, VOCAB), lambda b: (torch.zeros(b, SEQUENCE, dtype=torch.long),)),
        "block": (
            lambda: LlamaBlock(WIDTH, 64, 8, 28672),
            lambda b: (torch.empty(b, SEQUENCE, WIDTH, dtype=bf16),),
        ),
        "head": (
            lambda: Head(WIDTH, VOCAB),
            lambda b: (
                torch.empty(b, SEQUENCE, WIDTH, dtype=bf16),
                torch.zeros(b, SEQUENCE, dtype=torch.long),
            ),
        ),
    }
    return {name: measure_region(fake_region(*builder)) for name, builder in builders.items()}


def part(
    layers: int, mesh: Mesh, micro_batch: int, microbatches: int, *, zero: int = 0, recompute: str = "none",
    schedule: str = "1f1b", vpp: int = 1,
) -> Part:  # fmt: skip
    """Equal numbers of blocks a stage, the embedding first and the head last."""
    names = [("embed", "embed"), *((f"layers.{i}", "block") for i in range(layers)), ("head", "head")]
    plans = [RegionPlan(name, layout, recompute if layout == "block" else "none") for name, layout in names]
    each, stages_in_all = layers // (mesh.pp * vpp), mesh.pp * vpp
    cuts = [0, *(1 + each * (s + 1) for s in range(stages_in_all - 1)), len(plans)]
    stages = tuple(Stage(tuple(plans[a:b])) for a, b in itertools.pairwise(cuts))
    return Part("model", mesh, micro_batch, microbatches, schedule, zero, stages, vpp)


def costs(works: Mapping[str, RegionWork], model: CostModel, micro_batch: int) -> dict[str, RegionCost]:
    return {name: model.region_cost(work, micro_batch, {"tp": Span(1)}) for name, work in works.items()}


PARTS = [
    part(8, Mesh(1, 1, 1), 1, 4),
    part(8, Mesh(4, 2, 1), 1, 8, recompute="full"),
    part(8, Mesh(4, 2, 1), 2, 4, recompute="selective", schedule="gpipe"),
    part(8, Mesh(2, 16, 1), 1, 4, zero=3),
    part(8, Mesh(2, 16, 1), 1, 4, zero=1),
    part(8, Mesh(2, 2, 1), 1, 4, schedule="interleaved_1f1b", vpp=2, recompute="selective"),
    part(8, Mesh(4, 2, 1), 1, 8, schedule="zb_h1"),
    part(8, Mesh(4, 2, 1), 1, 8, schedule="zb_h1", vpp=2, recompute="full"),
]


@pytest.mark.parametrize("index", range(len(PARTS)))
def test_seconds_by_cause_and_bytes_held_add_up(llama_70b: Mapping[str, RegionWork], index: int) -> None:
    """A drawing made from the parts once ended before the step did."""
    plan, model = PARTS[index], cost_model()
    workload = Workload(plan.mesh.devices, plan.micro_batch * plan.microbatches * plan.mesh.dp)
    _, stages = price_plan(plan, costs(llama_70b, model, plan.micro_batch), model, workload)
    for s, stage in enumerate(stages):
        assert sum(stage.forward_parts_s.values()) == pytest.approx(stage.forward_s)
        assert sum(stage.backward_parts_s.values()) == pytest.approx(stage.backward_s)
        assert stage.backward_parts_s.get("recompute", 0.0) == stage.recompute_s
        assert (stage.hop_s > 0) == (s < len(stages) - 1)
        moving = (stage.in_flight - 1) * stage.saved_bytes + stage.backward_bytes
        assert 0 < moving < stage.memory_peak_bytes
        assert ("dp" in stage.link_bytes) == (plan.mesh.dp > 1)
        assert ("pp" in stage.link_bytes) == (plan.mesh.pp > 1)


def test_bytes_on_links_follow_from_the_shapes(llama_70b: Mapping[str, RegionWork]) -> None:
    """By hand: gradients twice round a ring, hidden states on and their gradients back."""
    model, m, dp = cost_model(), 8, 4
    plan = part(8, Mesh(pp=4, dp=dp), 1, m)
    by_layout = costs(llama_70b, model, 1)
    _, stages = price_plan(plan, by_layout, model, Workload(16, m * dp))
    hidden = SEQUENCE * WIDTH * 2.0
    gradients = 4.0 * 2 * by_layout["block"].trainable_numel
    assert stages[1].link_bytes == pytest.approx({"pp": m * 2 * hidden, "dp": 2 * 3 / 4 * gradients})
    whole = 2 * by_layout["block"].parameter_bytes
    by_hand = {  # gradients travel in fp32, weights in bf16
        (1, 0): 3 / 4 * (gradients + whole),
        (1, 2): 1 / 2 * (gradients + whole) + gradients / 2,  # all-reduce of halves over two groups
        (2, 0): 3 / 4 * (m * gradients + whole),
        (3, 0): 3 / 4 * m * (gradients + 2 * whole),
        (3, 2): 1 / 2 * m * (gradients + 2 * whole) + gradients / 2,
    }
    for (zero, shard), expected in by_hand.items():
        sharded = replace(part(8, Mesh(pp=4, dp=dp), 1, m, zero=zero), zero_shard=shard)
        _, stages = price_plan(sharded, by_layout, model, Workload(16, m * dp))
        assert stages[1].link_bytes["dp"] == pytest.approx(expected), (zero, shard)


def test_zero_trades_memory_for_traffic(llama_70b: Mapping[str, RegionWork]) -> None:
    """Every ZeRO stage and every larger group takes less memory; ZeRO-1 moves less than an all-reduce."""
    model, workload = cost_model(), Workload(64, 64 * 4, tokens_per_sample=SEQUENCE)
    options = [(0, 0), (1, 8), (1, 0), (2, 0), (3, 8), (3, 0)]
    priced = {
        option: price_plan(
            replace(part(8, Mesh(1, 64, 1), 1, 4, zero=option[0]), zero_shard=option[1]),
            costs(llama_70b, model, 1),
            model,
            workload,
        )
        for option in options
    }
    peaks = {option: stages[0].memory_peak_bytes for option, (_, stages) in priced.items()}
    assert peaks[0, 0] > peaks[1, 8] > peaks[1, 0] > peaks[2, 0] > peaks[3, 0]
    assert peaks[3, 8] > peaks[3, 0]
    steps = {option: forecast.step_time_s for option, (forecast, _) in priced.items()}
    assert steps[1, 0] < steps[0, 0]  # less to update, and new weights travel in 16 bits
    assert steps[1, 0] < steps[2, 0] < steps[3, 0]  # reduced, and then gathered too, every micro-batch


@pytest.mark.parametrize("seed", range(50))
def test_traffic_beside_compute_is_what_a_timeline_of_it_takes(seed: int) -> None:
    """The closed form against a simulation second by second: pieces start when their compute is done."""
    rng = random.Random(seed)
    pieces = [(rng.randint(0, 9), rng.randint(0, 9)) for _ in range(rng.randint(1, 6))]
    computed, ready = 0, list[int]()
    for compute, traffic in pieces:
        computed += compute
        ready += [computed] * traffic  # one entry a second of traffic
    clock = 0
    for earliest in ready:
        clock = max(clock, earliest) + 1
    shown = max(clock, computed) - computed if ready else 0
    expected = shown + (OVERLAP_SLOWDOWN - 1) * (len(ready) - shown)
    assert trailing_s([(float(c), float(t)) for c, t in pieces]) == pytest.approx(expected)


@pytest.mark.parametrize("index", range(len(PARTS)))
def test_breakdown_sums_to_the_step(llama_70b: Mapping[str, RegionWork], index: int) -> None:
    """Every second has one cause; tokens/s and MFU follow from the step."""
    plan, model = PARTS[index], cost_model()
    tokens = SEQUENCE * plan.micro_batch * plan.microbatches * plan.mesh.dp
    workload = Workload(plan.mesh.devices, tokens // SEQUENCE, tokens_per_sample=SEQUENCE)
    prediction, stages = price_plan(plan, costs(llama_70b, model, plan.micro_batch), model, workload)
    assert math.isclose(sum(prediction.breakdown_s.values()), prediction.step_time_s)
    assert min(prediction.breakdown_s.values()) >= 0
    assert math.isclose(prediction.tokens_per_s, tokens / prediction.step_time_s)
    assert 0.05 < prediction.mfu < 1
    rows = [s.forward_s for s in stages], [s.backward_s for s in stages]
    if plan.schedule != "zb_h1":  # whose bound needs the weights' share
        assert prediction.step_time_s >= lower_bound_s(plan.schedule, *rows, plan.microbatches, vpp=plan.vpp)
    for stage in stages:
        assert math.isclose(sum(item.bytes for item in stage.memory_items), stage.memory_peak_bytes)
        sizes = [item.bytes for item in stage.memory_items]
        assert sizes == sorted(sizes, reverse=True)


def test_model_flops_are_six_per_parameter_and_token(llama_70b: Mapping[str, RegionWork]) -> None:
    """MFU counts 6 N per token plus causal attention, never recompute."""
    model, plan = cost_model(), part(LAYERS, Mesh(8, 4, 1), 1, 8, recompute="full")
    workload = Workload(32, 32, tokens_per_sample=SEQUENCE)
    prediction, _ = price_plan(plan, costs(llama_70b, model, 1), model, workload)
    block = WIDTH * (2 * WIDTH + 2 * 1024 + 3 * 28672)
    tokens = 32 * SEQUENCE
    expected = 6 * tokens * (LAYERS * block + WIDTH * VOCAB) + 6 * tokens * LAYERS * WIDTH * SEQUENCE
    assert math.isclose(prediction.model_flops, expected)


def test_70b_recipe_fits_141_gb_cards_and_not_80_gb_ones(llama_70b: Mapping[str, RegionWork]) -> None:
    """Reported: pp 8 x FSDP 4, 1,024 tokens, micro-batch 4 overflows 79.1 GiB; micro-batch 1 fits.

    https://github.com/NVIDIA-NeMo/Automodel/pull/2673 (all-bf16 Adam, the
    gather is the head's 1.957 GiB). Its 52 GB of activations are what selective recompute keeps.
    """
    model = cost_model()
    peaks: dict[int, float] = {}
    for micro_batch in (4, 1):
        plan = part(LAYERS, Mesh(8, 4, 1), micro_batch, 8, zero=3, recompute="selective")
        workload = Workload(32, 4 * micro_batch * 8, dtype="bf16-pure", tokens_per_sample=SEQUENCE)
        _, stages = price_plan(plan, costs(llama_70b, model, micro_batch), model, workload)
        peaks[micro_batch] = max(stage.memory_peak_bytes for stage in stages) / GIB
        names = {item.name: item.bytes / GIB for item in stages[-1].memory_items}
        assert names["gathered weights of head"] == pytest.approx(1.957, abs=2e-3)
        assert any("in flight" in item.name for item in stages[0].memory_items)
    assert peaks[1] < 79.1 < peaks[4] < 141


def test_small_and_large_clusters_of_a_70b_fine_tune(llama_70b: Mapping[str, RegionWork]) -> None:
    """Reported: full fine-tuning of 70B with ZeRO-3 does not fit 16 cards of 80 GB, and fits 32."""
    model = cost_model()
    fits: dict[int, bool] = {}
    for devices in (16, 32):
        plan = part(LAYERS, Mesh(1, devices, 1), 1, 1, zero=3, recompute="full")
        workload = Workload(devices, devices, tokens_per_sample=SEQUENCE)
        _, (stage,) = price_plan(plan, costs(llama_70b, model, 1), model, workload)
        fits[devices] = stage.memory_peak_bytes <= stage.memory_limit_bytes
    assert fits == {16: False, 32: True}


def test_zero_3_trades_gradient_sync_for_gathers(llama_70b: Mapping[str, RegionWork]) -> None:
    """States shrink with the replicas; the all-reduce at the end is gone; gathers show where exposed."""
    model, workload = cost_model(), Workload(16, 16, tokens_per_sample=SEQUENCE)
    whole, sharded = (
        price_plan(part(8, Mesh(1, 16, 1), 1, 1, zero=zero), costs(llama_70b, model, 1), model, workload)
        for zero in (0, 3)
    )
    assert sharded[1][0].memory_peak_bytes < 0.5 * whole[1][0].memory_peak_bytes
    assert whole[0].breakdown_s["gradient_sync"] > 0 == sharded[0].breakdown_s["gradient_sync"]
    assert sharded[0].breakdown_s["zero_gather"] > 0 == whole[0].breakdown_s["zero_gather"]
    assert sharded[0].breakdown_s["optimizer"] < whole[0].breakdown_s["optimizer"]


def test_estimated_inputs_are_named(llama_70b: Mapping[str, RegionWork]) -> None:
    """A forecast from estimated numbers must say which."""
    model, plan = cost_model(), part(8, Mesh(2, 16, 1), 1, 4)
    prediction, _ = price_plan(
        plan, costs(llama_70b, model, 1), model, Workload(32, 64, tokens_per_sample=SEQUENCE)
    )
    assert "all_reduce across nodes" in prediction.estimated_inputs
    assert "memory reserved for the runtime" in prediction.estimated_inputs
    assert "bf16 matrix product rate" not in prediction.estimated_inputs


def peaks_gib(works: Mapping[str, RegionWork], plan: Part) -> tuple[float, list[float]]:
    """Step time, and peak memory by stage."""
    model = cost_model()
    workload = Workload(plan.mesh.devices, plan.micro_batch * plan.microbatches * plan.mesh.dp)
    prediction, stages = price_plan(plan, costs(works, model, plan.micro_batch), model, workload)
    return prediction.step_time_s, [stage.memory_peak_bytes / GIB for stage in stages]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_zero_bubble_trades_memory_for_the_bubble(
    llama_70b: Mapping[str, RegionWork], recompute: str
) -> None:
    """The last ranks wait with weight gradients: where all is recomputed, that is most of their memory."""
    plain = peaks_gib(llama_70b, part(8, Mesh(4, 1, 1), 1, 8, recompute=recompute))
    split = peaks_gib(llama_70b, part(8, Mesh(4, 1, 1), 1, 8, recompute=recompute, schedule="zb_h1"))
    assert split[0] < 0.9 * plain[0]
    assert split[1][-1] > plain[1][-1]
    two = 2 * costs(llama_70b, cost_model(), 1)["block"].trainable_numel
    assert split[1][1] - plain[1][1] < 16.0 * two / GIB  # no state is kept twice


def test_stages_of_one_rank_share_its_memory(llama_70b: Mapping[str, RegionWork]) -> None:
    """Each stage was told that it had the device to itself."""
    ranks, vpp, m = 2, 2, 4
    plan, model = part(8, Mesh(ranks, 1, 1), 1, m, schedule="interleaved_1f1b", vpp=vpp), cost_model()
    by_layout = costs(llama_70b, model, 1)
    _, stages = price_plan(plan, by_layout, model, Workload(ranks, m))
    assert stages[0].memory_items == stages[2].memory_items != stages[1].memory_items
    assert [stage.in_flight for stage in stages] == [4, 3, 2, 1]
    weights = sum(by_layout[r.layout].parameter_bytes for s in plan.stages[::2] for r in s.regions)
    items = {item.name: item.bytes for item in stages[0].memory_items}
    assert items["weights"] == weights
    saved = sum(size for name, size in items.items() if name.startswith("saved activations"))
    # 5 half stages of 2 blocks are in flight; the fullest moment is the embedding's backward in one of them
    assert saved == pytest.approx((5 * 2 - 2) * by_layout["block"].saved_bytes["none"])
