"""Launch scripts read back: what the shell would have passed on, what is illegal, what it costs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autoplan.cli import main
from autoplan.errors import BadInputError
from autoplan.importing.report import check_settings, plan_pins
from autoplan.importing.rules import RULES, findings
from autoplan.importing.settings import Settings, flags_of, layout_counts, read_settings
from autoplan.importing.shell import read_script
from autoplan_codegen.exports.export import export_plan
from tests.plan_fixture import llama_plan

SCRIPT = """#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NNODES=${NNODES:-"2"}
TP=4; PP=2
WORLD_SIZE=$((GPUS_PER_NODE*NNODES))
MODEL_ARGS=(
    --num-layers 8
    --hidden-size 256   # a comment
    --num-attention-heads 8
    --group-query-attention --num-query-groups 4
    --seq-length 128
    --vocab-size 1000
)
PARALLEL="--tensor-model-parallel-size ${TP} \\
    --pipeline-model-parallel-size $PP"
if [ "$MODE" = "full" ]; then
  RECOMPUTE="--recompute-granularity full --recompute-method block --recompute-num-layers 4"
else
  RECOMPUTE=""
fi
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES pretrain_gpt.py \\
    "${MODEL_ARGS[@]}" $PARALLEL $RECOMPUTE --bf16 \\
    --micro-batch-size 1 --global-batch-size 16 --data-path $DATA_PATH 2>&1 | tee log.txt
"""


@pytest.fixture()
def script(tmp_path: Path) -> Path:
    path = tmp_path / "launch.sh"
    path.write_text(SCRIPT)
    return path


SHELL = {
    "default": ("A=${B:-3}\nrun --a $A", ["run", "--a", "3"]),
    "default of a set one": ("B=4\nA=${B:-3}\nrun --a $A", ["run", "--a", "4"]),
    "array": ('A=(--a 1 --b "x y")\nrun "${A[@]}"', ["run", "--a", "1", "--b", "x y"]),
    "array in lines": ("A=(\n  --a 1 # first\n  --b 2\n)\nrun ${A[@]}", ["run", "--a", "1", "--b", "2"]),
    "appended": ("A=(--a 1)\nA+=(--b 2)\nrun ${A[@]}", ["run", "--a", "1", "--b", "2"]),
    "arithmetic": ("A=4\nrun --a $((A * 2 + 1))", ["run", "--a", "9"]),
    "comment mark in quotes": ("A='#1'\nrun --a \"$A\"", ["run", "--a", "#1"]),
    "continued": ("run --a 1 \\\n  --b 2", ["run", "--a", "1", "--b", "2"]),
    "for one command": ("A=1 run --a 2", ["A=1", "run", "--a", "2"]),
    "unknown": ("run --a $NOBODY", ["run", "--a", "$NOBODY"]),
    "loops end": ("A=$A\nrun --a $A", ["run", "--a", "$A"]),
}


@pytest.mark.parametrize(("text", "words"), SHELL.values(), ids=SHELL)
def test_scripts_are_read_as_the_shell_would(text: str, words: list[str]) -> None:
    assert read_script(text).words == words


def test_nothing_in_a_script_is_run(tmp_path: Path) -> None:
    """A launch script from a stranger must not be able to do anything."""
    victim = tmp_path / "victim"
    victim.write_text("alive")
    script = tmp_path / "evil.sh"
    script.write_text(f"A=$(rm {victim})\nB=`rm {victim}`\nrm {victim}\nrun --micro-batch-size 1 --x $A $B\n")
    read_settings(script, "megatron")
    assert victim.read_text() == "alive"


def test_a_megatron_script(script: Path) -> None:
    settings = read_settings(script, "megatron")
    assert (settings.tp, settings.pp, settings.devices, settings.micro_batch) == (4, 2, 16, 1)
    assert settings.recompute == "full" and settings.recompute_layers == 4 and settings.dtype == "bf16"
    assert settings.model == {
        "layers": 8,
        "hidden": 256,
        "heads": 8,
        "kv_heads": 4,
        "vocab": 1000,
    }
    assert settings.unknown == ("DATA_PATH", "MODE")
    assert read_settings(script, "megatron", {"NNODES": "4"}).devices == 32
    assert findings(settings) == []


def test_layouts_and_flags() -> None:
    assert layout_counts("Et*3|(tt|)*2t*4L") == (3, 2, 2, 4)
    assert layout_counts("Ettt|tt|ttL") == (3, 2, 2)
    assert flags_of(["x", "--a", "1", "2", "--b=3", "--c", "|", "tee"]) == {
        "--a": ("1", "2"),
        "--b": ("3",),
        "--c": (),
    }


LEGAL = Settings(
    "loongforge",
    devices=32,
    tp=4,
    pp=4,
    vpp=1,
    sp=True,
    global_batch=64,
    sequence=4096,
    dtype="bf16",
    model={"layers": 32, "hidden": 64, "heads": 32, "kv_heads": 8, "vocab": 100},
)
FULL = {"recompute": "full", "recompute_method": "block", "recompute_layers": 2}
BROKEN = {
    "world size": {"devices": 40},
    "attention heads": {"model": {"heads": 30}},
    "query groups": {"model": {"heads": 32, "kv_heads": 2}},
    "layers": {"model": {"layers": 30}},
    "global batch": {"global_batch": 63},
    "interleaving": {"vpp": 2, "global_batch": 2},
    "sequence parallel": {"tp": 1},
    "expert degrees": {"ep": 3, "model": {"experts": 8}},
    "sequence length": {"cp": 2, "pp": 2, "sequence": 4098},
    "ulysses": {"said": {"--context-parallel-ulysses-degree": ("3",)}},
    "recompute": {"recompute": "full"},
    "recompute counts": {**FULL, "stage_recompute": (9, 8, 8, 8)},
    "custom layers": {"said": {"--custom-pipeline-layers": ("32",)}},
    "layouts": {"said": {"--custom-pipeline-layers": ("8,8",), "--pipeline-model-parallel-layout": ("E",)}},
    "dtype": {"said": {"--bf16": (), "--fp16": ()}},
    "optimizer offload": {"said": {"--optimizer-cpu-offload": ()}},
    "packing": {"micro_batch": 2, "said": {"--packing-sft-data": ()}},
    "FSDP queues": {
        "said": {"--use-megatron-fsdp": ()},
        "environment": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    },
    "experts with tp": {"framework": "megatron", "sp": False, "model": {"experts": 8}},
    "batch sizes": {"framework": "deepspeed", "said": {"--gradient_accumulation_steps": ("3",)}},
}


def test_legal_settings_raise_no_alarm() -> None:
    """A false alarm costs as much trust as a miss."""
    assert findings(LEGAL) == []
    assert findings(replace(LEGAL, **FULL)) == []
    assert findings(replace(LEGAL, stage_layers=(7, 9, 9, 7))) == []
    interleaved = replace(LEGAL, vpp=2, stage_layers=(4,) * 8)
    assert findings(interleaved) == []


@pytest.mark.parametrize("rule", [rule.name for rule in RULES])
def test_every_rule_fires_alone(rule: str) -> None:
    assert rule in BROKEN, "a rule without a case"
    found = findings(replace(LEGAL, **BROKEN[rule]))  # type: ignore[arg-type] - a table of field changes
    assert rule in [finding.rule for finding in found]


def test_pins_say_what_the_script_recomputes() -> None:
    blocks = [f"layers.{i}" for i in range(8)]
    settings = Settings("megatron", devices=4, pp=2, model={"layers": 8}, **FULL)  # type: ignore[arg-type]
    pins = plan_pins(settings, 2, blocks)
    assert {"pp=2", "dp=2", "recompute=none", "layers.0-1:recompute=full"} < set(pins)
    assert "layers.4-5:recompute=full" in pins
    uniform = replace(settings, recompute_method="uniform")
    assert "layers.0-7:recompute=full" in plan_pins(uniform, 2, blocks)


def test_exports_come_back() -> None:
    """What export writes for Megatron-LM, import reads as the same plan."""
    plan = llama_plan(stages=4)
    text = export_plan(plan, "megatron").files["megatron.sh"]
    words = read_script(text + '\nrun "${MEGATRON_ARGS[@]}"').words
    flags = flags_of(words)
    assert flags["--pipeline-model-parallel-layout"] == ("Et*8|t*8|t*8|t*8L",)
    assert layout_counts(flags["--pipeline-model-parallel-layout"][0]) == (8, 8, 8, 8)


def test_a_priced_script(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model is built from the sizes in the script; the price says whether it fits, and what is wasted."""
    assert main(["import", str(script), "--from", "megatron", "--hw", "h100", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["legal"] and told["fits"] and told["step_time_s"] > 0
    assert told["settings"]["model"]["layers"] == 8
    assert any("idle" in text for text in told["wasted"])
    assert told["changes"] and all(change["relative"] < 0 for change in told["changes"])
    assert main(["import", str(script), "--from", "megatron", "--no-price"]) == 0
    assert "legal" in capsys.readouterr().out


def test_an_illegal_script(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text(SCRIPT.replace("--num-query-groups 4", "--num-query-groups 2"))
    assert main(["import", str(script), "--from", "megatron", "--hw", "h100"]) == 1
    assert "query groups" in capsys.readouterr().out


def test_other_frameworks(tmp_path: Path) -> None:
    toml = tmp_path / "run.toml"
    toml.write_text(
        "[training]\nlocal_batch_size = 2\nseq_len = 8192\n"
        "[parallelism]\ntensor_parallel_degree = 4\npipeline_parallel_degree = 1\n"
        '[activation_checkpoint]\nmode = "selective"\n'
    )
    found = read_settings(toml, "torchtitan")
    assert (found.tp, found.micro_batch, found.zero, found.recompute) == (4, 2, 3, "selective")
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 4}))
    (tmp_path / "run.sh").write_text("deepspeed --num_gpus 8 train.py --deepspeed ds.json\n")
    found = read_settings(tmp_path / "run.sh", "deepspeed")
    assert (found.zero, found.micro_batch) == (2, 4)


def test_what_cannot_be_read_is_said(tmp_path: Path, script: Path) -> None:
    with pytest.raises(BadInputError, match="expected one of megatron"):
        read_settings(script, "megaton")
    with pytest.raises(BadInputError, match="cannot read"):
        read_settings(tmp_path / "nobody.sh", "megatron")
    (tmp_path / "empty.sh").write_text("echo hello\n")
    with pytest.raises(BadInputError, match="no argument of megatron"):
        read_settings(tmp_path / "empty.sh", "megatron")
    script.write_text(SCRIPT.replace("--micro-batch-size 1", "--micro-batch-size many"))
    with pytest.raises(BadInputError, match="whole number"):
        read_settings(script, "megatron")
    assert check_settings(LEGAL, None).legal
