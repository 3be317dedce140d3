"""A plan in, a DeepSpeed JSON config out."""

from __future__ import annotations

import json
from collections.abc import Mapping

from autoplan.plan import Part, Plan
from autoplan_codegen.exports.blocks import find_blocks, recompute_pins
from autoplan_codegen.exports.outcome import Lost, Outcome, Setting

CONVERGENCE = {"train_batch_size", "bf16", "fp16"}


def deepspeed_files(plan: Plan, part: Part, environment: Mapping[str, str]) -> Outcome:
    """``deepspeed.json`` for ``deepspeed.initialize``; tensor parallelism as its AutoTP trains it."""
    lost: list[Lost] = []
    runs_as: dict[str, object] = {}
    config = _config(plan, part, lost, runs_as)
    blocks = find_blocks(part)
    if blocks.recompute != "none":
        lost.append(
            Lost(
                "recompute",
                blocks.recompute,
                "the model's own switch: model.gradient_checkpointing_enable(), full for every block",
            )
        )
    pins = recompute_pins(part, [s.blocks for s in blocks.stages]) if blocks.recompute != "none" else ()
    settings = tuple(
        Setting(name, json.dumps(value), "convergence" if name in CONVERGENCE else "execution")
        for name, value in config.items()
    )
    text = json.dumps(config, indent=2) + "\n"
    files = {"deepspeed.json": text}
    if environment:
        files["deepspeed.env"] = "".join(f"{name}={value}\n" for name, value in environment.items())
    return Outcome(files, settings, tuple(lost), runs_as, pins)


def _config(plan: Plan, part: Part, lost: list[Lost], runs_as: dict[str, object]) -> dict[str, object]:
    mesh = part.mesh
    for axis in ("pp", "cp", "ep"):
        size = getattr(mesh, axis)
        if size > 1:
            lost.append(Lost(f"mesh.{axis}", str(size), f"{axis} 1: the JSON has no setting for it"))
            runs_as[axis] = 1
    dp = plan.workload.devices // mesh.tp
    if dp != mesh.dp:
        runs_as |= {"dp": dp, "schedule": "1f1b", "vpp": 1}
    accumulation = max(1, plan.workload.global_batch // (part.micro_batch * dp))
    if accumulation * part.micro_batch * dp != plan.workload.global_batch:
        planned = f"global batch {plan.workload.global_batch} as {part.micro_batch} x {part.microbatches}"
        lost.append(Lost("micro_batch", planned, f"a multiple of micro-batch x {dp} data-parallel ranks"))
    zero: dict[str, object] = {"stage": part.zero, "overlap_comm": True, "contiguous_gradients": True}
    if part.zero_shard and part.zero:
        lost.append(Lost("zero_shard", str(part.zero_shard), "all replicas"))
        runs_as["zero_shard"] = None
    return {
        "train_batch_size": accumulation * part.micro_batch * dp,
        "train_micro_batch_size_per_gpu": part.micro_batch,
        "gradient_accumulation_steps": accumulation,
        "bf16": {"enabled": plan.workload.dtype == "bf16"},
        "zero_optimization": zero,
        **({"tensor_parallel": {"autotp_size": mesh.tp}} if mesh.tp > 1 else {}),
    }
