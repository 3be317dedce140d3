"""The forecast of one training step, priced from scratch from a plan's part.

Comes in: a :class:`~autoplan.plan.Part` and a cost per region. Goes out: a Prediction whose breakdown sums
to the step's time, and one StagePrediction per stage. The search takes its objective from here, and a
checker can price any plan here without the search.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from autoplan.hardware import HardwareProfile
from autoplan.plan import MemoryItem, Part, Prediction, RegionPlan, StagePrediction, Workload
from autoplan.schedules import rank_moments, splits_backward
from autoplan_cost_models.collectives import Span, sent_bytes
from autoplan_cost_models.compute import DTYPE_FALLBACKS
from autoplan_cost_models.rank_memory import StageLoad, micro_batch_bytes, rank_memory
from autoplan_cost_models.region_cost import CostModel, RegionCost
from autoplan_cost_models.schedule import in_flight, rank_ends
from autoplan_cost_models.stage_detail import backward_parts_s, forward_parts_s, link_bytes
from autoplan_cost_models.stage_memory import (
    PlacedRegion,
    StageSetting,
    gradients_by_region,
    memory_limit_bytes,
    stage_parameters,
    stage_states,
)
from autoplan_cost_models.stage_time import StageSeconds, partial_sync_s, stage_seconds, sum_seconds
from autoplan_cost_models.training_state import gradient_bytes
from autoplan_cost_models.zero import part_groups

RegionCosts = Mapping[str, RegionCost] | Callable[[RegionPlan], RegionCost]
BREAKDOWN = (
    "compute",
    "recompute",
    "tp_communication",
    "zero_gather",
    "pipeline_bubble",
    "p2p",
    "gradient_sync",
    "optimizer",
)


@dataclass(frozen=True)
class PricedStage:
    """One stage: what it holds, seconds, micro-batches in flight, and the memory of its rank (which may hold
    other stages too)."""

    load: StageLoad
    seconds: StageSeconds
    in_flight: int
    peak_bytes: float
    items: tuple[MemoryItem, ...]

    @property
    def regions(self) -> tuple[PlacedRegion, ...]:
        return self.load.regions


def price_plan(
    part: Part, costs: RegionCosts, cost_model: CostModel, workload: Workload
) -> tuple[Prediction, tuple[StagePrediction, ...]]:
    """Price every stage, simulate the schedule, add what happens once a step.

    ``costs`` gives a region's cost at the part's micro-batch and tp: by layout id, or by RegionPlan. The
    step ends when every stage has reduced its gradients (the global norm needs them all) and updated
    its weights. ``breakdown_s`` is the busiest stage's time; ``pipeline_bubble`` is what it waits.
    """
    stages = _price_stages(part, costs, cost_model, workload)
    hops = _hop_seconds(part, stages, cost_model)
    tied = _tied_parameters(part, stages, cost_model, workload)
    breakdown = _breakdown(part, stages, hops, sum(one.sync_s for one in tied))
    step_s = sum(breakdown.values())
    model_flops = _model_flops(part, stages)
    peak_flops = part.mesh.devices * step_s * peak_flops_per_s(cost_model.profile, workload.dtype)
    prediction = Prediction(
        step_time_s=step_s,
        tokens_per_s=workload.global_batch * workload.tokens_per_sample / step_s,
        mfu=model_flops / peak_flops,
        model_flops=model_flops,
        breakdown_s=breakdown,
        estimated_inputs=_estimated(part, stages, cost_model, workload),
    )
    limit = memory_limit_bytes(cost_model.profile)
    told = (_stage_prediction(stage, limit, part, workload.dtype) for stage in stages)
    hopping = (replace(one, hop_s=hop_s) for one, hop_s in zip(told, [*hops, 0.0]))
    return prediction, tuple(_with_tied(one, index, tied) for index, one in enumerate(hopping))


def peak_flops_per_s(profile: HardwareProfile, dtype: str) -> float:
    """The dtype's peak on the chip, against which MFU is measured; the nearest dtype's where it has none."""
    name = dtype.split("-")[0]
    for candidate in (name, *(other for other, _ in DTYPE_FALLBACKS.get(name, ()))):
        if candidate in profile.peak_flops:
            return profile.peak_flops[candidate].value
    return max(quantity.value for quantity in profile.peak_flops.values())


def _price_stages(
    part: Part, costs: RegionCosts, cost_model: CostModel, workload: Workload
) -> tuple[PricedStage, ...]:
    placed = [tuple(_place(region, costs) for region in stage.regions) for stage in part.stages]
    sends = [0.0, *(regions[-1].cost.output_bytes for regions in placed[:-1]), 0.0]
    setting = _setting(part, cost_model, workload)
    made = [gradients_by_region(regions, setting) for regions in placed]
    loads = [StageLoad(*load) for load in zip(placed, sends, sends[1:], made)]
    memory = [_rank_memory(part, loads, setting, rank) for rank in range(part.mesh.pp)]
    priced: list[PricedStage] = []
    for index, load in enumerate(loads):
        seconds = _rank_seconds(part, load.regions, cost_model, setting)
        flying = in_flight(part.schedule, index, len(loads), part.microbatches, part.vpp)
        priced.append(PricedStage(load, seconds, flying, *memory[index % part.mesh.pp]))
    return tuple(priced) if part.vpp == 1 else _synced_together(part, priced, cost_model, setting)


def _setting(part: Part, cost_model: CostModel, workload: Workload) -> StageSetting:
    """Gradients are made anew by the one backward of a step, where the framework lets them go."""
    keeping = cost_model.execution.keeping
    once = part.mesh.pp == 1 and part.microbatches == 1
    made = keeping.frees_gradients and once
    return StageSetting(workload.dtype, workload.optimizer, part_groups(part), keeping.gradient_bytes, made)


def _synced_together(
    part: Part, stages: Sequence[PricedStage], cost_model: CostModel, setting: StageSetting
) -> tuple[PricedStage, ...]:
    """A rank reduces the gradients of all its stages, the last one's first: what is left after its last
    backward is told of its first stage, which ran it."""
    ranks = part.mesh.pp
    told: list[PricedStage] = []
    for index, stage in enumerate(stages):
        together_s = 0.0
        if index < ranks:
            regions = [region for one in stages[index::ranks] for region in one.regions]
            together_s = _rank_seconds(part, regions, cost_model, setting).gradient_sync
        told.append(replace(stage, seconds=replace(stage.seconds, gradient_sync=together_s)))
    return tuple(told)


def _rank_seconds(
    part: Part, regions: Sequence[PlacedRegion], cost_model: CostModel, setting: StageSetting
) -> StageSeconds:
    """Seconds of regions that lie on one rank, one after another."""
    groups, dtype = setting.groups, setting.dtype
    states, held = stage_states(regions, setting), stage_parameters(regions)
    seconds = stage_seconds(regions, states, cost_model, groups, dtype, part.mesh.devices)
    summed_s = partial_sync_s(held, cost_model, Span(part.mesh.tp, 1), groups, dtype)
    return replace(seconds, gradient_sync=seconds.gradient_sync + summed_s)


def _rank_memory(
    part: Part, loads: Sequence[StageLoad], setting: StageSetting, rank: int
) -> tuple[float, tuple[MemoryItem, ...]]:
    """The peak of one pipeline rank, which holds all its stages."""
    ranks = part.mesh.pp
    moments = rank_moments(part.schedule, rank, ranks, part.vpp, part.microbatches)
    return rank_memory(loads[rank::ranks], setting, moments)


def _place(region: RegionPlan, costs: RegionCosts) -> PlacedRegion:
    cost = costs(region) if callable(costs) else costs[region.layout]
    return PlacedRegion(region.region, region.layout, region.recompute, cost)


def _hop_seconds(part: Part, stages: Sequence[PricedStage], cost_model: CostModel) -> list[float]:
    """One hop's latency: every tp rank sends the whole boundary tensors to its peer on the next stage."""
    span = Span(2, part.mesh.stage_devices)
    return [cost_model.collective_s("p2p", stage.load.sent_bytes, span) for stage in stages[:-1]]


def _breakdown(
    part: Part, stages: Sequence[PricedStage], hops: Sequence[float], tied_sync_s: float
) -> dict[str, float]:
    """Seconds by cause; they sum to the step. p2p is what the schedule loses to its hops."""
    last = _last_ends(part, stages, hops)
    makespan = max(last)
    without_hops = max(_last_ends(part, stages, ())) if any(hops) else makespan
    ranks = [
        sum_seconds([stage.seconds for stage in stages[rank :: part.mesh.pp]]) for rank in range(part.mesh.pp)
    ]
    busiest = max(ranks, key=lambda s: s.forward + s.backward)
    m = part.microbatches
    synced = max(end + rank.gradient_sync for end, rank in zip(last, ranks))
    return {
        "compute": m * (busiest.forward_compute + busiest.backward_compute),
        "recompute": m * busiest.recompute,
        "tp_communication": m * busiest.tp_communication,
        "zero_gather": m * busiest.zero_gather + _weight_gather_s(stages),
        "pipeline_bubble": max(0.0, without_hops - m * (busiest.forward + busiest.backward)),
        "p2p": max(0.0, makespan - without_hops),
        "gradient_sync": synced - makespan + tied_sync_s,
        "optimizer": max(rank.optimizer for rank in ranks),
    }


def _last_ends(part: Part, stages: Sequence[PricedStage], hops: Sequence[float]) -> list[float]:
    """When each pipeline rank's last backward ends."""
    forward = [stage.seconds.forward for stage in stages]
    backward = [stage.seconds.backward for stage in stages]
    weight = [stage.seconds.weight for stage in stages]
    m = part.microbatches
    return rank_ends(part.schedule, forward, backward, m, hops, vpp=part.vpp, weight_s=weight)


def _weight_gather_s(stages: Sequence[PricedStage]) -> float:
    """How much later the step is done for new weights that arrive at its start: a stage waits for its first
    micro-batch in any case."""
    waits, before_s = [0.0], 0.0
    for stage in stages:
        waits.append(stage.seconds.weight_gather - before_s)
        before_s += stage.seconds.forward
    return max(waits)


@dataclass(frozen=True)
class TiedParameter:
    """One parameter that several pipeline ranks hold: the stages, and what its reduction between them takes
    and sends from each of their devices."""

    stages: tuple[int, ...]
    sync_s: float
    sent_bytes: float


def _tied_parameters(
    part: Part, stages: Sequence[PricedStage], cost_model: CostModel, workload: Workload
) -> list[TiedParameter]:
    """Gradients of a parameter that regions of different layouts on different ranks share: one
    all-reduce between those ranks, after the replicas'."""
    homes: dict[str, dict[str, int]] = {}
    sizes: dict[str, int] = {}
    for index, stage in enumerate(stages):
        for region in stage.regions:
            for use in region.cost.parameters:
                homes.setdefault(use.source, {}).setdefault(region.layout, index)
                sizes[use.source] = use.numel if use.trainable else 0
    found: list[TiedParameter] = []
    for source, by_layout in homes.items():
        ranks = sorted({index % part.mesh.pp for index in by_layout.values()})
        if len(by_layout) > 1 and len(ranks) > 1:
            span = Span(len(ranks), part.mesh.stage_devices * (ranks[-1] - ranks[0]))
            moved = gradient_bytes(sizes[source], workload.dtype) / part_groups(part).shards
            sync_s = cost_model.collective_s("all_reduce", moved, span)
            sent = sent_bytes("all_reduce", moved, span.size)
            found.append(TiedParameter(tuple(sorted(set(by_layout.values()))), sync_s, sent))
    return found


def _with_tied(told: StagePrediction, stage: int, tied: Sequence[TiedParameter]) -> StagePrediction:
    """A stage's forecast with what it shares with others."""
    own = [one for one in tied if stage in one.stages and one.sent_bytes]
    if not own:
        return told
    links = {**told.link_bytes, "tied": sum(one.sent_bytes for one in own)}
    return replace(told, tied_sync_s=sum(one.sync_s for one in own), link_bytes=links)


def _model_flops(part: Part, stages: Sequence[PricedStage]) -> float:
    """FLOPs of one step over all replicas: 3x the forward contractions of the whole model."""
    per_micro_batch = sum(region.cost.model_flops for stage in stages for region in stage.regions)
    return per_micro_batch * part.microbatches * part.mesh.dp


def _estimated(
    part: Part, stages: Sequence[PricedStage], cost_model: CostModel, workload: Workload
) -> tuple[str, ...]:
    """Names of every estimated quantity behind the forecast."""
    profile, mesh, groups = cost_model.profile, part.mesh, part_groups(part)
    names = {name for stage in stages for region in stage.regions for name in region.cost.estimated}
    for kind, span in groups.kinds:
        names |= cost_model.links.estimated(kind, span)
    if groups.kinds:
        names.add("slowdown of overlapped communication")
    if mesh.pp > 1:
        names |= cost_model.links.estimated("p2p", Span(2, mesh.stage_devices))
    quantities = {
        "memory reserved for the runtime": profile.reserve_bytes,
        "memory lost to fragmentation": profile.fragmentation,
        "device memory": profile.memory_bytes,
    }
    names |= {name for name, quantity in quantities.items() if quantity.tag == "estimated"}
    peak = profile.peak_flops.get(workload.dtype)
    if peak is None or peak.tag == "estimated":
        names.add(f"{workload.dtype} peak (MFU)")
    return tuple(sorted(names))


def _stage_prediction(stage: PricedStage, limit_bytes: float, part: Part, dtype: str) -> StagePrediction:
    seconds = stage.seconds
    saved_bytes, backward_bytes = micro_batch_bytes(stage.load)
    split = splits_backward(part.schedule)
    return StagePrediction(
        forward_s=seconds.forward,
        backward_s=seconds.backward,
        recompute_s=seconds.recompute,
        tp_communication_s=seconds.tp_communication,
        gradient_sync_s=seconds.gradient_sync,
        weight_gather_s=seconds.weight_gather,
        optimizer_s=seconds.optimizer,
        sends_bytes=stage.load.sent_bytes,
        in_flight=stage.in_flight,
        memory_limit_bytes=limit_bytes,
        memory_peak_bytes=stage.peak_bytes,
        memory_items=stage.items,
        forward_parts_s=forward_parts_s(stage.regions, seconds),
        backward_parts_s=backward_parts_s(stage.regions, seconds),
        saved_bytes=saved_bytes,
        backward_bytes=backward_bytes,
        weight_s=seconds.weight if split else 0.0,
        deferred_bytes=stage.load.deferred_bytes if split else 0.0,
        link_bytes=link_bytes(stage.regions, part, dtype, stage.load.received_bytes, stage.load.sent_bytes),
    )
