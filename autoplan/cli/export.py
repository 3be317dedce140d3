"""``autoplan export``: a plan in, another training framework's settings out, and what they cost there."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from autoplan.cli.subparsers import Subparsers
from autoplan.errors import AutoplanError, BadInputError
from autoplan.output_files import write_file
from autoplan.units import seconds_text

if TYPE_CHECKING:
    from autoplan.plan import Plan
    from autoplan_codegen.exports.export import Export


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "export", help="write a plan as another framework's settings", description=__doc__
    )
    parser.add_argument("plan", type=Path, metavar="plan.yaml")
    parser.add_argument(
        "--to",
        required=True,
        metavar="TARGET",
        help="megatron, loongforge, torchtitan, deepspeed or accelerate",
    )
    parser.add_argument("-o", "--output", type=Path, default=Path(), metavar="DIR", help="default: here")
    parser.add_argument("--hw", help="the chip's profile, where the plan's own name for it is not known")
    parser.add_argument("--model", type=Path, metavar="model.py", help="where the model's file is now")
    parser.add_argument(
        "--no-price", action="store_true", help="do not price the plan as the target will run it"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the files; say what the target cannot express, and the forecast of what it runs instead."""
    from autoplan.hardware import load_profile
    from autoplan.plan import Plan
    from autoplan_codegen.exports.export import export_plan

    plan = Plan.load(args.plan)
    profile = load_profile(args.hw or plan.hardware)
    export = export_plan(plan, args.to, profile.software.environment)
    paths = [_write(args.output / name, text) for name, text in export.files.items()]
    priced = None if args.no_price or export.faithful else _forecast(plan, export, args)
    if args.json:
        told = {"target": export.target, "version": export.version, "files": [str(path) for path in paths]}
        told |= {"settings": [asdict(item) for item in export.settings]}
        told |= {"lost": [asdict(item) for item in export.lost], "pins": list(export.pins), "priced": priced}
        print(json.dumps(told))
        return 0
    for path in paths:
        print(f"wrote {path} ({export.version})")
    _say_settings(export)
    _say_losses(plan, export, priced)
    return 0


def _write(path: Path, text: str) -> Path:
    advice = "Give another folder with -o."
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInputError(f"cannot write {path}: {error.strerror}. {advice}") from None
    write_file(path, text, advice)
    return path


def _forecast(plan: Plan, export: Export, args: argparse.Namespace) -> dict[str, object]:
    """What the target's version of the plan takes: ``step_time_s`` and whether it fits, or ``why`` not."""
    from autoplan.cli.progress import progress
    from autoplan.planner.driver import search_plan

    work = plan.workload
    try:
        with progress(quiet=args.json) as say:
            found = search_plan(
                args.model or plan.model.source,
                hw=args.hw or plan.hardware,
                devices=work.devices,
                global_batch=work.global_batch,
                dtype=work.dtype,
                optimizer=work.optimizer,
                sizes=work.sizes,
                pins=export.pins,
                opaque=work.opaque,
                say=say,
            )
    except AutoplanError as error:
        return {"step_time_s": None, "why": str(error)}
    assert found.prediction is not None
    return {"step_time_s": found.prediction.step_time_s, "why": ""}


def _say_settings(export: Export) -> None:
    for changes in ("execution", "convergence"):
        named = [f"{s.name} {_short(s.value)}".strip() for s in export.settings if s.changes == changes]
        if named:
            print(f"\nchanges {changes}{' only' if changes == 'execution' else ' too'}:")
            print("\n".join(f"  {line}" for line in named))


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 90 else f"{line[:87]}..."


def _say_losses(plan: Plan, export: Export, priced: dict[str, object] | None) -> None:
    if export.faithful:
        print(f"\n{export.target} expresses the whole plan.")
        return
    print(f"\n{export.target} cannot express:")
    for item in export.lost:
        print(f"  {item.field}: {item.planned}; instead: {item.instead}")
    if priced is None:
        return
    step_s = priced["step_time_s"]
    if isinstance(step_s, float) and plan.prediction is not None:
        planned_s = plan.prediction.step_time_s
        more = f"{step_s / planned_s - 1:+.1%}"
        print(f"priced as {export.target} runs it: {seconds_text(step_s)} a step ({more} against the plan)")
    else:
        print(f"it cannot be priced that way: {priced['why']}")
