"""Fine-tuning on every axis: frozen parameters, adapters, modules shared by stages, skips over them, buffers.

Frozen parameters under ZeRO have no gradient to scatter; a skip passes through the stages between; a shared
module's gradient is the sum of all its uses, also of those on other ranks.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from run_fixture import HandPlans

from autoplan.capture import capture_model, load_model_source
from autoplan.runtime.check import Checker

MODEL = Path(__file__).parent / "models" / "adapted.py"
PLANS: dict[str, dict[str, Any]] = {
    "ZeRO-1": {"dp": 2, "zero": 1},
    "ZeRO-2": {"dp": 2, "zero": 2},
    "ZeRO-3 of pieces, tokens cut": {"dp": 2, "zero": 3, "tp": 2, "sp": True, "recompute": ("full",)},
    "a stage for two regions": {"pp": 3},
    "pieces over four stages": {"pp": 4, "tp": 2, "micro_batch": 1, "schedule": "zb_h1"},
    "interleaved ZeRO-1": {"pp": 2, "vpp": 2, "dp": 2, "zero": 1, "schedule": "interleaved_1f1b"},
}


@cache
def made() -> tuple[HandPlans, Checker]:
    plans = HandPlans(capture_model(MODEL, dtype="fp64"), "adapted")
    return plans, Checker(load_model_source(MODEL), plans.plan(), timeout_s=60)


@pytest.mark.parametrize("name", PLANS)
def test_parity(name: str) -> None:
    """The gradients of adapters, norms, the shared module and the head are those of one process."""
    plans, checker = made()
    result = checker.check(plans.plan(**PLANS[name]))
    assert result.ok, str(result)
    assert result.gradients == 4 * (2 + 6 * 2) + 2 + 2
