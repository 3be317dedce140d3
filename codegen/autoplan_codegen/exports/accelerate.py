"""A plan in, a launch file for FSDP2 out (``accelerate launch --config_file accelerate.yaml``)."""

from __future__ import annotations

from collections.abc import Mapping

import yaml

from autoplan.plan import Part, Plan
from autoplan_codegen.exports.blocks import find_blocks, recompute_pins
from autoplan_codegen.exports.outcome import Lost, Outcome, Setting

CONVERGENCE = {"mixed_precision"}


def accelerate_files(plan: Plan, part: Part, environment: Mapping[str, str]) -> Outcome:
    """``accelerate.yaml``; the batch is the script's own, so it is said in a comment."""
    lost: list[Lost] = []
    runs_as: dict[str, object] = {}
    config = _config(plan, part, lost, runs_as)
    blocks = find_blocks(part)
    pins: tuple[str, ...] = ()
    if blocks.recompute in ("selective", "mixed"):
        lost.append(Lost("recompute", blocks.recompute, "full for every block"))
    if blocks.recompute != "none":
        pins = recompute_pins(part, [stage.blocks for stage in blocks.stages])
    settings = tuple(
        Setting(name, str(value), "convergence" if name in CONVERGENCE else "execution")
        for name, value in config.items()
    )
    devices = plan.workload.devices
    replicas = devices // part.mesh.tp // part.mesh.cp
    accumulation = max(1, plan.workload.global_batch // (part.micro_batch * replicas))
    head = [
        f"# {plan.model.name} on {devices} x {plan.hardware}: {part.mesh}. Written by autoplan.",
        f"# In your script: batches of {part.micro_batch}, gradient_accumulation_steps={accumulation}.",
        *(f"# Environment: {name}={value}" for name, value in environment.items()),
        *(f"# Not expressible: {item.field}: {item.planned}; instead: {item.instead}." for item in lost),
    ]
    text = "\n".join(head) + "\n" + yaml.safe_dump(config, sort_keys=False)
    return Outcome({"accelerate.yaml": text}, settings, tuple(lost), runs_as, pins)


def _config(plan: Plan, part: Part, lost: list[Lost], runs_as: dict[str, object]) -> dict[str, object]:
    mesh, devices = part.mesh, plan.workload.devices
    for axis in ("pp", "ep"):
        if getattr(mesh, axis) > 1:
            lost.append(Lost(f"mesh.{axis}", str(getattr(mesh, axis)), f"{axis} 1: FSDP2 has none"))
            runs_as[axis] = 1
    dp = devices // (mesh.tp * mesh.cp)
    if mesh.pp > 1:
        runs_as |= {"dp": dp, "schedule": "1f1b", "vpp": 1}
    zero = part.zero
    if zero < 2:
        zero = 2
        lost.append(Lost("zero", f"ZeRO {part.zero}", "FSDP2 that keeps gathered weights (ZeRO 2)"))
        runs_as["zero"] = zero
    shard = min(part.zero_shard or dp, dp)
    blocks = find_blocks(part)
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "mixed_precision": "bf16" if plan.workload.dtype == "bf16" else "no",
        "num_processes": devices,
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": zero == 3,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_activation_checkpointing": blocks.recompute != "none",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_offload_params": False,
        },
        "parallelism_config": {
            "parallelism_config_dp_replicate_size": dp // shard,
            "parallelism_config_dp_shard_size": shard,
            "parallelism_config_tp_size": mesh.tp,
            "parallelism_config_cp_size": mesh.cp,
        },
    }
