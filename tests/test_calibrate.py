"""Calibration: fits recover what they are given, and what is written is a profile that loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from autoplan.calibration.kernels import Products, curve_of
from autoplan.calibration.links import QUICK_BYTES, fit_link, measure_links
from autoplan.calibration.timing import Clock
from autoplan.cli import main
from autoplan.hardware import load_profile
from autoplan.planner.driver import search_plan
from autoplan.runtime.forked import run_ranks
from autoplan_cost_models.collectives import traffic_factor

MODEL = Path(__file__).parent / "models" / "tiny_gpt.py"


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "p2p"])
@pytest.mark.parametrize("ranks", [2, 8])
def test_link_fits_recover_latency_and_bandwidth(kind: str, ranks: int) -> None:
    factor = traffic_factor(kind, ranks)
    times = {size: 2e-5 + size * factor / 3e9 for size in (2**10, 2**16, 2**20, 2**24)}
    fit = fit_link(kind, ranks, times)
    assert fit.alpha_s == pytest.approx(2e-5, rel=1e-6) and fit.bytes_per_s == pytest.approx(3e9, rel=1e-6)
    assert fit.residual < 1e-9


@pytest.mark.parametrize("times", [{2**10: 5e-4, 2**20: 1e-4}, {2**10: 1e-6, 2**20: 1.0, 2**24: 40.0}])
def test_noise_never_makes_a_number_negative(times: dict[int, float]) -> None:
    """A busy machine once measured a large message faster than a small one."""
    fit = fit_link("all_reduce", 2, times)
    assert fit.alpha_s > 0 and fit.bytes_per_s > 0


def test_curves_are_read_as_profiles_read_them() -> None:
    curve = {16: 1.0, 64: 3.0}
    assert [curve_of(curve).at(at) for at in (1, 16, 32, 64, 999)] == [1.0, 1.0, 2.0, 3.0, 3.0]
    assert Products({1: 1.0}, {1: 1.0}, {1: 1.0}, (-0.2, 0.1, 0.3)).residual == 0.2


def test_what_is_measured_is_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every measured number is tagged so; the rest keeps the tags of the profile it started from."""
    path = tmp_path / "mine.yaml"
    assert main(["hw", "calibrate", "--quick", "-o", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told["residuals"]) == {"fp32 products", "fp64 products"}
    profile = load_profile(str(path))
    measured = {name for name, number in profile.sourced() if "hw calibrate" in number.source}
    assert {"launch_s", "memory_bytes_per_s", "gemm.fp32.by_m"} <= measured
    assert profile.name == "mine" and profile.memory_bytes == load_profile("cpu").memory_bytes
    plan = search_plan(MODEL, hw=str(path), devices=2, global_batch=4, dtype="fp32")
    assert plan.prediction is not None and plan.prediction.step_time_s > 0


def test_collectives_are_measured_by_all_ranks() -> None:
    def body(_rank: int) -> list[tuple[str, float, float]]:
        clock = Clock(torch.device("cpu"), batch_s=0.001, batches=1)
        links = measure_links(clock, QUICK_BYTES, lambda _: None)
        return [(link.kind, link.alpha_s, link.bytes_per_s) for link in links]

    first, second = run_ranks(2, body, timeout_s=120.0)
    assert first == second, "ranks disagree on what they measured together"
    assert [kind for kind, *_ in first] == ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p"]
    assert all(alpha > 0 and rate > 0 for _, alpha, rate in first)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    assert main(["hw", "calibrate", "--quick", "-o", str(tmp_path / "none" / "x.yaml")]) == 2
