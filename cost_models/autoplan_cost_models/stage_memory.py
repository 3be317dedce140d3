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
from autoplan_cost_models.training_state import (
    StateBytes,
    gradient_bytes,
    unit_gradient_bytes,
    weight_bytes,
)
from autoplan_cost_models.zero import GATHERS_AHEAD, ZeroGroups, held_bytes, held_trained


@dataclass(frozen=True)
class PlacedRegion:
    """A region on a stage: its name, layout id, recompute kind, and cost."""

    name: str
    layout: str
    recompute: str
    cost: RegionCost


@dataclass(frozen=True)
class StageSetting:
    """What else decides the memory of states.

    ``gradient_bytes`` is the width of a kept gradient (None: the dtype policy's). ``gradients_made``: the
    backward makes gradients anew, region by region, so that early ones are not there at its start.
    """

    dtype: str
    optimizer: str
    groups: ZeroGroups
    gradient_bytes: int | None = None
    gradients_made: bool = False


def memory_limit_bytes(profile: HardwareProfile) -> float:
    """What tensors may take: memory less the share lost to fragmentation, less the runtime's reserve."""
    usable = profile.memory_bytes.value * (1.0 - profile.fragmentation.value)
    return usable - profile.reserve_bytes.value


def stage_states(regions: Sequence[PlacedRegion], setting: StageSetting) -> StateBytes:
    """Weights, gradients, master weights and moments of a stage; a tied parameter counts once."""
    uses = stage_parameters(regions)
    return setting.groups.states(
        held_bytes(uses), held_trained(uses), dtype=setting.dtype, optimizer=setting.optimizer
    )


def stage_parameters(regions: Sequence[PlacedRegion]) -> list[ParameterUse]:
    """The parameters a stage holds."""
    return [use for held in parameters_by_region(regions) for use in held]


def parameters_by_region(regions: Sequence[PlacedRegion]) -> list[list[ParameterUse]]:
    """The parameters that each region is the first of its stage to hold. Regions of one layout hold different
    ones (each block its own); regions of different layouts that name the same source share it (tied
    weights)."""
    first_layout: dict[str, str] = {}
    return [
        [
            use
            for use in region.cost.parameters
            if first_layout.setdefault(use.source, region.layout) == region.layout
        ]
        for region in regions
    ]


def gathered_items(regions: Sequence[PlacedRegion], setting: StageSetting) -> list[MemoryItem]:
    """Under ZeRO-2 and 3: the two largest regions' gradients whole, and under ZeRO-3 their weights (one in
    use, one arriving or leaving). Under ZeRO-1: new weights on their way."""
    groups = setting.groups
    if groups.zero == 1:
        trained = sum(use.numel for use in stage_parameters(regions) if use.trainable)
        return [MemoryItem("new weights that arrive", arriving_bytes(trained, setting.dtype, groups))]
    items: list[MemoryItem] = []
    for region in sorted(regions, key=lambda region: -region.cost.parameter_bytes)[:2]:
        if groups.zero == 3:
            items.append(MemoryItem(f"gathered weights of {region.name}", region.cost.parameter_bytes))
        if groups.zero >= 2:
            whole = unit_gradient_bytes(region.cost.trainable_numel, setting.dtype)
            items.append(MemoryItem(f"whole gradients of {region.name}", whole))
    return items


def unit_bytes(cost: RegionCost, dtype: str, groups: ZeroGroups) -> float:
    """What one region, if it is among the two largest, adds to :func:`gathered_items`."""
    if groups.zero < 2:
        return 0.0
    weights = cost.parameter_bytes if groups.zero == 3 else 0.0
    return weights + unit_gradient_bytes(cost.trainable_numel, dtype)


def arriving_bytes(trained_numel: float, dtype: str, groups: ZeroGroups) -> float:
    """Buffers of the weights that ZeRO-1 gathers ahead of the forward that reads them."""
    if groups.zero != 1:
        return 0.0
    return weight_bytes(min(trained_numel, GATHERS_AHEAD * groups.bucket_elements), dtype)


def state_items(regions: Sequence[PlacedRegion], setting: StageSetting) -> list[MemoryItem]:
    """Weights, gradients, master weights, moments and buffers."""
    states = stage_states(regions, setting)
    gradients = 0.0 if setting.gradients_made else kept_gradient_bytes(states.gradients, setting)
    buffers = sum(region.cost.buffer_bytes for region in regions)
    zero, shards = setting.groups.zero, setting.groups.shards

    def named(name: str, shared_from: int) -> str:
        return f"{name} (1/{shards} of each)" if zero >= shared_from and shards > 1 else name

    return [
        MemoryItem(named("weights", 3), states.weights),
        MemoryItem(named("gradients", 2), gradients),
        MemoryItem(named("master weights", 1), states.master),
        MemoryItem(named(f"{setting.optimizer} moments", 1), states.moments),
        MemoryItem("buffers", buffers),
    ]


def kept_gradient_bytes(gradients: float, setting: StageSetting) -> float:
    """The bytes of gradients of the dtype policy's width, in the width that the framework keeps."""
    if setting.gradient_bytes is None:
        return gradients
    return gradients * setting.gradient_bytes / gradient_bytes(1, setting.dtype)


def gradients_by_region(regions: Sequence[PlacedRegion], setting: StageSetting) -> tuple[float, ...]:
    """The gradient bytes that each region's backward leaves behind, where it makes them anew."""
    if not setting.gradients_made:
        return ()
    return tuple(
        kept_gradient_bytes(stage_states([region], setting).gradients, setting) for region in regions
    )
