"""Seconds one stage takes: per micro-batch, and once a step for gradients and optimizer.

Comes in: a stage's regions with their costs, the mesh and the ZeRO stage. Goes out: :class:`StageSeconds`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from autoplan.plan import Mesh
from autoplan_cost_models.collectives import Span, overlap_adds_s
from autoplan_cost_models.region_cost import CostModel, RegionCost
from autoplan_cost_models.region_work import ParameterUse
from autoplan_cost_models.stage_memory import PlacedRegion
from autoplan_cost_models.training_state import StateBytes, gradient_bytes


@dataclass(frozen=True)
class StageSeconds:
    """Per micro-batch, except ``gradient_sync`` and ``optimizer``, which happen once a step. ``weight`` is
    the part of ``backward_compute`` that a split backward puts off."""

    forward_compute: float
    backward_compute: float
    recompute: float
    tp_forward: float
    tp_backward: float
    gather_forward: float
    gather_backward: float
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


def dp_span(mesh: Mesh) -> Span:
    """Replicas (data and context parallel) are ``tp`` ranks apart."""
    return Span(mesh.replicas, mesh.tp)


def expert_span(mesh: Mesh) -> Span:
    """Ranks with the same experts: every ``ep``-th of the replicas."""
    return Span(mesh.replicas // mesh.ep, mesh.tp * mesh.ep)


def zero_exposed_s(
    cost: RegionCost, recompute: str, cost_model: CostModel, mesh: Mesh, dtype: str
) -> tuple[float, float]:
    """Seconds that ZeRO-3 traffic adds to one region's compute: (forward, backward).

    Per micro-batch FSDP2 gathers the weights before forward and again before backward and reduces
    the gradients after it, each overlapped with a neighbour's compute: what exceeds it waits, and
    what overlaps slows down.
    """
    gather = reduce = 0.0
    for span, by_expert in ((dp_span(mesh), False), (expert_span(mesh), True)):
        held_bytes, trained = cost.held(by_expert=by_expert)
        gather += cost_model.collective_s("all_gather", held_bytes, span)
        reduce += cost_model.collective_s("reduce_scatter", _reduced_bytes(trained, cost_model, dtype), span)
    forward = cost.forward_s + cost.tp_forward_s
    backward = cost.backward_s + cost.tp_backward_s + cost.recompute_s[recompute]
    return overlap_adds_s(forward, gather), overlap_adds_s(backward, gather + reduce)


def _reduced_bytes(trained_numel: float, cost_model: CostModel, dtype: str) -> float:
    """Bytes of a region's gradients as ZeRO-3 reduces them."""
    width = cost_model.execution.reduced_bytes_per_parameter
    return gradient_bytes(trained_numel, dtype, 3) if width is None else width * trained_numel


def state_passes_s(
    cost: RegionCost, cost_model: CostModel, mesh: Mesh, zero: int, dtype: str
) -> tuple[float, float]:
    """Seconds of the passes over weights and gradients around a region: (forward, backward).

    Each micro-batch the runtime reads the gradient that backward wrote and adds it to the one it keeps. Under
    ZeRO-3 FSDP2 copies the gathered weights out of their buffer before forward and backward, and the
    gradients into one. Other programs move ``execution.gradient_bytes_per_parameter``.
    """
    execution, speeds = cost_model.execution, cost_model.speeds
    gathers = zero == 3 and mesh.replicas > 1
    copied = execution.gathered_copies * cost.parameter_bytes if gathers else 0.0
    once = gradient_bytes(cost.trainable_numel, dtype, 3)
    added = 2 * once if gathers else once + 2 * gradient_bytes(cost.trainable_numel, dtype, zero)
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
    passes = [state_passes_s(cost, cost_model, mesh, zero, dtype) for cost in costs]
    slowest = cost_model.speeds.slowest_of(mesh.devices)
    seconds = StageSeconds(
        forward_compute=slowest * sum(cost.forward_s + extra for cost, (extra, _) in zip(costs, passes)),
        backward_compute=slowest * sum(cost.backward_s + extra for cost, (_, extra) in zip(costs, passes)),
        recompute=slowest * sum(region.cost.recompute_s[region.recompute] for region in regions),
        tp_forward=sum(cost.tp_forward_s for cost in costs),
        tp_backward=sum(cost.tp_backward_s for cost in costs),
        gather_forward=sum(forward for forward, _ in exposed),
        gather_backward=sum(backward for _, backward in exposed),
        gradient_sync=0.0,
        optimizer=slowest
        * cost_model.execution.optimizer_passes
        * cost_model.speeds.pass_seconds(states.optimizer_traffic),
        weight=slowest * sum(map(weight_s, costs, passes)),
    )
    experts = [cost.held(by_expert=True) for cost in costs]
    expert_bytes, expert_numel = (sum(values) for values in zip(*experts))
    width = cost_model.execution.reduced_bytes_per_parameter
    width = gradient_bytes(1.0, dtype, zero) if width is None else width
    moved = (
        (dp_span(mesh), width * (trainable_numel - expert_numel), states.weights - expert_bytes),
        (expert_span(mesh), width * expert_numel, expert_bytes),
    )
    return replace(seconds, gradient_sync=_gradient_sync_s(moved, seconds, cost_model, mesh, zero))


def partial_sync_s(
    held: Sequence[ParameterUse], cost_model: CostModel, mesh: Mesh, zero: int, dtype: str
) -> float:
    """Gradients that each tp rank has of its own tokens: one all-reduce a step of what a rank holds."""
    numel = sum(use.numel for use in held if use.trainable and "tp" in use.summed_over)
    if not numel or mesh.tp == 1:
        return 0.0
    moved = gradient_bytes(numel / (mesh.replicas if zero >= 2 else 1), dtype, zero)
    return cost_model.collective_s("all_reduce", moved, Span(mesh.tp, 1))


def _gradient_sync_s(
    moved: Sequence[tuple[Span, float, float]],
    seconds: StageSeconds,
    cost_model: CostModel,
    mesh: Mesh,
    zero: int,
) -> float:
    """ZeRO 0: all-reduce; 1, 2: reduce-scatter, and all-gather of the new weights; 3: nothing left.

    ``moved`` are the ranks with copies, and the bytes of gradients and weights, of dense parameters and of
    experts.
    Where the program overlaps them, with one micro-batch's backward and forward, what shows is the rest and
    the slowdown; this runtime starts them after the last backward, so all of it shows.
    """
    if zero == 3 or mesh.replicas == 1:
        return 0.0
    kind = "all_reduce" if zero == 0 else "reduce_scatter"
    reduce = sum(cost_model.collective_s(kind, gradients, span) for span, gradients, _ in moved)
    gather = sum(cost_model.collective_s("all_gather", weights, span) for span, _, weights in moved if zero)
    if not cost_model.execution.overlaps_gradients:
        return reduce + gather
    return overlap_adds_s(seconds.backward, reduce) + overlap_adds_s(seconds.forward, gather)
