"""What the stages of one device keep through the whole step, with every contributor by name.

Comes in: regions with their costs and recompute, and the ZeRO stage. Goes out: states, and the units that
ZeRO-3 gathers, as :class:`~autoplan.plan.MemoryItem` lists.
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
    """What else decides the memory of states."""

    dtype: str
    optimizer: str
    zero: int
    dp: int
    ep: int = 1


def memory_limit_bytes(profile: HardwareProfile) -> float:
    """What tensors may take: memory less the share lost to fragmentation, less the runtime's reserve."""
    usable = profile.memory_bytes.value * (1.0 - profile.fragmentation.value)
    return usable - profile.reserve_bytes.value


def stage_states(regions: Sequence[PlacedRegion], setting: StageSetting) -> StateBytes:
    """Weights, gradients, master weights and moments of a stage; a tied parameter counts once."""
    uses = stage_parameters(regions)

    def states(held: Sequence[ParameterUse], copies: int) -> StateBytes:
        return state_bytes(
            float(sum(use.bytes for use in held)),
            float(sum(use.numel for use in held if use.trainable)),
            dtype=setting.dtype,
            optimizer=setting.optimizer,
            zero=setting.zero,
            dp=copies,
        )

    dense = states([use for use in uses if not use.by_expert], setting.dp)
    return dense + states([use for use in uses if use.by_expert], setting.dp // setting.ep)


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


def state_items(regions: Sequence[PlacedRegion], setting: StageSetting) -> list[MemoryItem]:
    """Weights, gradients, master weights, moments and buffers."""
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
