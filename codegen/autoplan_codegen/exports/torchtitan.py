"""A plan in, a torchtitan config registry out: a Python module with one function that returns the config.

torchtitan 0.3 reads its settings from Python (``--module M --config F``), so what is written wraps one of
its own configs, which keeps the model and the data, and sets training, parallelism and recompute.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from autoplan.plan import Part, Plan
from autoplan.targets import target_named
from autoplan_codegen.exports.blocks import (
    Blocks,
    block_losses,
    find_blocks,
    is_sequence_parallel,
    recompute_pins,
    stand_ins,
)
from autoplan_codegen.exports.outcome import Lost, Outcome, Setting

# What it runs instead of what it cannot: field -> (words, pins).
INSTEAD: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "zero": ("FSDP2 that keeps gathered weights (ZeRO 2)", {"zero": 2}),
    "schedule": ("1F1B", {"schedule": "1f1b"}),
    "vpp": ("1F1B of one stage a rank", {"schedule": "1f1b", "vpp": 1}),
    "cp": ("keys and values of all ranks", {"cp_kind": "ring"}),
}
WRAPPERS = {"full": "FullAC", "selective": "SelectiveAC"}


def torchtitan_files(plan: Plan, part: Part, environment: Mapping[str, str]) -> Outcome:
    """``autoplan_torchtitan.py``: give it ``BASE``, a function of torchtitan's own registry."""
    blocks = find_blocks(part)
    target = target_named("torchtitan")
    lost, runs_as = stand_ins(target, plan, INSTEAD)
    lost += block_losses(target, plan, blocks)
    training = _training(plan, part)
    schedule = target.schedules[str(runs_as.get("schedule", part.schedule))]
    parallelism = {**_degrees(plan, part), **_pipeline(part, blocks, lost, schedule)}
    recompute, full = _recompute(blocks, lost)
    settings = [
        *(
            Setting(f"training.{name}", str(value), "convergence" if name in CONVERGENCE else "execution")
            for name, value in training.items()
        ),
        *(Setting(f"parallelism.{name}", str(value)) for name, value in parallelism.items()),
        Setting("activation_checkpoint", recompute or "None"),
    ]
    stages = _stages_text(blocks) if part.mesh.pp > 1 and not blocks.others else ""
    settings += [Setting("parallelism.module_fqns_per_model_part", stages)] if stages else []
    tables = {"TRAINING": _dict_text(training), "PARALLELISM": _dict_text(parallelism)}
    text = _module(plan, tables, stages, recompute, lost, environment)
    pins = recompute_pins(part, full) if full is not None else ()
    return Outcome({"autoplan_torchtitan.py": text}, tuple(settings), tuple(lost), runs_as, pins)


CONVERGENCE = {"global_batch_size", "seq_len", "mixed_precision_param"}


def _training(plan: Plan, part: Part) -> dict[str, object]:
    """A pipeline cuts the local batch into micro-batches itself; without one they are accumulated."""
    local = part.micro_batch * (part.microbatches if part.mesh.pp > 1 else 1)
    found: dict[str, object] = {"local_batch_size": local, "global_batch_size": plan.workload.global_batch}
    if "sequence" in plan.workload.sizes:
        found["seq_len"] = plan.workload.sizes["sequence"]
    found["mixed_precision_param"] = "bfloat16" if plan.workload.dtype == "bf16" else "float32"
    return found


def _degrees(plan: Plan, part: Part) -> dict[str, object]:
    """FSDP2 shards over cp by itself, so groups are counted without it."""
    mesh = part.mesh
    shard = max(1, (part.zero_shard or mesh.replicas) // mesh.cp) if part.zero else 1
    found: dict[str, object] = {
        "data_parallel_replicate_degree": mesh.dp // shard,
        "data_parallel_shard_degree": shard,
        "fsdp_reshard_after_forward": "always" if part.zero == 3 else "never",
        "tensor_parallel_degree": mesh.tp,
        "pipeline_parallel_degree": mesh.pp,
        "context_parallel_degree": mesh.cp,
        "expert_parallel_degree": mesh.ep,
    }
    if mesh.tp > 1:
        found["enable_sequence_parallel"] = is_sequence_parallel(plan)
    return found


def _pipeline(part: Part, blocks: Blocks, lost: list[Lost], schedule: str) -> dict[str, object]:
    if part.mesh.pp == 1:
        return {}
    found: dict[str, object] = {
        "pipeline_parallel_schedule": schedule,
        "pipeline_parallel_microbatch_size": part.micro_batch,
    }
    if blocks.others:
        names = ", ".join([blocks.container, *blocks.others])
        lost.append(Lost("stages", f"cuts through several lists of blocks ({names})", "an even split"))
        return found
    return found


def _stages_text(blocks: Blocks) -> str:
    """Module names of every stage, as torchtitan's decoders have them, as Python."""
    rows: list[str] = []
    first = 0
    for stage in blocks.stages:
        names = [
            *(['"tok_embeddings"'] if stage.embedding else []),
            f"*layers({first}, {first + stage.blocks})",
        ]
        names += ['"norm"', '"lm_head"'] if stage.loss else []
        rows.append(f"    [{', '.join(names)}],")
        first += stage.blocks
    return "\n".join(["[", *rows, "]"])


def _recompute(blocks: Blocks, lost: list[Lost]) -> tuple[str, list[int] | None]:
    """The wrapper's name, and the blocks of each stage that are then recomputed whole (None: as planned)."""
    kind = blocks.recompute
    if kind == "selective":
        planned = "all but products and attention"
        lost.append(Lost("recompute selective", planned, "every second product is recomputed too"))
    if kind != "mixed":
        return WRAPPERS.get(kind, ""), None
    some_full = any(stage.full for stage in blocks.stages)
    instead = "full" if some_full else "selective"
    lost.append(Lost("recompute", "other kinds for other blocks", f"{instead} for all"))
    return WRAPPERS[instead], [stage.blocks for stage in blocks.stages] if some_full else None


def _dict_text(values: Mapping[str, object]) -> str:
    texts = {name: json.dumps(value) if isinstance(value, str) else value for name, value in values.items()}
    return "\n".join(["dict(", *(f"    {name}={text}," for name, text in texts.items()), ")"])


def _module(
    plan: Plan,
    tables: Mapping[str, str],
    stages: str,
    recompute: str,
    lost: list[Lost],
    environment: Mapping[str, str],
) -> str:
    mesh = plan.parts[0].mesh
    cut = [
        "",
        "",
        "def layers(first, end):",
        '    return [f"layers.{i}" for i in range(first, end)]',
        "",
        "",
        f"STAGES = {stages}",
    ]
    lines = [
        f'"""{plan.model.name} on {plan.workload.devices} x {plan.hardware}: {mesh}. Written by autoplan.',
        "",
        "Set BASE to the function of torchtitan's registry that describes your model and data, then",
        "torchrun ... -m torchtitan.train --module autoplan_torchtitan --config autoplan",
        *(f"Not expressible: {item.field}: {item.planned}; instead: {item.instead}." for item in lost),
        *(f"Environment: {name}={value}" for name, value in environment.items()),
        '"""',
        "",
        "from dataclasses import replace",
        "",
        *([f"from torchtitan.distributed.activation_checkpoint import {recompute}"] if recompute else []),
        "from torchtitan.models.llama3.config_registry import llama3_debugmodel as BASE",
        "",
        *(f"{name} = {text}" for name, text in tables.items()),
        *(cut if stages else []),
        "",
        "",
        "def autoplan():",
        "    config = BASE()",
        "    config.training = replace(config.training, **TRAINING)",
        "    config.parallelism = replace(config.parallelism, **PARALLELISM)",
        *(["    config.parallelism.module_fqns_per_model_part = STAGES"] if stages else []),
        f"    config.activation_checkpoint = {f'{recompute}.Config()' if recompute else None}",
        "    return config",
    ]
    return "\n".join(lines) + "\n"
