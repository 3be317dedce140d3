"""``autoplan hw calibrate --from-log``, ``--from-trace``: what a cluster did in, its own profile out."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoplan.cli.progress import output_to_stderr, progress
from autoplan.errors import BadInputError
from autoplan.hardware import HardwareProfile, load_profile
from autoplan.output_files import write_file

if TYPE_CHECKING:
    from collections.abc import Callable

    from autoplan.calibration.forecasts import Forecast


def add_feedback(parser: argparse.ArgumentParser) -> None:
    """Options of `hw calibrate` that read what has run instead of measuring."""
    ran = parser.add_argument_group("from what has run (--base names the profile to correct)")
    ran.add_argument(
        "--from-log", type=Path, metavar="run.log", help="steps of Megatron, torchtitan or autoplan"
    )
    ran.add_argument("--from-trace", type=Path, metavar="trace.json", help="a trace of the PyTorch profiler")
    ran.add_argument("--plan", type=Path, metavar="plan.yaml", help="the plan that the logged run followed")
    ran.add_argument("--from-settings", metavar="launch.sh", help="or its launch script")
    ran.add_argument("--framework", default="megatron", help="whose script that is; default: megatron")
    ran.add_argument("--model", type=Path, metavar="model.py", help="where plan or script do not say")
    ran.add_argument("--devices", type=int, metavar="N", help="where the script does not say")
    ran.add_argument("--global-batch", type=int, metavar="N", help="where the script does not say")
    ran.add_argument("--sequence", type=int, metavar="N", help="where the script does not say")
    ran.add_argument("--warm-up", type=int, default=3, metavar="N", help="first lines of the log to drop")


def feed_back(args: argparse.Namespace) -> int:
    """Correct the profile from a log, a trace, or both (the trace first); write it and say the residuals."""
    from autoplan.profile_files import find_profile

    if args.from_log and bool(args.plan) == bool(args.from_settings):
        raise BadInputError(
            "--from-log needs what the run was set to do: --plan plan.yaml, or --from-settings launch.sh."
        )
    base = args.base or _planned_hardware(args)
    start, told = find_profile(base), dict[str, Any]()
    profile = load_profile(str(start))
    if not args.output.resolve().parent.is_dir():
        raise BadInputError(f"-o {args.output}: the folder {args.output.parent} does not exist; make it.")
    if args.from_trace:
        told |= _from_trace(args, start, profile)
        start, profile = args.output.resolve(), load_profile(str(args.output.resolve()))
    if args.from_log:
        with output_to_stderr(args.json), progress(quiet=args.json) as say:
            told |= _from_log(args, start, profile, say)
    told = {"profile": str(args.output), **told}
    if args.json:
        print(json.dumps(told))
    else:
        _say(told)
    return 0


def _planned_hardware(args: argparse.Namespace) -> str | None:
    from autoplan.plan import Plan

    return Plan.load(args.plan).hardware if args.plan else None


def _from_trace(args: argparse.Namespace, start: Path, profile: HardwareProfile) -> dict[str, Any]:
    from autoplan.calibration.observed import observe
    from autoplan.calibration.profile import observed_yaml
    from autoplan.calibration.trace import read_trace

    found = observe(read_trace(args.from_trace), profile)
    text = observed_yaml(start, profile, args.output.stem, found, args.from_trace.name)
    write_file(args.output, text, "Give a file with -o.")
    load_profile(str(args.output.resolve()))
    fits = [
        {"what": one.what, "shapes": one.shapes, "before": one.before, "after": one.after}
        for one in found.fitted
    ]
    return {"trace": fits, "left_out": list(found.left_out)}


def _from_log(
    args: argparse.Namespace, start: Path, profile: HardwareProfile, say: Callable[[str], None]
) -> dict[str, Any]:
    from autoplan.calibration.correction import correct
    from autoplan.calibration.profile import corrected_yaml
    from autoplan.calibration.step_log import read_step_times

    forecast = _forecast(args, str(start), say)
    times = read_step_times(args.from_log, forecast.tokens / forecast.devices, args.warm_up)
    found = correct(profile, forecast.dtype, times, forecast.step_s)
    text = corrected_yaml(start, args.output.stem, found, args.from_log.name)
    write_file(args.output, text, "Give a file with -o.")
    load_profile(str(args.output.resolve()))
    return {
        "log": {
            "written_by": times.written_by,
            "steps": times.steps,
            "warm_up_dropped": times.warm_up,
            "outliers": [{"step": step, "seconds": seconds} for step, seconds in times.outliers],
            "median_s": times.median_s,
            "spread": times.spread,
            "forecast_s": found.forecast_s,
            "dtype": found.dtype,
            "sustained_before": found.before,
            "sustained_after": found.after,
            "corrected_s": found.corrected_s,
            "residual": found.residual,
        }
    }


def _forecast(args: argparse.Namespace, hw: str, say: Callable[[str], None]) -> Forecast:
    from dataclasses import replace

    from autoplan.calibration.forecasts import forecast_of_plan, forecast_of_settings
    from autoplan.importing.settings import read_settings
    from autoplan.plan import Plan

    if args.plan:
        return forecast_of_plan(Plan.load(args.plan), hw, args.model, say)
    settings = read_settings(Path(args.from_settings), args.framework, {})
    settings = replace(
        settings,
        devices=args.devices or settings.devices,
        global_batch=args.global_batch or settings.global_batch,
        sequence=args.sequence or settings.sequence,
    )
    return forecast_of_settings(settings, hw, args.model, say)


def _say(told: dict[str, Any]) -> None:
    print(f"wrote {told['profile']}: use it with --hw {shlex.quote(told['profile'])}")
    for fit in told.get("trace", []):
        print(
            f"  {fit['what']}, {fit['shapes']} shapes: {fit['before']:.1%} off before, {fit['after']:.1%} now"
        )
    for text in told.get("left_out", []):
        print(f"  not used: {text}")
    log = told.get("log")
    if not log:
        return
    print(
        f"  {log['steps']} steps of {log['median_s']:.4g} s (+-{log['spread']:.1%}, {log['written_by']}); "
        f"{log['warm_up_dropped']} first ones dropped, {len(log['outliers'])} outliers"
    )
    for row in log["outliers"][:5]:
        print(f"    step {row['step']}: {row['seconds']:.4g} s")
    print(
        f"  forecast {log['forecast_s']:.4g} s; with {log['sustained_after']:.3g} of the {log['dtype']} rate "
        f"sustained (was {log['sustained_before']:.3g}) {log['corrected_s']:.4g} s, {log['residual']:+.1%}"
    )
    if abs(log["residual"]) > max(0.01, log["spread"]):
        print("  the rest is no matter of the matrix rate: measure links and memory with --from-trace")
