"""Exports: what each framework is told, read back by the framework's own code where it is installed."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from autoplan.cli import main
from autoplan.errors import BadInputError
from autoplan.plan import Mesh, Part, Plan, Stage
from autoplan.planner.space import parse_pins
from autoplan_codegen.exports.export import TARGETS, Export, export_plan
from tests.plan_fixture import llama_plan


def with_part(plan: Plan, **changes: Any) -> Plan:
    return replace(plan, parts=(replace(plan.parts[0], **changes),))


def recomputing(plan: Plan, kind: Callable[[int], str]) -> Plan:
    """The plan whose block i runs with recompute ``kind(i)``."""
    count = iter(range(10**6))

    def stage(one: Stage) -> Stage:
        entries = [
            replace(e, recompute=kind(next(count))) if "layers" in e.region else e for e in one.regions
        ]
        return replace(one, regions=tuple(entries))

    return with_part(plan, stages=tuple(stage(one) for one in plan.parts[0].stages))


def sequence_parallel(plan: Plan) -> Plan:
    def cut(layout: Any) -> Any:
        tp = layout.on("tp")
        return layout.replace_axis("tp", replace(tp, inputs={"x_0": "S(1)"}, outputs={"0": "S(1)"}))

    return replace(plan, layouts={name: cut(layout) for name, layout in plan.layouts.items()})


PLAIN = recomputing(llama_plan(stages=4), lambda _: "none")
FULL = recomputing(llama_plan(stages=2), lambda _: "full")
UNEVEN = recomputing(llama_plan(stages=2), lambda i: "full" if i < 3 or i in (16, 17) else "none")
FSDP = with_part(recomputing(llama_plan(stages=1, tp=1, dp=64), lambda _: "full"), zero=3)
PLANS = {
    "pp4": PLAIN,
    "full": FULL,
    "uneven": UNEVEN,
    "mixed": llama_plan(),
    "sp": sequence_parallel(PLAIN),
    "fsdp": FSDP,
    "hsdp": with_part(FSDP, zero_shard=8),
    "interleaved": with_part(PLAIN, mesh=Mesh(pp=2, dp=8, tp=8), vpp=2, schedule="interleaved_1f1b"),
    "zero1": with_part(PLAIN, zero=1),
    "cp": with_part(PLAIN, mesh=Mesh(pp=4, dp=2, cp=2, tp=8)),
    "ep": with_part(PLAIN, mesh=Mesh(pp=4, dp=4, tp=8, ep=4)),
}


@pytest.fixture(params=PLANS)
def plan(request: pytest.FixtureRequest) -> Plan:
    return PLANS[request.param]


LAYOUT = "Et*8|t*8|t*8|t*8L"
GLOBAL_BATCH = ("--global-batch-size", "train_batch_size", "global_batch_size")


def flags(export: Export) -> dict[str, str]:
    return {item.name: item.value for item in export.settings}


@pytest.mark.parametrize("target", TARGETS)
def test_every_setting_is_marked_and_every_loss_is_priced_by_pins(plan: Plan, target: str) -> None:
    """The batch and the precision change what is learned; pins must be ones that the search accepts."""
    export = export_plan(plan, target)
    convergence = {item.name for item in export.settings if item.changes == "convergence"}
    assert all(any(word in name for word in ("batch", "seq", "bf16", "precision")) for name in convergence)
    batches = {item.value for item in export.settings if item.name.rpartition(".")[2] in GLOBAL_BATCH}
    assert batches <= {str(plan.workload.global_batch)}, "a batch that nobody asked for"
    parse_pins(export.pins)
    degrees = dict(pin.split("=") for pin in export.pins if ":" not in pin)
    product = 1
    for axis in ("pp", "dp", "cp", "tp"):
        product *= int(degrees[axis])
    assert product == plan.workload.devices


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "pp4",
            {"--pipeline-model-parallel-layout": "Et*8|t*8|t*8|t*8L", "--tensor-model-parallel-size": "8"},
        ),
        ("interleaved", {"--pipeline-model-parallel-layout": "Et*8|t*8|t*8|t*8L"}),
        ("full", {"--recompute-granularity": "full", "--recompute-num-layers": "16"}),
        ("uneven", {"--recompute-num-layers": "3"}),
        ("sp", {"--sequence-parallel": ""}),
        ("fsdp", {"--data-parallel-sharding-strategy": "optim_grads_params"}),
        ("hsdp", {"--num-distributed-optimizer-instances": "8"}),
        ("zero1", {"--use-distributed-optimizer": "", "--overlap-grad-reduce": ""}),
        ("cp", {"--context-parallel-size": "2", "--cp-comm-type": "a2a"}),
        ("ep", {"--expert-model-parallel-size": "4", "--expert-tensor-parallel-size": "8"}),
    ],
)
def test_megatron_is_told_what_the_plan_says(name: str, expected: dict[str, str]) -> None:
    found = flags(export_plan(PLANS[name], "megatron"))
    assert {flag: found.get(flag) for flag in expected} == expected


def test_loongforge_keeps_counts_per_stage_and_megatron_says_that_it_cannot() -> None:
    """Megatron-LM has one count for all stages: the larger one keeps every stage inside its memory."""
    assert flags(export_plan(UNEVEN, "loongforge"))["--custom-pipeline-recompute-layers"] == "3,2"
    lost = export_plan(UNEVEN, "megatron").lost
    assert [item.field for item in lost] == ["recompute"] and "3, 2" in lost[0].planned
    assert "model.layers.0-2:recompute=full" in export_plan(UNEVEN, "megatron").pins


def test_what_a_target_lacks_is_said_and_stood_in_for() -> None:
    zero_bubble = with_part(PLAIN, schedule="zb_h1")
    assert [item.field for item in export_plan(zero_bubble, "megatron").lost] == ["schedule"]
    assert "schedule=1f1b" in export_plan(zero_bubble, "megatron").pins
    assert [item.field for item in export_plan(zero_bubble, "torchtitan").lost] == ["vpp"]
    looped = with_part(zero_bubble, mesh=Mesh(pp=2, dp=8, tp=8), vpp=2)
    assert export_plan(looped, "torchtitan").faithful
    fields = {item.field for item in export_plan(PLAIN, "accelerate").lost}
    assert fields == {"mesh.pp", "zero"}
    assert "dp=8" in export_plan(with_part(FSDP, mesh=Mesh(dp=8, tp=8)), "accelerate").pins


def test_the_chip_environment_is_part_of_the_export() -> None:
    """A Kunlun run without its matrix switch is half as fast, so the script must set it."""
    text = export_plan(PLAIN, "loongforge", {"XMLIR_MATMUL_FAST_MODE": "1"}).files["loongforge.sh"]
    assert "export XMLIR_MATMUL_FAST_MODE=1" in text


def test_unknown_targets_and_plans_of_parts_are_refused() -> None:
    with pytest.raises(BadInputError, match="expected one of megatron"):
        export_plan(PLAIN, "megaton")
    part: Part = PLAIN.parts[0]
    with pytest.raises(BadInputError, match="one part"):
        export_plan(replace(PLAIN, parts=(part, part)), "megatron")


def test_the_command_writes_files_and_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    PLAIN.save(tmp_path / "plan.yaml")
    arguments = ["export", str(tmp_path / "plan.yaml"), "--to", "accelerate", "-o", str(tmp_path / "out")]
    assert main([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["files"] == [str(tmp_path / "out" / "accelerate.yaml")]
    assert {item["field"] for item in told["lost"]} == {"mesh.pp", "zero"}
    assert told["priced"]["step_time_s"] is None and told["priced"]["why"]
    assert main([*arguments, "--no-price"]) == 0
    assert "cannot express" in capsys.readouterr().out
    assert main([*arguments[:3], "megaton"]) == 2


# ---- read back by the frameworks ---------------------------------------------------------------------


def shell_array(text: str, name: str) -> list[str]:
    script = f'{text}\nprintf "%s\\n" "${{{name}[@]}}"'
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )


def test_shell_arrays_hold_one_argument_a_word(plan: Plan) -> None:
    """An unquoted layout string would be a pipe to the shell."""
    for target in ("megatron", "loongforge"):
        export = export_plan(plan, target)
        words = shell_array(export.files[f"{target}.sh"], f"{target.upper()}_ARGS")
        assert words[:-1] == [
            word for item in export.settings for word in (item.name, *item.value.split()) if word
        ]


@pytest.mark.parametrize("name", ["pp4", "full", "uneven", "interleaved", "sp"])
def test_megatron_core_accepts_the_layout(name: str) -> None:
    layouts = pytest.importorskip(
        "megatron.core.transformer.pipeline_parallel_layer_layout", reason="megatron-core is not installed"
    )
    export = export_plan(PLANS[name], "megatron")
    text = flags(export)["--pipeline-model-parallel-layout"]
    layout = layouts.PipelineParallelLayerLayout(text, PLANS[name].parts[0].mesh.pp)
    layout.validate_layer_layout(32, None)
    assert layout.virtual_pipeline_model_parallel_size == PLANS[name].parts[0].vpp


def test_accelerate_loads_its_file(plan: Plan, tmp_path: Path) -> None:
    config = pytest.importorskip(
        "accelerate.commands.config.config_args", reason="accelerate is not installed"
    )
    path = tmp_path / "accelerate.yaml"
    path.write_text(export_plan(plan, "accelerate").files["accelerate.yaml"])
    loaded = config.load_config_from_file(str(path))
    sizes = loaded.parallelism_config
    product = 1
    for axis in ("dp_replicate", "dp_shard", "tp", "cp"):
        product *= sizes[f"parallelism_config_{axis}_size"]
    assert product == loaded.num_processes == plan.workload.devices
    assert yaml.safe_load(path.read_text())["fsdp_config"]["fsdp_version"] == 2


def test_deepspeed_accepts_its_sections(plan: Plan) -> None:
    config = json.loads(export_plan(plan, "deepspeed").files["deepspeed.json"])
    replicas = plan.workload.devices // config.get("tensor_parallel", {}).get("autotp_size", 1)
    steps = config["gradient_accumulation_steps"]
    assert config["train_batch_size"] == config["train_micro_batch_size_per_gpu"] * steps * replicas
    zero = pytest.importorskip("deepspeed.runtime.zero.config", reason="deepspeed is not installed")
    assert zero.DeepSpeedZeroConfig(**config["zero_optimization"]).stage == plan.parts[0].zero


def test_torchtitan_runs_its_module(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = export_plan(plan, "torchtitan").files["autoplan_torchtitan.py"]
    compile(text, "autoplan_torchtitan.py", "exec")
    pytest.importorskip("torchtitan.trainer", reason="torchtitan is not installed")
    (tmp_path / "autoplan_torchtitan.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("autoplan_torchtitan", None)
    config = importlib.import_module("autoplan_torchtitan").autoplan()
    mesh, parallelism = plan.parts[0].mesh, config.parallelism
    degrees = (parallelism.tensor_parallel_degree, parallelism.pipeline_parallel_degree)
    assert degrees == (mesh.tp, mesh.pp)
    if mesh.pp > 1:
        layers = [name for stage in parallelism.module_fqns_per_model_part for name in stage]
        assert layers == ["tok_embeddings", *(f"layers.{i}" for i in range(32)), "norm", "lm_head"]
