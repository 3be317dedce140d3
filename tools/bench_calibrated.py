"""Calibrates this machine on two CPU ranks, prices plans of a GPT with that profile, runs them and compares.

``python tools/bench_calibrated.py [--quick] [--steps N]`` prints predicted and measured step times, how far
the chosen plan is from the best measured (aimed at: 10%) and the rank correlation (aimed at: 0.8). The time
of a step is the least of its steps: other programs only add to it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from autoplan.calibration.profile import Calibration, calibrate, calibrated_yaml
from autoplan.capture import load_model_source
from autoplan.errors import AutoplanError
from autoplan.plan import Plan
from autoplan.planner.driver import search_plan
from autoplan.profile_files import find_profile
from autoplan.runtime.forked import run_ranks
from autoplan.runtime.parallel import ParallelModel
from autoplan.runtime.prepare import trace_and_prepare
from autoplan.runtime.ranks import join_ranks

MODEL = Path(__file__).parent.parent / "examples" / "gpt.py"
RANKS, BATCH = 2, 8
LAYOUTS = ("tp=2", "dp=2 zero=0", "dp=2 zero=1", "dp=2 zero=2", "dp=2 zero=3", "pp=2 schedule=1f1b")
MICRO_BATCHES, RECOMPUTES = (1, 4), ("none", "full")


@dataclass(frozen=True)
class Compared:
    """One plan: what fixes it, and seconds of a step."""

    pins: str
    predicted_s: float
    measured_s: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="measure few sizes: seconds instead of minutes")
    parser.add_argument("--steps", type=int, default=5, help="steps a plan is timed for, after one")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "here.yaml"
        path.write_text(
            calibrated_yaml(find_profile("cpu"), "here", calibrated(args.quick)), encoding="utf-8"
        )
        plans = {pins: plan for pins in all_pins() if (plan := planned(pins, path)) is not None}
    found = [compared(pins, plan, args.steps) for pins, plan in plans.items()]
    print_table(sorted(found, key=lambda one: one.predicted_s))
    return 0


def calibrated(quick: bool) -> Calibration:
    """What two ranks measure together, as they will run together."""

    def body(rank: int) -> Calibration:
        return calibrate(torch.device("cpu"), lambda text: None, quick=quick, links=True)

    return run_ranks(RANKS, body, timeout_s=600.0)[0]


def all_pins() -> list[str]:
    return [
        f"{layout} micro_batch={size} recompute={kind}"
        for layout in LAYOUTS
        for size in MICRO_BATCHES
        for kind in RECOMPUTES
    ]


def planned(pins: str, profile: Path) -> Plan | None:
    """The fastest plan under the pins, or None where there is none."""
    try:
        return search_plan(
            MODEL, hw=str(profile), devices=RANKS, global_batch=BATCH, dtype="fp32", pins=pins.split()
        )
    except AutoplanError as error:
        print(f"{pins}: {str(error).splitlines()[0]}", file=sys.stderr)
        return None


def compared(pins: str, plan: Plan, steps: int) -> Compared:
    """Run the plan for some steps; the time is that of the slower rank."""
    source = load_model_source(MODEL)
    torch.manual_seed(0)
    model, batch = source.build(), source.example_inputs(BATCH)
    program = trace_and_prepare(model, plan, example_inputs=batch)

    def body(rank: int) -> float:
        parallel = ParallelModel(program, model, join_ranks(program.part.mesh))
        optimizer = torch.optim.AdamW(parallel.parameters(), fused=True)
        spent: list[float] = []
        for _ in range(steps + 1):
            start = time.perf_counter()
            optimizer.zero_grad()
            parallel.step(batch)
            optimizer.step()
            spent.append(time.perf_counter() - start)
        return min(spent[1:])

    assert plan.prediction is not None
    return Compared(pins, plan.prediction.step_time_s, max(run_ranks(RANKS, body)))


def print_table(rows: list[Compared]) -> None:
    """Fastest forecast first."""
    print(f"{'plan':44s} predicted   measured   predicted/measured")
    for row in rows:
        ratio = row.predicted_s / row.measured_s
        print(f"{row.pins:44s} {row.predicted_s * 1e3:6.1f} ms  {row.measured_s * 1e3:6.1f} ms  {ratio:8.2f}")
    best = min(row.measured_s for row in rows)
    print(f"chosen plan: {rows[0].measured_s / best - 1:.1%} slower than the best measured")
    predicted = ranks([row.predicted_s for row in rows])
    measured = ranks([row.measured_s for row in rows])
    print(f"rank correlation: {statistics.correlation(predicted, measured):.2f}")


def ranks(values: list[float]) -> list[int]:
    """The place of each value among all."""
    order = sorted(values)
    return [order.index(value) for value in values]


if __name__ == "__main__":
    raise SystemExit(main())
