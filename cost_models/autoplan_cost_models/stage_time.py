"""Seconds one stage takes: per micro-batch, and once a step for gradients and optimizer.

Comes in: a stage's regions with their costs, the mesh and the ZeRO stage. Goes out: :class:`StageSeconds`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from autoplan.plan import Mesh
from autoplan_cost_models.collectives import Span, overlap_adds_s
from autoplan_cost_models.region_cost import CostModel, RegionCost
from autoplan_cost_models.stage_memory import PlacedRegion
from autoplan_cost_models.training_state import StateBytes, gradient_bytes

# Share of the once-a-step gradient all-reduce (ZeRO 0 to 2) that nothing hides: the runtime starts it
# after the last micro-batch's backward, so all of it.
GRADIENT_SYNC_EXPOSED = 1.0


@dataclass(frozen=True)
class StageSeconds:
    """Per micro-batch, except ``gradient_sync`` and ``optimizer``, which happen once a step."""

    forward_compute: float
    backward_compute: float
    recompute: float
    tp_forward: float
    tp_backward: float
    gather_forward: float
    gather_backward: float
    gradient_sync: float
    optimizer: float

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


def dp_span(mesh: Mesh) -> Span:
    """Replicas (data and context parallel) are ``tp`` ranks apart."""
    return Span(mesh.replicas, mesh.tp)


def zero_exposed_s(
    cost: RegionCost, recompute: str, cost_model: CostModel, mesh: Mesh, dtype: str
) -> tuple[float, float]:
    """Seconds that ZeRO-3 traffic adds to one region's compute: (forward, backward).

    Per micro-batch FSDP2 gathers the weights before forward and again before backward and reduces
    the gradients after it, each overlapped with a neighbour's compute: what exceeds it waits, and
    what overlaps slows down.
    """
    span = dp_span(mesh)
    gather = cost_model.collective_s("all_gather", cost.parameter_bytes, span)
    reduce = cost_model.collective_s("reduce_scatter", gradient_bytes(cost.trainable_numel, dtype, 3), span)
    forward = cost.forward_s + cost.tp_forward_s
    backward = cost.backward_s + cost.tp_backward_s + cost.recompute_s[recompute]
    return overlap_adds_s(forward, gather), overlap_adds_s(backward, gather + reduce)


def stage_seconds(
    regions: Sequence[PlacedRegion],
    states: StateBytes,
    trainable_numel: float,
    cost_model: CostModel,
    mesh: Mesh,
    zero: int,
    dtype: str,
) -> StageSeconds:
    """Sum a stage's regions; gradients of ``trainable_numel`` parameters are reduced over dp once a step."""
    exposed = [
        zero_exposed_s(region.cost, region.recompute, cost_model, mesh, dtype) if zero == 3 else (0.0, 0.0)
        for region in regions
    ]
    costs = [region.cost for region in regions]
    return StageSeconds(
        forward_compute=sum(cost.forward_s for cost in costs),
        backward_compute=sum(cost.backward_s for cost in costs),
        recompute=sum(region.cost.recompute_s[region.recompute] for region in regions),
        tp_forward=sum(cost.tp_forward_s for cost in costs),
        tp_backward=sum(cost.tp_backward_s for cost in costs),
        gather_forward=sum(forward for forward, _ in exposed),
        gather_backward=sum(backward for _, backward in exposed),
        gradient_sync=_gradient_sync_s(gradient_bytes(trainable_numel, dtype, zero), cost_model, mesh, zero),
        optimizer=cost_model.speeds.pass_seconds(states.optimizer_traffic),
    )


def _gradient_sync_s(whole_bytes: float, cost_model: CostModel, mesh: Mesh, zero: int) -> float:
    """ZeRO 0: all-reduce; 1, 2: reduce-scatter, and all-gather of the new weights; 3: nothing left."""
    span = dp_span(mesh)
    if zero == 3 or mesh.replicas == 1:
        return 0.0
    if zero == 0:
        return GRADIENT_SYNC_EXPOSED * cost_model.collective_s("all_reduce", whole_bytes, span)
    reduce = cost_model.collective_s("reduce_scatter", whole_bytes, span)
    return GRADIENT_SYNC_EXPOSED * (reduce + cost_model.collective_s("all_gather", whole_bytes, span))
