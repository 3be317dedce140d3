"""A stage's forecast by cause: seconds of a micro-batch, and bytes that a device sends in a step.

Comes in: a stage's placed regions, its seconds, the mesh. Goes out: mappings from cause or mesh axis to
seconds or bytes; the seconds sum to those that the schedule runs with.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autoplan.plan import Part
from autoplan_cost_models.collectives import sent_bytes
from autoplan_cost_models.stage_memory import PlacedRegion, stage_parameters
from autoplan_cost_models.stage_time import StageSeconds
from autoplan_cost_models.training_state import gradient_bytes
from autoplan_cost_models.zero import ZeroGroups, held_bytes, held_trained, part_groups


def forward_parts_s(regions: Sequence[PlacedRegion], seconds: StageSeconds) -> dict[str, float]:
    """Compute, the axes whose collectives show, and what ZeRO-3 traffic adds."""
    axes = _by_axis((c.axis, c.forward_s) for region in regions for c in region.cost.collectives)
    return _named(seconds.forward_compute, 0.0, axes, seconds.tp_forward, seconds.gather_forward)


def backward_parts_s(regions: Sequence[PlacedRegion], seconds: StageSeconds) -> dict[str, float]:
    """The same of a backward, with the forward that is run again."""
    axes = _by_axis((c.axis, c.backward_s) for region in regions for c in region.cost.collectives)
    again = seconds.recompute
    return _named(seconds.backward_compute, again, axes, seconds.tp_backward, seconds.gather_backward)


def _named(
    compute: float, recompute: float, axes: dict[str, float], on_axes: float, zero: float
) -> dict[str, float]:
    """Only causes that take time; collectives not told by axis count as tp."""
    axes = {**axes, "tp": axes.get("tp", 0.0) + max(0.0, on_axes - sum(axes.values()))}
    parts = {"compute": compute, "recompute": recompute, **axes, "zero": zero}
    return {cause: part_s for cause, part_s in parts.items() if part_s}


def link_bytes(
    regions: Sequence[PlacedRegion], part: Part, dtype: str, received_bytes: float, sent_on_bytes: float
) -> dict[str, float]:
    """What one device sends in a step, by mesh axis; ``received_bytes`` and ``sent_on_bytes`` are the
    boundary tensors of a micro-batch before and after the stage (gradients go back the other way)."""
    inside = _by_axis(
        (c.axis, c.forward_bytes + c.backward_bytes + (c.again_bytes if r.recompute == "full" else 0.0))
        for r in regions
        for c in r.cost.collectives
    )
    per_step = {axis: part.microbatches * amount for axis, amount in inside.items()}
    per_step["dp"] = _replica_bytes(regions, part, dtype)
    per_step["pp"] = part.microbatches * (received_bytes + sent_on_bytes)
    return {axis: amount for axis, amount in per_step.items() if amount}


def _replica_bytes(regions: Sequence[PlacedRegion], part: Part, dtype: str) -> float:
    """Gradients between replicas, and with ZeRO the weights too: see ``zero`` for when."""
    uses, groups = stage_parameters(regions), part_groups(part)
    gradients = held_trained(uses) * gradient_bytes(1, dtype)
    weights = held_bytes(uses, trained=groups.zero < 2)
    m = part.microbatches
    experts = _copies_bytes(groups.of_experts, gradients.experts, weights.experts, m)
    return _copies_bytes(groups, gradients.dense, weights.dense, m) + experts


def _copies_bytes(groups: ZeroGroups, gradients: float, weights: float, microbatches: int) -> float:
    """The same for parameters with one group of copies."""
    if groups.zero == 0:
        return sent_bytes("all_reduce", gradients, groups.replicas)
    reduced = sent_bytes("reduce_scatter", gradients, groups.shards)
    across = sent_bytes("all_reduce", gradients / groups.shards, groups.across.size)
    gathered = sent_bytes("all_gather", weights, groups.shards)
    gathers = 2 * microbatches if groups.zero == 3 else 1
    return across + gathers * gathered + (microbatches if groups.zero > 1 else 1) * reduced


def _by_axis(amounts: Iterable[tuple[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for axis, amount in amounts:
        total[axis] = total.get(axis, 0.0) + amount
    return total
