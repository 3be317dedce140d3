"""``autoplan diff``: what two plans decide differently and what it costs, for people and for programs."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest
from plan_fixture import llama_plan

from autoplan.cli import main
from autoplan.plan import Plan
from autoplan.report.compare import compare
from autoplan.report.differences import print_comparison, sentence

BEFORE, AFTER = llama_plan(), llama_plan(stages=4, dp=2)


def faster(plan: Plan, share: float) -> Plan:
    """The plan with a step shorter by ``share``, all of it tensor-parallel time."""
    told = plan.prediction
    assert told is not None
    gone_s = share * told.step_time_s
    breakdown = {**told.breakdown_s, "tensor parallel": told.breakdown_s["tensor parallel"] - gone_s}
    prediction = dataclasses.replace(told, step_time_s=told.step_time_s - gone_s, breakdown_s=breakdown)
    return dataclasses.replace(plan, prediction=prediction)


def test_a_plan_does_not_differ_from_itself() -> None:
    """Twenty rows that all say the same."""
    found = compare(BEFORE, BEFORE)
    assert found.same and not found.changes
    assert sentence(found, "a", "b") == "a and b decide and predict the same."


def test_decisions_that_differ_are_named_once() -> None:
    """A moved stage boundary told as thirty-two moved layers."""
    changes = {change.what: (change.before, change.after) for change in compare(BEFORE, AFTER).changes}
    assert changes["pp"] == ("2", "4") and changes["dp"] == ("4", "2")
    assert changes["regions a stage"] == ("17, 17", "9, 8, 8, 9")
    assert changes["global batch"] == ("256", "128")
    assert "tp" not in changes and "model" not in changes and len(changes) < 8


def test_other_models_chips_and_layouts_are_told() -> None:
    """Two plans of different models compared as if they were one."""
    model = dataclasses.replace(BEFORE.model, name="other")
    other = dataclasses.replace(llama_plan(tp=1), model=model, hardware="h100")
    changes = {change.what: (change.before, change.after) for change in compare(BEFORE, other).changes}
    assert changes["model"] == ("llama3_8b", "other") and changes["hardware"] == ("kunlun-p800", "h100")
    assert changes["tp"] == ("8", "1")


@pytest.mark.parametrize(("share", "expected"), [
    (0.1, "b is 10.0% faster than a: -433 ms tensor parallel."),
    (-0.1, "b is 10.0% slower than a: +433 ms tensor parallel."),
])  # fmt: skip
def test_the_sentence_says_how_much_and_why(share: float, expected: str) -> None:
    """Slower called faster; a cause that did not move named as the reason."""
    assert sentence(compare(BEFORE, faster(BEFORE, share)), "a", "b") == expected
    other = dataclasses.replace(
        faster(BEFORE, share), model=dataclasses.replace(BEFORE.model, name="other")
    )  # a model cannot be faster than another
    assert "than one of a, but of another model: " in sentence(compare(BEFORE, other), "a", "b")


def test_a_plan_without_forecast_is_compared_all_the_same() -> None:
    """A crash where one plan was made by hand."""
    bare = dataclasses.replace(AFTER, prediction=None)
    found = compare(BEFORE, bare)
    assert found.changes and "not known" in sentence(found, "a", "b")


@pytest.mark.parametrize("width", [40, 60, 80, 160])
def test_tables_fit_the_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that wrap in the middle of a table; colour where it was refused."""
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("NO_COLOR", "1")
    out = io.StringIO()
    print_comparison(compare(BEFORE, faster(AFTER, 0.1)), "a.yaml", "b.yaml", out)
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width and "\x1b" not in out.getvalue()
    assert "-10.0%" in out.getvalue()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One JSON object that a program can add up."""
    paths = [tmp_path / "a.yaml", tmp_path / "b.yaml"]
    BEFORE.save(paths[0])
    faster(AFTER, 0.25).save(paths[1])
    assert main(["diff", *map(str, paths)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "25.0% shorter" in said and "of another global batch" in said  # half of it is not faster
    assert main(["diff", *map(str, paths), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    step = next(cost for cost in told["costs"] if cost["what"] == "step")
    assert step["relative"] == pytest.approx(-0.25) and not told["same"]
    moved = sum(cause["after"] - cause["before"] for cause in told["causes_s"])
    assert moved == pytest.approx(step["after"] - step["before"])
    assert main(["diff", str(paths[0]), str(tmp_path / "none.yaml")]) == 2
