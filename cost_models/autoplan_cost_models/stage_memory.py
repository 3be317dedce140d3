"""Peak memory of one stage on one device, with every contributor by name.

Comes in: the stage's regions with their costs and recompute, ZeRO stage, schedule. Goes out: the peak in
bytes and its :class:`~autoplan.plan.MemoryItem` list, largest first, which sums to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoplan.hardware import HardwareProfile
from autoplan.plan import MemoryItem
from autoplan_cost_models.region_cost import RegionCost
from autoplan_cost_models.region_work import ParameterUse
from autoplan_cost_models.training_state import StateBytes, gradient_bytes, state_bytes


@dataclass(frozen=True)
class PlacedRegion:
    """A region on a stage: its name, layout id, recompute kind, and cost."""

    name: str
    layout: str
    recompute: str
    cost: RegionCost


@dataclass(frozen=True)
class StageSetting:
    """What else decides a stage's memory; ``in_flight`` micro-batches are alive at once."""

    dtype: str
    optimizer: str
    zero: int
    dp: int
    stage: int
    stages: int
    microbatches: int
    in_flight: int
    keeps_pipeline_buffers: bool = True


def memory_limit_bytes(profile: HardwareProfile) -> float:
    """What tensors may take: memory less the share lost to fragmentation, less the runtime's reserve."""
    usable = profile.memory_bytes.value * (1.0 - profile.fragmentation.value)
    return usable - profile.reserve_bytes.value


def stage_states(regions: Sequence[PlacedRegion], setting: StageSetting) -> StateBytes:
    """Weights, gradients, master weights and moments of a stage; a tied parameter counts once."""
    uses = stage_parameters(regions)
    return state_bytes(
        float(sum(use.bytes for use in uses)),
        float(sum(use.numel for use in uses if use.trainable)),
        dtype=setting.dtype,
        optimizer=setting.optimizer,
        zero=setting.zero,
        dp=setting.dp,
    )


def stage_parameters(regions: Sequence[PlacedRegion]) -> list[ParameterUse]:
    """The parameters a stage holds. Regions of one layout hold different ones (each block its own);
    regions of different layouts that name the same source share it (tied weights)."""
    first_layout: dict[str, str] = {}
    held: list[ParameterUse] = []
    for region in regions:
        for use in region.cost.parameters:
            if first_layout.setdefault(use.source, region.layout) == region.layout:
                held.append(use)
    return held


def pipeline_buffer_bytes(
    microbatches: int, in_flight: int, received_bytes: float, sent_bytes: float
) -> float:
    """Buffers of ``torch.distributed.pipelining``: one per micro-batch to receive its activation and one to
    receive its gradient (both kept through the step), and the outputs of the micro-batches in flight.

    Activations received and in flight are counted as the first region's inputs, so not here.
    ``received_bytes`` is 0 on the first stage, ``sent_bytes`` 0 on the last.
    """
    return (microbatches - in_flight) * received_bytes + (microbatches + in_flight) * sent_bytes


def _buffer_bytes(setting: StageSetting, received_bytes: float, sent_bytes: float) -> float:
    """What the pipeline keeps; without buffers for every micro-batch, one each way and direction."""
    if not setting.keeps_pipeline_buffers:
        return 2 * (received_bytes + sent_bytes)
    return pipeline_buffer_bytes(setting.microbatches, setting.in_flight, received_bytes, sent_bytes)


def gathered_items(regions: Sequence[PlacedRegion], setting: StageSetting) -> list[MemoryItem]:
    """Under ZeRO-3: the two largest regions' weights and gradients whole (one in use, one arriving or
    leaving)."""
    if setting.zero < 3 or setting.dp <= 1:
        return []
    largest = sorted(regions, key=lambda region: -region.cost.parameter_bytes)[:2]
    items: list[MemoryItem] = []
    for region in largest:
        whole_gradient = gradient_bytes(region.cost.trainable_numel, setting.dtype, setting.zero)
        items.append(MemoryItem(f"gathered weights of {region.name}", region.cost.parameter_bytes))
        items.append(MemoryItem(f"whole gradients of {region.name}", whole_gradient))
    return items


def stage_memory(
    regions: Sequence[PlacedRegion], setting: StageSetting, received_bytes: float, sent_bytes: float
) -> tuple[float, tuple[MemoryItem, ...]]:
    """Peak bytes and named items.

    The peak is the worst region's: while region r runs backward, the oldest micro-batch's later regions
    are freed already, its regions up to r are alive, and so are all regions of the others in flight.
    """
    worst = _worst_region(regions)
    items = [
        *_state_items(regions, setting),
        *gathered_items(regions, setting),
        *_saved_items(regions, worst, setting.in_flight),
        *_transient_items(regions[worst]),
    ]
    buffers = _buffer_bytes(setting, received_bytes, sent_bytes)
    items.append(MemoryItem(f"pipeline buffers of {setting.microbatches} micro-batches", buffers))
    named = tuple(sorted((item for item in items if item.bytes > 0), key=lambda item: -item.bytes))
    return sum(item.bytes for item in named), named


def micro_batch_bytes(regions: Sequence[PlacedRegion]) -> tuple[float, float]:
    """(kept by a micro-batch in flight, taken at the peak by the one that runs backward), of the
    :func:`stage_memory` peak."""
    worst = _worst_region(regions)
    side = sum({item.name: item.bytes for r in regions for item in r.cost.side_items}.values())
    kept = [_saved(region) for region in regions]
    running = sum(kept[: worst + 1]) + sum(item.bytes for item in _transient_items(regions[worst]))
    return sum(kept) + side, running + side


def _worst_region(regions: Sequence[PlacedRegion]) -> int:
    """The region in whose backward most is alive (the other micro-batches add the same to every region)."""
    alive = 0.0
    peaks: list[float] = []
    for region in regions:
        alive += region.cost.saved_bytes[region.recompute]
        peaks.append(alive + region.cost.transient_bytes[region.recompute])
    return max(range(len(regions)), key=lambda index: peaks[index])


def _state_items(regions: Sequence[PlacedRegion], setting: StageSetting) -> list[MemoryItem]:
    states = stage_states(regions, setting)
    buffers = sum(region.cost.buffer_bytes for region in regions)
    shared = "" if setting.zero < 3 or setting.dp == 1 else f" (1/{setting.dp} of each)"
    return [
        MemoryItem(f"weights{shared}", states.weights),
        MemoryItem("gradients", states.gradients),
        MemoryItem("master weights", states.master),
        MemoryItem(f"{setting.optimizer} moments", states.moments),
        MemoryItem("buffers", buffers),
    ]


def _saved_items(regions: Sequence[PlacedRegion], worst: int, in_flight: int) -> list[MemoryItem]:
    """Saved activations, grouped by layout and recompute; a single region's largest tensors by name."""
    groups: dict[tuple[str, str], list[int]] = {}
    for index, region in enumerate(regions):
        groups.setdefault((region.layout, region.recompute), []).append(index)
    items: list[MemoryItem] = []
    for (_, recompute), members in groups.items():
        alive = (in_flight - 1) * len(members) + sum(1 for index in members if index <= worst)
        first = regions[members[0]]
        if len(members) == 1:
            items.extend(_named_tensors(first, alive))
        else:
            label = f"saved activations of {len(members)} x {first.name}.. ({_word(recompute)}"
            items.append(MemoryItem(f"{label}, {in_flight} in flight)", alive * _saved(first)))
    return items + _side_items(regions, in_flight)


def _named_tensors(region: PlacedRegion, alive: int) -> list[MemoryItem]:
    items = region.cost.saved_items[region.recompute]
    large = [item for item in items if item.bytes >= 0.1 * _saved(region)]
    rest = _saved(region) - sum(item.bytes for item in large)
    named = [MemoryItem(f"{item.name} saved by {region.name}", alive * item.bytes) for item in large]
    return [*named, MemoryItem(f"other saved activations of {region.name}", alive * rest)]


def _side_items(regions: Sequence[PlacedRegion], in_flight: int) -> list[MemoryItem]:
    """Masks and tables that every block reads: once a stage and micro-batch."""
    side = {item.name: item.bytes for region in regions for item in region.cost.side_items}
    return [MemoryItem(f"side input {name}", in_flight * size) for name, size in side.items()]


def _transient_items(region: PlacedRegion) -> list[MemoryItem]:
    items = region.cost.transient_items[region.recompute]
    return [MemoryItem(f"{item.name} of {region.name}", item.bytes) for item in items]


def _saved(region: PlacedRegion) -> float:
    return region.cost.saved_bytes[region.recompute]


def _word(recompute: str) -> str:
    return {"none": "no recompute", "selective": "selective recompute", "full": "full recompute"}[recompute]
