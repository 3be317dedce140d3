"""Seconds one stage takes: per micro-batch, and once a step for gradients and optimizer.

Comes in: a stage's regions with their costs, and how ZeRO groups replicas. Goes out: :class:`StageSeconds`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from autoplan_cost_models.collectives import Span, overlap_adds_s
from autoplan_cost_models.region_cost import CostModel, RegionCost
from autoplan_cost_models.region_work import ParameterUse
from autoplan_cost_models.stage_memory import PlacedRegion, parameters_by_region
from autoplan_cost_models.training_state import (
    StateBytes,
    backward_gradient_bytes,
    gradient_bytes,
    weight_bytes,
)
from autoplan_cost_models.zero import (
    Held,
    ZeroGroups,
    held_bytes,
    held_trained,
    step_gather_s,
    step_reduce_s,
)


@dataclass(frozen=True)
class StageSeconds:
    """Per micro-batch, except what happens once a step: ``weight_gather`` (how much later the first forward
    is done for new weights that arrive), ``gradient_sync`` (what is left of the gradients' reduction after
    the last backward) and ``optimizer``. ``weight`` is the part of ``backward_compute`` that a split backward
    puts off."""

    forward_compute: float
    backward_compute: float
    recompute: float
    tp_forward: float
    tp_backward: float
    gather_forward: float
    gather_backward: float
    weight_gather: float
    gradient_sync: float
    optimizer: float
    weight: float = 0.0

    @property
    def forward(self) -> float:
        return self.forward_compute + self.tp_forward + self.gather_forward

    @property
    def backward(self) -> float:
        return self.backward_compute + self.tp_backward + self.recompute + self.gather_backward

    @property
    def tp_communication(self) -> float:
        return self.tp_forward + self.tp_backward

    @property
    def zero_gather(self) -> float:
        return self.gather_forward + self.gather_backward


def sum_seconds(stages: Sequence[StageSeconds]) -> StageSeconds:
    """What several stages on one rank take together."""
    names = [one.name for one in fields(StageSeconds)]
    return StageSeconds(**{name: sum(getattr(stage, name) for stage in stages) for name in names})


def zero_exposed_s(
    cost: RegionCost, recompute: str, cost_model: CostModel, groups: ZeroGroups, dtype: str
) -> tuple[float, float]:
    """Seconds that ZeRO-2 and 3 add to one region's compute in every micro-batch: (forward, backward).

    FSDP2 reduces the gradients after backward and, under ZeRO-3, gathers the weights before forward and again
    before backward, each overlapped with a neighbour's compute: what exceeds it waits, and what overlaps
    slows down.
    """
    if groups.zero < 2:
        return 0.0, 0.0
    weights, numel = Held(*cost.held_bytes), Held(*cost.held_trained)
    gather_s = groups.gather_s(cost_model, weights) if groups.zero == 3 else 0.0
    reduce_s = groups.scatter_s(cost_model, numel * reduced_bytes(cost_model, dtype))
    forward_s = cost.forward_s + cost.tp_forward_s
    backward_s = cost.backward_s + cost.tp_backward_s + cost.recompute_s[recompute]
    return overlap_adds_s(forward_s, gather_s), overlap_adds_s(backward_s, gather_s + reduce_s)


def reduced_bytes(cost_model: CostModel, dtype: str) -> float:
    """Bytes of one element of a gradient that is reduced between replicas."""
    width = cost_model.execution.reduced_bytes_per_parameter
    return gradient_bytes(1, dtype) if width is None else width


def state_passes_s(
    cost: RegionCost, cost_model: CostModel, groups: ZeroGroups, dtype: str
) -> tuple[float, float]:
    """Seconds of the passes over weights and gradients around a region: (forward, backward).

    Each micro-batch the runtime reads the gradient that backward wrote and adds it to the one it keeps. FSDP2
    copies gradients into the buffer that is reduced and, under ZeRO-3, the gathered weights out of theirs
    before forward and backward. Other programs move ``execution.gradient_bytes_per_parameter``.
    """
    execution, speeds = cost_model.execution, cost_model.speeds
    copied = execution.gathered_copies * cost.parameter_bytes if groups.zero == 3 else 0.0
    kept = gradient_bytes(cost.trainable_numel, dtype)
    added = backward_gradient_bytes(cost.trainable_numel, dtype) + (kept if groups.zero >= 2 else 2 * kept)
    if execution.gradient_bytes_per_parameter is not None:
        added = execution.gradient_bytes_per_parameter * cost.trainable_numel
    return speeds.pass_seconds(copied), speeds.pass_seconds(copied + added)


def weight_s(cost: RegionCost, passes_s: tuple[float, float]) -> float:
    """What a split backward of a region puts off: products for weights, and adding their gradients up (see
    :func:`state_passes_s`; a split backward goes with whole gradients)."""
    return cost.weight_s + passes_s[1] - passes_s[0] if cost.weight_s else 0.0


def stage_seconds(
    regions: Sequence[PlacedRegion],
    states: StateBytes,
    cost_model: CostModel,
    groups: ZeroGroups,
    dtype: str,
    devices: int,
) -> StageSeconds:
    """Sum a stage's regions on one of ``devices``; what replicas do once a step is beside its first forward
    and last backward."""
    costs = [region.cost for region in regions]
    exposed = [zero_exposed_s(region.cost, region.recompute, cost_model, groups, dtype) for region in regions]
    passes = [state_passes_s(cost, cost_model, groups, dtype) for cost in costs]
    slowest = cost_model.speeds.slowest_of(devices)
    forward = [slowest * (cost.forward_s + extra) for cost, (extra, _) in zip(costs, passes)]
    backward = [slowest * (cost.backward_s + extra) for cost, (_, extra) in zip(costs, passes)]
    again = [slowest * region.cost.recompute_s[region.recompute] for region in regions]
    seconds = StageSeconds(
        forward_compute=sum(forward),
        backward_compute=sum(backward),
        recompute=sum(again),
        tp_forward=sum(cost.tp_forward_s for cost in costs),
        tp_backward=sum(cost.tp_backward_s for cost in costs),
        gather_forward=sum(more for more, _ in exposed),
        gather_backward=sum(more for _, more in exposed),
        weight_gather=0.0,
        gradient_sync=0.0,
        optimizer=slowest
        * cost_model.execution.optimizer_passes
        * cost_model.speeds.pass_seconds(states.optimizer_traffic),
        weight=slowest * sum(map(weight_s, costs, passes)),
    )
    beside = (
        [own + cost.tp_forward_s + more for own, cost, (more, _) in zip(forward, costs, exposed)],
        [
            own + more + cost.tp_backward_s + most
            for own, more, cost, (_, most) in zip(backward, again, costs, exposed)
        ],
    )
    gather_s, reduce_s = _once_a_step_s(regions, beside, cost_model, groups, dtype)
    return replace(seconds, weight_gather=gather_s, gradient_sync=reduce_s)


def partial_sync_s(
    held: Sequence[ParameterUse], cost_model: CostModel, tp: Span, groups: ZeroGroups, dtype: str
) -> float:
    """Gradients that each tp rank has of its own tokens: one all-reduce a step of what a rank holds."""
    numel = sum(use.numel for use in held if use.trainable and "tp" in use.summed_over)
    return cost_model.collective_s("all_reduce", gradient_bytes(numel / groups.shards, dtype), tp)


def _once_a_step_s(
    regions: Sequence[PlacedRegion],
    beside_s: tuple[Sequence[float], Sequence[float]],
    cost_model: CostModel,
    groups: ZeroGroups,
    dtype: str,
) -> tuple[float, float]:
    """(before the first forward is done, after the last backward): what is left of new weights that arrive
    and of gradients that are reduced, beside each region's forward and backward. A program that does not
    overlap them does both at the end."""
    held = parameters_by_region(regions)
    trained = [held_trained(uses) for uses in held]
    gathered = [held_bytes(uses, trained=groups.zero != 2) for uses in held]
    width = reduced_bytes(cost_model, dtype)
    if not cost_model.execution.overlaps_gradients:
        gather_s = groups.gather_s(cost_model, sum(gathered, Held())) if groups.gathers_once else 0.0
        return 0.0, groups.reduce_s(cost_model, sum(trained, Held()) * width) + gather_s
    forward_s, backward_s = beside_s
    gather_s = step_gather_s(groups, cost_model, forward_s, gathered, weight_bytes(1, dtype))
    return gather_s, step_reduce_s(groups, cost_model, backward_s[::-1], trained[::-1], width)
