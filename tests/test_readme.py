"""The README's own commands: a newcomer types them in order, and each must do what it says."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from autoplan.cli import build_parser, main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def shell_blocks() -> list[str]:
    return re.findall(r"```sh\n(.*?)```", README, re.DOTALL)


def test_the_two_commands_are_make_targets() -> None:
    targets = re.findall(r"^make (\w+)", shell_blocks()[0], re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    assert targets == ["demo", "test"]
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


def test_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Search, show, verify and apply, as printed under "Try it"; the tutorial's test checks and trains."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    commands = [line for line in shell_blocks()[1].splitlines() if line.startswith("autoplan ")]
    assert [shlex.split(line)[1] for line in commands] == [
        "search",
        "show",
        "verify",
        "check",
        "apply",
        "run",
    ]
    for line in commands:
        words = shlex.split(line)[1:]
        assert build_parser().parse_args(words).command == words[0]
        if words[0] not in ("check", "run"):
            assert main(words) == 0, line
    assert (tmp_path / "out" / "gpt.svg").read_text().startswith("<?xml")
    assert "parallelize" in (tmp_path / "out" / "train_autoplan.py").read_text()


def test_the_printed_plan_is_what_the_command_prints(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    """The README once showed the plan of an older cost model; ``--update-golden`` writes today's."""
    printed = re.findall(r"```\n(llama3_8b .*?)```", README, re.DOTALL)[0]
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "104")
    (command,) = shell_blocks()[2].splitlines()
    assert main(shlex.split(command)[1:]) == 0
    found = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    if request.config.getoption("--update-golden"):
        now = "\n".join(line for line in found if not line.startswith("plan written")).strip() + "\n"
        (ROOT / "README.md").write_text(README.replace(printed, now))
        return
    same = [line for line in printed.splitlines() if not line.startswith(("planned in", "certificate"))]
    assert [line for line in same if line not in found] == []


def test_every_named_file_exists() -> None:
    """The reading order once named a file that had moved."""
    names = re.findall(r"`((?:tests|autoplan|passes|codegen|cost_models|hw_profiles)/[\w/]+\.\w+)`", README)
    assert names and all((ROOT / name).exists() for name in names)
