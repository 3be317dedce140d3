"""A plan in, Megatron-LM's arguments out, or those of LoongForge, which adds its own to Megatron's.

Argument names are those of ``megatron/training/arguments.py``; the rules kept here are the checks of
``megatron.core.transformer.TransformerConfig`` and ``PipelineParallelLayerLayout``, and for LoongForge
those of its v0.2.0 ``validators.py``: a layout string excludes the other ways to place layers, sequence
parallelism needs tp above 1, per-stage counts need a comma.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autoplan.plan import Part, Plan
from autoplan.targets import Target, target_named
from autoplan_codegen.exports.blocks import (
    Blocks,
    StageBlocks,
    block_losses,
    context_kind,
    find_blocks,
    is_sequence_parallel,
    recompute_pins,
    stand_ins,
)
from autoplan_codegen.exports.outcome import Lost, Outcome, Setting

# What it runs instead of what it cannot: field -> (words, pins).
INSTEAD: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "schedule": ("1f1b", {"schedule": "1f1b"}),
    "zero": ("the distributed optimizer (ZeRO 1)", {"zero": 1}),
    "zero_shard": ("one group of all replicas", {"zero_shard": None}),
    "sp": ("with sequence parallelism", {"sp": 1}),
}


def megatron_files(plan: Plan, part: Part, environment: Mapping[str, str]) -> Outcome:
    """``megatron.sh``: the environment and ``MEGATRON_ARGS``, to append to a launch line."""
    return _outcome(plan, part, environment, target_named("megatron"))


def loongforge_files(plan: Plan, part: Part, environment: Mapping[str, str]) -> Outcome:
    """``loongforge.sh``: Megatron's arguments and LoongForge's, which recompute other counts per stage."""
    return _outcome(plan, part, environment, target_named("loongforge"))


def _outcome(plan: Plan, part: Part, environment: Mapping[str, str], target: Target) -> Outcome:
    blocks = find_blocks(part)
    lost, runs_as = stand_ins(target, plan, INSTEAD)
    lost += block_losses(target, plan, blocks)
    settings = [*_degrees(plan, part, target, runs_as), *_batch(plan, part), *_precision(plan)]
    settings += _pipeline(part, blocks, lost)
    settings += _data_parallel(replace(part, zero=1) if "zero" in runs_as else part, runs_as)
    per_stage = target.recomputed_blocks == "stage_first" and part.vpp == 1
    recompute, full = _recompute(part, blocks, lost, per_stage=per_stage)
    settings += recompute
    pins = recompute_pins(part, full) if full is not None else ()
    variables = {**environment, **_connections(part)}
    text = _script(plan, target.name, variables, settings, lost)
    return Outcome({f"{target.name}.sh": text}, tuple(settings), tuple(lost), runs_as, pins)


def _degrees(plan: Plan, part: Part, target: Target, runs_as: Mapping[str, object]) -> list[Setting]:
    mesh = part.mesh
    found = [
        Setting("--tensor-model-parallel-size", str(mesh.tp)),
        Setting("--pipeline-model-parallel-size", str(mesh.pp)),
    ]
    if is_sequence_parallel(plan) or runs_as.get("sp"):
        found.append(Setting("--sequence-parallel", ""))
    if mesh.cp > 1:
        kind = target.cp[context_kind(plan)]
        found += [Setting("--context-parallel-size", str(mesh.cp)), Setting("--cp-comm-type", kind)]
    if mesh.ep > 1:
        found += [
            Setting("--expert-model-parallel-size", str(mesh.ep)),
            Setting("--expert-tensor-parallel-size", str(mesh.tp)),
            Setting("--moe-token-dispatcher-type", "alltoall"),
            Setting("--moe-grouped-gemm", ""),
        ]
    return found


def _batch(plan: Plan, part: Part) -> list[Setting]:
    found = [
        Setting("--micro-batch-size", str(part.micro_batch)),
        Setting("--global-batch-size", str(plan.workload.global_batch), "convergence"),
    ]
    sequence = plan.workload.sizes.get("sequence")
    return [*found, *([Setting("--seq-length", str(sequence), "convergence")] if sequence else [])]


def _precision(plan: Plan) -> list[Setting]:
    flags = {"bf16": "--bf16", "fp16": "--fp16"}
    flag = flags.get(plan.workload.dtype)
    return [Setting(flag, "", "convergence")] if flag else []


def _pipeline(part: Part, blocks: Blocks, lost: list[Lost]) -> list[Setting]:
    """The layout string ``Et*15|t*16|t*15L``; none where one stage holds everything."""
    if part.mesh.pp == 1:
        return []
    if blocks.others:
        names = ", ".join([blocks.container, *blocks.others])
        lost.append(
            Lost("stages", f"cuts through several lists of blocks ({names})", "Megatron-LM's even split")
        )
        return []
    return [Setting("--pipeline-model-parallel-layout", layout_string(blocks.stages))]


def layout_string(stages: Sequence[StageBlocks]) -> str:
    """Megatron's text for where layers go: E the embedding, t a layer, L the loss, one part a stage."""
    return "|".join(_stage_text(stage) for stage in stages)


def _stage_text(stage: StageBlocks) -> str:
    layers = {0: "", 1: "t"}.get(stage.blocks, f"t*{stage.blocks}")
    return f"{'E' if stage.embedding else ''}{layers}{'L' if stage.loss else ''}"


def _data_parallel(part: Part, runs_as: Mapping[str, object]) -> list[Setting]:
    zero, mesh = part.zero, part.mesh
    if mesh.replicas == 1 or zero == 0:
        return []
    groups = mesh.replicas // part.zero_shard if part.zero_shard and "zero_shard" not in runs_as else 1
    instances = [Setting("--num-distributed-optimizer-instances", str(groups))] if groups > 1 else []
    if zero == 1:
        overlap = [Setting("--overlap-grad-reduce", ""), Setting("--overlap-param-gather", "")]
        return [Setting("--use-distributed-optimizer", ""), *overlap, *instances]
    strategy = {2: "optim_grads", 3: "optim_grads_params"}[zero]
    return [
        Setting("--use-distributed-optimizer", ""),
        Setting("--use-megatron-fsdp", ""),
        Setting("--data-parallel-sharding-strategy", strategy),
        Setting("--no-gradient-accumulation-fusion", ""),
        Setting("--ckpt-format", "fsdp_dtensor"),
        *instances,
    ]


def _recompute(
    part: Part, blocks: Blocks, lost: list[Lost], *, per_stage: bool
) -> tuple[list[Setting], list[int] | None]:
    """Settings, and how many blocks of each stage the target then recomputes whole (None: as planned)."""
    kind = blocks.recompute
    if kind == "none":
        return [], None
    if kind == "selective":
        lost.append(
            Lost(
                "recompute selective",
                "everything but products and attention is recomputed",
                "Megatron-LM's selective recompute of norms and the MLP's activation",
            )
        )
        modules = "layernorm moe_act" if part.mesh.ep > 1 else "layernorm mlp"
        names = [Setting("--recompute-granularity", "selective"), Setting("--recompute-modules", modules)]
        return names, None
    counts = [stage.full + stage.selective for stage in blocks.stages]
    if any(stage.selective for stage in blocks.stages) and any(stage.full for stage in blocks.stages):
        lost.append(Lost("recompute", "full and selective side by side", "full for both"))
    elif any(stage.selective for stage in blocks.stages):
        lost.append(Lost("recompute", "selective for some blocks", "full for those blocks"))
    if not all(stage.full_first for stage in blocks.stages):
        lost.append(Lost("recompute", "blocks in any order", "the first blocks of each stage"))
    names = [Setting("--recompute-granularity", "full"), Setting("--recompute-method", "block")]
    if per_stage and len(counts) > 1:
        shown = ",".join(map(str, counts))
        return [*names, Setting("--custom-pipeline-recompute-layers", shown)], counts
    if len(set(counts)) > 1:
        planned = f"{', '.join(map(str, counts))} blocks recomputed by stage"
        lost.append(Lost("recompute", planned, f"{max(counts)} in every stage (the same in all)"))
    most = [min(max(counts), stage.blocks) for stage in blocks.stages]
    return [*names, Setting("--recompute-num-layers", str(max(counts)))], most


def _connections(part: Part) -> dict[str, str]:
    """Megatron needs one hardware queue where tp or cp overlaps with compute, and more under FSDP."""
    fsdp = part.zero > 1 and part.mesh.pp == 1
    return {} if fsdp or part.mesh.tp * part.mesh.cp == 1 else {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def _script(
    plan: Plan, target: str, variables: Mapping[str, str], settings: Sequence[Setting], lost: Sequence[Lost]
) -> str:
    """A shell file to ``source``: comments, environment, one array of arguments."""
    mesh, array = plan.parts[0].mesh, f"{target.upper()}_ARGS"
    head = [
        f"# {plan.model.name} on {plan.workload.devices} x {plan.hardware}: {mesh}. Written by autoplan.",
        f'# Use: source {target}.sh, then append "${{{array}[@]}}" to your own launch line; it holds the',
        "# parallel settings alone, your script keeps the model's and the data's.",
        *(f"# Not expressible: {item.field}: {item.planned}; instead: {item.instead}." for item in lost),
    ]
    exports = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    rows = [f"    {item.name}{f' {_quoted(item)}' if item.value else ''}" for item in settings]
    return "\n".join([*head, *exports, f"{array}=(", *rows, ")"]) + "\n"


def _quoted(item: Setting) -> str:
    several = item.name == "--recompute-modules"
    return item.value if several else shlex.quote(item.value)
