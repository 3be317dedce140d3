"""The commands ``apply`` and ``run``: what they write, launch and refuse."""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from plan_fixture import llama_plan
from script_cases import loop

from autoplan.cli import apply as cli_apply
from autoplan.cli import run as cli_run
from autoplan.errors import BadInputError


def command(*words: str) -> int:
    """``autoplan WORDS`` without the other commands' modules."""
    parser = argparse.ArgumentParser()
    subparsers = parser.add_subparsers()
    cli_apply.add_parser(subparsers)
    cli_run.add_parser(subparsers)
    args = parser.parse_args(words)
    return args.run(args)


def saved_plan(folder: Path, hardware: str, **shape: int) -> str:
    """A plan file for this chip."""
    path = folder / "plan.yaml"
    dataclasses.replace(llama_plan(**shape), hardware=hardware).save(path)
    return str(path)


def test_apply_writes_a_file_and_tells_how_to_launch_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards: a launch line without the chip's switches, or for one host where there are eight."""
    script = tmp_path / "train.py"
    script.write_text(loop("loss = model(**batch)\nloss.backward()"))
    assert command("apply", saved_plan(tmp_path, "kunlun-p800"), str(script)) == 0
    out = capsys.readouterr().out
    assert "+    loss = parallel.step(batch)" in out
    assert "XMLIR_MATMUL_FAST_MODE=1" in out and "--nnodes 8" in out and "--nproc-per-node 8" in out
    assert "parallel.step" in (tmp_path / "train_autoplan.py").read_text()
    assert command("apply", saved_plan(tmp_path, "cpu", dp=1, tp=1), str(script), "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["devices"] == 2 and "torchrun --standalone --nproc-per-node 2" in told["launch"]
    with pytest.raises(BadInputError, match="Is a directory"):  # it was a traceback
        command("apply", saved_plan(tmp_path, "cpu", dp=1, tp=1), ".")


def test_a_script_that_is_not_understood_leaves_no_file(tmp_path: Path) -> None:
    """Guards: half a rewrite on disk; the user's own script overwritten."""
    script = tmp_path / "train.py"
    script.write_text(loop("loss = model(**batch)"))
    with pytest.raises(BadInputError, match="found no call of"):
        command("apply", saved_plan(tmp_path, "cpu"), str(script))
    script.write_text(loop("loss = model(**batch)\nloss.backward()"))
    with pytest.raises(BadInputError, match="is the script itself"):
        command("apply", saved_plan(tmp_path, "cpu"), str(script), "-o", str(script))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.yaml", "train.py"]


def test_run_refuses_a_cluster_it_is_not_on(tmp_path: Path) -> None:
    """Guards: 64 processes started on a laptop."""
    with pytest.raises(BadInputError, match=r"64 kunlun-p800 devices, this machine has \d+") as refusal:
        command("run", saved_plan(tmp_path, "kunlun-p800"), "train.py")
    assert "autoplan apply" in str(refusal.value) and "torchrun --nnodes 8" in str(refusal.value)


def test_run_starts_every_rank_and_returns_the_scripts_exit_code(tmp_path: Path) -> None:
    """Guards: success reported for a run that failed; modules beside the script not found."""
    (tmp_path / "neighbour.py").write_text("CODE = 7\n")
    script = tmp_path / "train.py"
    script.write_text(loop("loss = model(**batch)\nloss.backward()"))
    body = (
        "import neighbour, os, sys\n"
        "open(os.path.dirname(neighbour.__file__) + '/rank' + os.environ['RANK'], 'w').write(sys.argv[1])\n"
        "sys.exit(neighbour.CODE)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", _RUN, saved_plan(tmp_path, "cpu", dp=1, tp=1), str(script), body],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 7, done.stderr
    assert "exit code 7" in done.stderr
    assert [(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)] == ["--steps", "--steps"]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".train")]


_RUN = """
import argparse, sys
from autoplan_codegen.script import ScriptRewrite
from autoplan.cli import run
plan, script, body = sys.argv[1:]
run.rewritten = lambda *_: ScriptRewrite(body, "")
parser = argparse.ArgumentParser()
run.add_parser(parser.add_subparsers())
args = parser.parse_args(["run", plan, script, "--", "--steps"])
sys.exit(args.run(args))
"""
