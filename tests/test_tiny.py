"""The whole product in one look: plan a small model, and prove that running the plan changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoplan.plan import Plan
from autoplan.planner.driver import search_plan
from autoplan.runtime.check import run_check

GPT = Path(__file__).parent.parent / "examples" / "gpt.py"


def test_main_job(tmp_path: Path) -> None:
    """Search, save, load, check: loss and every gradient equal one process to 1e-9."""
    plan = search_plan(GPT, hw="cpu", devices=2, global_batch=4, pins=("tp=2",))
    assert plan.parts[0].mesh.tp == 2
    assert plan.prediction is not None and plan.prediction.step_time_s > 0

    plan.save(tmp_path / "plan.yaml")
    assert Plan.load(tmp_path / "plan.yaml") == plan
    assert "tp 2" in str(plan)

    result = run_check(plan, GPT)
    assert result.ok
    assert result.worst_gradient.relative_difference == pytest.approx(0, abs=1e-9)
