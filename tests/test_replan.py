"""New plans for a script's own framework: flags to change, which applied give the plan and nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autoplan.cli import main
from autoplan.importing.replan import PLANNED, Replan, replan_flags
from autoplan.importing.rules import findings, layers_of
from autoplan.importing.settings import Settings, read_settings
from autoplan.plan import Mesh, Part, Plan, Prediction, RegionPlan, Stage
from autoplan.planner.top import sturdiest
from tests.plan_fixture import llama_plan
from tests.test_export import recomputing, with_part

MODEL = """    --num-layers 32
    --hidden-size 256
    --ffn-hidden-size 512
    --num-attention-heads 8
    --group-query-attention
    --num-query-groups 8
    --swiglu
    --seq-length 128
    --vocab-size 1024"""
MEGATRON = f"""#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NNODES=1
ARGS=(
{MODEL}
    --tensor-model-parallel-size 4
    --pipeline-model-parallel-size 2
    --sequence-parallel
    --recompute-granularity full  # or it runs out of memory
    --recompute-method block
    --recompute-num-layers 16
    --use-distributed-optimizer
    --overlap-grad-reduce
    --micro-batch-size 1
    --global-batch-size 64
    --lr 3e-4
    --bf16
)
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES pretrain_gpt.py ${{ARGS[@]}} --save out
"""
LOONGFORGE = f"""GPUS_PER_NODE=8
NNODES=1
MODEL_PARALLEL_ARGS=(
{MODEL}
    --tensor-model-parallel-size 2
    --pipeline-model-parallel-size 4
    --custom-pipeline-layers 8,8,8,8
    --recompute-granularity full
    --recompute-method block
    --custom-pipeline-recompute-layers 8,4,2,1
    --use-precision-aware-optimizer
    --optimizer-cpu-offload
    --micro-batch-size 1
    --global-batch-size 64
    --bf16
)
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES loongforge/train.py ${{MODEL_PARALLEL_ARGS[@]}}
"""
SCRIPTS = {"megatron": MEGATRON, "loongforge": LOONGFORGE}


def plans() -> dict[str, Plan]:
    """Of 8 devices and 32 blocks, each with something that a script must say or unsay."""
    base = recomputing(llama_plan(stages=2, tp=2, dp=2), lambda _: "none")
    full = recomputing(llama_plan(stages=4, tp=2, dp=1), lambda i: "full" if i % 8 < 3 else "none")
    uneven = replace(base.parts[0], stages=_moved(base.parts[0].stages))
    fsdp = recomputing(llama_plan(stages=1, tp=1, dp=8), lambda _: "none")
    return {
        "less": with_part(base, zero=1),
        "recompute": full,
        "uneven": replace(base, parts=(uneven,)),
        "fsdp": with_part(fsdp, zero=3),
        "groups": with_part(fsdp, zero=1, zero_shard=4),
        "interleaved": with_part(full, mesh=Mesh(pp=2, dp=2, tp=2), vpp=2, schedule="interleaved_1f1b"),
    }


def _moved(stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    """One block more in the second stage."""
    first, second = stages
    moved: RegionPlan = first.regions[-1]
    return Stage(first.regions[:-1]), Stage((moved, *second.regions))


def applied(script: str, replan: Replan) -> str:
    """The script with the diff pasted: lines that go are deleted where the diff says they stand."""
    gone = {change.line for change in replan.changes if change.before is not None}
    assert 0 not in gone, replan.changes
    kept = [line for i, line in enumerate(script.splitlines(), 1) if i not in gone]
    kept += [f"{kept.pop()} {replan.paste}"]
    for name, value in replan.environment.items():
        kept = [line for line in kept if name not in line]
        kept.insert(1, f"export {name}={value}" if value is not None else "")
    return "\n".join(kept)


@pytest.mark.parametrize("framework", SCRIPTS)
@pytest.mark.parametrize("name", plans())
def test_a_diff_of_flags_makes_the_script_run_the_plan(framework: str, name: str, tmp_path: Path) -> None:
    """Applied to the script, the framework reads the plan, finds nothing illegal, and all else as it was."""
    plan, path = plans()[name], tmp_path / "launch.sh"
    path.write_text(SCRIPTS[framework])
    before = read_settings(path, framework)
    replan = replan_flags(before, plan, SCRIPTS[framework])
    path.write_text(applied(SCRIPTS[framework], replan))
    after = read_settings(path, framework)
    part = plan.parts[0]
    assert _degrees(after) == (part.mesh.tp, part.mesh.pp, part.vpp, part.micro_batch, part.zero)
    if part.mesh.pp > 1:
        held = [sum("layers" in region.region for region in stage.regions) for stage in part.stages]
        assert list(layers_of(after)) == held
    recomputed = any(region.recompute == "full" for stage in part.stages for region in stage.regions)
    assert after.recompute == ("full" if recomputed else "none")
    assert [one for one in findings(after) if one.severity == "error"] == []
    others = {flag: said for flag, said in before.said.items() if not _planned(flag)}
    assert others.items() <= after.said.items()
    assert not replan_flags(after, plan, path.read_text()).changes, "applied twice it changes nothing more"


def _degrees(settings: Settings) -> tuple[int, ...]:
    return settings.tp, settings.pp, settings.vpp, settings.micro_batch, settings.zero


def _planned(flag: str) -> bool:
    return flag in PLANNED or "model-parallel-size" in flag or flag == "--micro-batch-size"


def test_layers_placed_the_same_in_the_scripts_own_way_stay(tmp_path: Path) -> None:
    """A user's even or custom split must not be rewritten into a layout string that says the same."""
    path = tmp_path / "launch.sh"
    path.write_text(LOONGFORGE)
    replan = replan_flags(read_settings(path, "loongforge"), plans()["recompute"], LOONGFORGE)
    assert [change.rows for change in replan.changes] == [
        ("- --custom-pipeline-recompute-layers 8,4,2,1", "+ --custom-pipeline-recompute-layers 3,3,3,3")
    ]


def test_the_command_searches_for_the_scripts_framework(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole way: script, model from its sizes, plans for Megatron-LM, flags with their price."""
    path = tmp_path / "launch.sh"
    path.write_text(MEGATRON.replace("--num-layers 32", "--num-layers 4").replace("layers 16", "layers 2"))
    arguments = ["import", str(path), "--from", "megatron", "--hw", "h100", "--replan", "--top", "2"]
    assert main([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["replans"]) == 2 and min(one["relative"] for one in told["replans"]) < 0
    flags = {change["flag"] for one in told["replans"] for change in one["changes"]}
    assert "--recompute-granularity" in flags and not flags & {"--lr", "--global-batch-size", "--bf16"}


def test_the_sturdiest_plan_loses_least_where_a_price_is_off() -> None:
    """Of plans that the prices cannot tell apart: little of what is uncertain, and room for memory."""
    base = llama_plan()

    def plan(step_s: float, bubble_s: float, spare: float) -> Plan:
        told = Prediction(step_s, 1.0, 0.4, 1.0, {"compute": step_s - bubble_s, "bubble": bubble_s})
        part: Part = base.parts[0]
        stages = tuple(
            replace(stage, prediction=replace(stage.prediction, memory_peak_bytes=(1 - spare) * 100.0))
            for stage in part.stages
            if stage.prediction is not None
        )
        limited = tuple(
            replace(s, prediction=replace(s.prediction, memory_limit_bytes=100.0))
            for s in stages
            if s.prediction
        )
        return replace(base, parts=(replace(part, stages=limited),), prediction=told)

    tight, steady, bubbly = plan(1.0, 0.1, 0.01), plan(1.01, 0.1, 0.5), plan(1.02, 0.5, 0.5)
    found = sturdiest((tight, steady, bubbly), 0.05, 3)
    assert [one.plan for one in found] == [steady, bubbly, tight]
    assert found[0].regret < found[1].regret and found[2].spare < 0.05
    assert tight in [one.plan for one in sturdiest((tight, steady, bubbly), 0.05, 2)], "the proved one stays"
