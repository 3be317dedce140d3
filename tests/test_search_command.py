"""``autoplan search`` as typed: JSON, exit codes, slips of the keyboard."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from autoplan.cli import main
from autoplan.plan import Plan

EXAMPLES = Path(__file__).parent.parent / "examples"


GPT = EXAMPLES / "gpt.py"


def test_command_line_json_and_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--json`` prints one object with the documented keys and nothing else."""
    out = tmp_path / "plan.yaml"
    code = main(
        ["search", str(GPT), "--hw", "cpu", "--devices", "2", "--global-batch", "8", "-o", str(out), "--json"]
    )
    assert code == 0
    found = json.loads(capsys.readouterr().out)
    documented = (
        "plan hardware devices step_time_s tokens_per_s mfu memory_gib mesh parts micro_batch microbatches "
        "schedule stages certificate wall_s"
    )
    assert set(documented.split()) <= set(found)
    assert {"import", "capture", "cost", "search", "total"} == set(found["wall_s"])
    assert found["plan"] == str(out) and Plan.load(out).workload.devices == 2
    assert main(["search", str(tmp_path / "none.py"), "--hw", "cpu"]) == 2
    assert main(["search", str(GPT), "--hw", "kunlunn"]) == 2
    assert main(["search", str(GPT), "--hw", "cpu", "--devices", "0"]) == 2
    assert main(["search", str(GPT), "--hw", "cpu", "-o", str(tmp_path)]) == 2
    capsys.readouterr()


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("serch", "Did you mean `search`?"),
        ("search model.py --hww cpu", "Did you mean `--hw`?\nType `autoplan search --help`"),
        ("search model.py --dtype bf61", "Did you mean `bf16`?"),
        ("hw lst", "Did you mean `list`?"),
        ("search model.py other.py", "unknown argument other.py"),
        ("search model.py --devices two", "expected a whole number of at least 1, got 'two'"),
    ],
)
def test_slips_of_the_keyboard_name_what_was_meant(
    typed: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unknown options named neither the nearest one nor the command they were typed for."""
    assert main(typed.split()) == 2
    assert says in capsys.readouterr().err
    assert main([*typed.split(), "--json"]) == 2
    assert says in json.loads(capsys.readouterr().out)["error"]


def test_what_the_model_prints_stays_out_of_the_json(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A ``print`` in model.py came before the object."""
    noisy = tmp_path / "noisy.py"
    noisy.write_text(GPT.read_text() + '\nprint("hello")\n')
    typed = ["search", str(noisy), "--hw", "cpu", "--devices", "1", "-o", str(tmp_path / "p.yaml"), "--json"]
    with open(1, "w", closefd=False) as standard_output, contextlib.redirect_stdout(standard_output):
        assert main(typed) == 0
    told = capfd.readouterr()
    assert json.loads(told.out)["devices"] == 1 and "hello" in told.err
