"""Prices of plans made by hand: they agree with the search, and say whether they fit."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path

import pytest

from autoplan.cli import main
from autoplan.errors import BadInputError
from autoplan.planner.driver import search_plan
from autoplan.planner.pricer import Pricer
from autoplan.planner.what_if import with_memory
from autoplan_cost_models import CostModel

MODELS = Path(__file__).parent / "models"
MODEL = MODELS / "tiny_gpt.py"
PINNED = (
    "pp=2",
    "dp=2",
    "tp=1",
    "zero=0",
    "micro_batch=2",
    "recompute=full",
    "schedule=1f1b",
    "vpp=1",
    "fuse=off",
)


@pytest.fixture(scope="module")
def pricer() -> Pricer:
    return Pricer(MODEL, hw="cpu", devices=4, global_batch=16, dtype="fp32")


def test_a_pinned_plan_costs_what_the_search_says(pricer: Pricer) -> None:
    """Two prices for one plan would make one of them wrong."""
    quote = pricer.price(PINNED)
    plan = search_plan(MODEL, hw="cpu", devices=4, global_batch=16, dtype="fp32", pins=PINNED)
    assert quote.choices == 1 and quote.fits and plan.prediction is not None
    assert plan.prediction.step_time_s <= quote.step_time_s * (1 + 1e-9)
    if [s.regions for s in plan.parts[0].stages] == [s.regions for s in quote.part.stages]:
        assert quote.step_time_s == pytest.approx(plan.prediction.step_time_s, rel=1e-9)
    assert sum(quote.memory_items.values()) == pytest.approx(quote.memory_peak_bytes)


def test_open_pins_are_filled_in_by_the_fastest_that_fits(pricer: Pricer) -> None:
    free = pricer.price(())
    assert free.choices > 1 and free.fits
    assert free.step_time_s <= pricer.price(PINNED).step_time_s


def test_a_plan_that_does_not_fit_still_has_a_price(pricer: Pricer) -> None:
    """Whoever runs out of memory wants to know by how much, and of what."""
    small = copy.copy(pricer)
    small.profile = with_memory(pricer.profile, 10_000 - pricer.price(PINNED).memory_limit_bytes)
    small.costs = pricer.costs.repriced(CostModel(small.profile, pricer.capture.dtype))
    quote = small.price(PINNED)
    assert not quote.fits and quote.memory_limit_bytes == pytest.approx(10_000, rel=1e-3)
    assert quote.memory_peak_bytes == pricer.price(PINNED).memory_peak_bytes


@pytest.mark.parametrize(
    ("pins", "message"),
    [(("tp=3",), "tp=3"), (("tq=1",), "unknown key"), (("nobody.*:recompute=full",), "no region")],
)
def test_bad_pins_are_refused(pricer: Pricer, pins: tuple[str, ...], message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        pricer.price(pins)


def test_every_line_gets_an_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One bad request must not end a process that others are waiting on."""
    lines = [
        {"pins": list(PINNED)},
        {"pins": ["tp=3"]},
        {"pin": []},
        {"pins": "tp=1"},
        {"devices": 2, "pins": []},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines) + "nonsense\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    options = ["--hw", "cpu", "--devices", "4", "--global-batch", "16", "--dtype", "fp32"]
    assert main(["price", str(MODEL), *options, "--requests", "-"]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert ["error" in answer for answer in answers] == [False, True, True, True, False, True]
    assert answers[0]["mesh"]["pp"] == 2 and answers[4]["step_time_s"] > 0


def test_the_command_says_whether_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--hw", "cpu", "--devices", "4", "--global-batch", "16", "--dtype", "fp32"]
    pins = [word for pin in PINNED for word in ("--pin", pin)]
    assert main(["price", str(MODEL), *options, *pins, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"] is True
    assert main(["price", str(MODEL), *options, *pins]) == 0
    assert "fits" in capsys.readouterr().out
    assert main(["price", str(MODEL), "--hw", "cpu"]) == 2
