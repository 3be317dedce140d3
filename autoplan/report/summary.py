"""The plan as numbers for programs: a :class:`Plan` in, the JSON object of ``search`` and ``show`` out."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autoplan.plan import Layout, Mesh, Part, Plan, Stage
from autoplan.region_runs import fold_regions
from autoplan.report.fusions import fusions_json
from autoplan.units import GIB
from autoplan.validation.worth import worth_of


def plan_summary_json(plan: Plan, path: str | Path = "") -> dict[str, Any]:
    """Everything a program asks of a plan; ``None`` where the plan carries no forecast.

    Top-level mesh, micro-batch, schedule and stages are those of the part on the most devices.
    ``bytes_per_layer_forward`` are the full message sizes of the most frequent region class's
    collectives for one micro-batch; memory is per device, ``peak_items`` those of the fullest stage.
    """
    part, prediction = largest_part(plan), plan.prediction
    layer = typical_layout(plan)
    return {
        "plan": str(path),
        "model": plan.model.name,
        "hardware": plan.hardware,
        "target": plan.workload.target,
        "devices": plan.workload.devices,
        "global_batch": plan.workload.global_batch,
        "step_time_s": prediction.step_time_s if prediction else None,
        "tokens_per_s": prediction.tokens_per_s if prediction else None,
        "mfu": prediction.mfu if prediction else None,
        "breakdown_s": dict(prediction.breakdown_s) if prediction else {},
        "estimated_inputs": list(prediction.estimated_inputs) if prediction else [],
        "validated": asdict(worth) if (worth := worth_of(plan.hardware)) else None,
        "memory_gib": _memory_gib(plan),
        "mesh": _mesh(part.mesh),
        "parts": [_part(part) for part in plan.parts],
        "micro_batch": part.micro_batch,
        "microbatches": part.microbatches,
        "schedule": part.schedule,
        "zero": part.zero,
        "zero_shard": part.zero_shard,
        "stages": [_stage(stage) for stage in part.stages],
        "collectives_per_layer_forward": dict(layer.collectives_forward) if layer else {},
        "bytes_per_layer_forward": layer.collective_bytes_forward if layer else 0.0,
        "fusions": fusions_json(plan),
        "certificate": _certificate(plan),
        "assumptions": list(plan.assumptions),
        "wall_s": dict(plan.wall_s),
    }


def largest_part(plan: Plan) -> Part:
    """The part on the most devices; of equals the one with the most regions, then the first."""
    return max(plan.parts, key=lambda part: (part.mesh.devices, sum(len(s.regions) for s in part.stages)))


def typical_layout(plan: Plan) -> Layout | None:
    """The layout most regions of the most frequent region class run in: that of "a layer"."""
    used = [
        region.layout
        for part in plan.parts
        for stage in part.stages
        for region in stage.regions
        if region.layout in plan.layouts
    ]
    if not used:
        return None
    classes = Counter(plan.layouts[name].region_class for name in used)
    (region_class, _), *_ = classes.most_common(1)
    layouts = Counter(name for name in used if plan.layouts[name].region_class == region_class)
    return plan.layouts[layouts.most_common(1)[0][0]]


def fullest_stage(plan: Plan) -> Stage | None:
    """The stage with the least room left, of all parts; None where no stage has a forecast."""
    stages = [stage for part in plan.parts for stage in part.stages if stage.prediction is not None]
    return max(stages, key=_fill, default=None)


def _fill(stage: Stage) -> float:
    """Share of the limit that the stage's peak takes."""
    told = stage.prediction
    return told.memory_peak_bytes / told.memory_limit_bytes if told and told.memory_limit_bytes else 0.0


def _memory_gib(plan: Plan) -> dict[str, Any]:
    stage = fullest_stage(plan)
    told = stage.prediction if stage else None
    by_stage = [s.prediction for part in plan.parts for s in part.stages]
    items = sorted(told.memory_items, key=lambda item: -item.bytes) if told else []
    return {
        "limit": told.memory_limit_bytes / GIB if told else None,
        "peak": told.memory_peak_bytes / GIB if told else None,
        "by_stage": [p.memory_peak_bytes / GIB if p else None for p in by_stage],
        "peak_items": [{"name": item.name, "gib": item.bytes / GIB} for item in items],
    }


def _mesh(mesh: Mesh) -> dict[str, int]:
    """All five axes; a plan of this version leaves cp and ep at 1."""
    return {"pp": mesh.pp, "dp": mesh.dp, "tp": mesh.tp, "cp": mesh.cp, "ep": mesh.ep}


def _part(part: Part) -> dict[str, Any]:
    return {
        "name": part.name,
        "mesh": _mesh(part.mesh),
        "micro_batch": part.micro_batch,
        "microbatches": part.microbatches,
        "schedule": part.schedule,
        "zero": part.zero,
        "zero_shard": part.zero_shard,
        "stages": [_stage(stage) for stage in part.stages],
    }


def _stage(stage: Stage) -> dict[str, Any]:
    told = stage.prediction
    recompute = Counter(region.recompute for region in stage.regions)
    return {
        "regions": [run.label for run in fold_regions(stage.regions)],
        "region_count": len(stage.regions),
        "recompute": dict(recompute),
        "forward_s": told.forward_s if told else None,
        "backward_s": told.backward_s if told else None,
        "recompute_s": told.recompute_s if told else None,
        "in_flight": told.in_flight if told else None,
        "sends_bytes": told.sends_bytes if told else None,
        "memory_gib": told.memory_peak_bytes / GIB if told else None,
    }


def _certificate(plan: Plan) -> dict[str, Any] | None:
    proof = plan.certificate
    if proof is None:
        return None
    return {
        "objective_s": proof.objective_s,
        "bound_s": proof.bound_s,
        "gap": proof.gap,
        "meshes_considered": proof.meshes_considered,
        "meshes_solved": proof.meshes_solved,
    }
