"""Sweeps: every point is what a search of its own finds, and what fails says why in its row."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from autoplan.cli import main
from autoplan.errors import BadInputError
from autoplan.planner.driver import Request, search_plan
from autoplan.planner.sweep import Point, parse_sweeps, sweep
from autoplan.report.sweep import sweep_svg

MODEL = Path(__file__).parent / "models" / "tiny_gpt.py"
REQUEST = Request(str(MODEL), global_batch=16, dtype="fp32")


@pytest.fixture(scope="module")
def points() -> tuple[Point, ...]:
    values = {"devices": (2, 4, 7)}
    return sweep(REQUEST, ["a100-80", "h100"], values, hourly={"h100": 2.0})


def test_points_are_searches(points: tuple[Point, ...]) -> None:
    """Points share captures and measured costs; what they share must not change them."""
    assert len(points) == 6
    for point in points[1::3]:
        alone = search_plan(MODEL, hw=point.hardware, devices=4, global_batch=16, dtype="fp32")
        assert alone.prediction is not None
        assert point.step_time_s == pytest.approx(alone.prediction.step_time_s, rel=1e-12)


def test_efficiency_and_cost(points: tuple[Point, ...]) -> None:
    for first, second in (points[:2], points[3:5]):
        assert first.efficiency == 1.0 and second.efficiency is not None
        assert second.efficiency == pytest.approx(second.tokens_per_s / 2 / first.tokens_per_s)
    assert points[0].cost_per_step is None
    assert points[3].cost_per_step == pytest.approx(2.0 * 2 * points[3].step_time_s / 3600)


def test_idle_devices_count(points: tuple[Point, ...]) -> None:
    """7 devices divide neither a batch of 16 nor the regions: 6 run, and efficiency and cost are of 7."""
    for point in points[2::3]:
        assert point.plan is not None and point.plan.workload.devices == 6 and point.devices == 7
        assert any("1 stays idle" in text for text in point.plan.assumptions)
    assert points[5].cost_per_step == pytest.approx(2.0 * 7 * points[5].step_time_s / 3600)


def test_the_plot_holds_every_point(points: tuple[Point, ...]) -> None:
    drawn = ET.fromstring(sweep_svg(points))
    dots = [e for e in drawn.iter() if e.tag.endswith("circle")]
    assert len(dots) == sum(point.plan is not None for point in points)


@pytest.mark.parametrize("text", ["devices", "devices=", "devices=4,x", "=4", "devices=0"])
def test_bad_sweeps_are_refused(text: str) -> None:
    with pytest.raises(BadInputError, match="NAME=N"):
        parse_sweeps([text])


def test_sweeps_count_in_1024s_and_have_an_end() -> None:
    assert parse_sweeps(["sequence=8k,1m", "devices=64"]) == {"sequence": (8192, 2**20), "devices": (64,)}
    with pytest.raises(BadInputError, match="already"):
        parse_sweeps(["devices=1", "devices=2"])
    with pytest.raises(BadInputError, match="at most"):
        sweep(REQUEST, ["h100"], {"devices": tuple(range(1, 999))})


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "sweep.svg"
    options = ["--hw", "a100-80", "--sweep", "devices=2,4", "--global-batch", "16", "--dtype", "fp32"]
    assert main(["search", str(MODEL), *options, "--plot", str(plot), "--json"]) == 0
    assert [p["devices"] for p in json.loads(capsys.readouterr().out)["points"]] == [2, 4]
    assert plot.read_text().startswith("<svg")
    assert main(["search", str(MODEL), *options]) == 0
    assert "scaling" in capsys.readouterr().out
    assert main(["search", str(MODEL), "--sweep", "devices"]) == 2
