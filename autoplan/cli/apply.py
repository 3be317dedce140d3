"""``autoplan apply``: a plan and a training script in, the script that trains under it out, as a diff."""

from __future__ import annotations

import argparse
import json
import tokenize
from pathlib import Path
from typing import TYPE_CHECKING

from autoplan.cli.subparsers import Subparsers
from autoplan.errors import BadInputError
from autoplan.output_files import write_file

if TYPE_CHECKING:
    from autoplan_codegen.script import ScriptRewrite


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("apply", help="rewrite a training script for a plan", description=__doc__)
    parser.add_argument("plan", type=Path, metavar="plan.yaml")
    parser.add_argument("script", type=Path, metavar="train.py")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="default: train_autoplan.py beside it"
    )
    add_kept(parser)
    parser.add_argument("--hw", help="the chip's profile, where the plan's own name for it is not known")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the new script; print the diff and how to launch it."""
    from autoplan.cli.launch import launch_of
    from autoplan.cli.old_forecast import warn_of_old_forecast
    from autoplan.hardware import load_profile
    from autoplan.plan import Plan

    plan = Plan.load(args.plan)
    profile = load_profile(args.hw or plan.hardware)
    warn_of_old_forecast(plan, profile)
    output = args.output or args.script.parent / f"{args.script.stem}_autoplan.py"
    rewrite = rewritten(args.script, args.plan, output, args)
    if output.resolve() == args.script.resolve():
        raise BadInputError(f"{output} is the script itself: give another file with -o.")
    write_file(output, rewrite.text, "Give another file with -o.")
    launch = launch_of(plan, profile)
    command = launch.text(str(output))
    if args.json:
        told = {"output": str(output), "diff": rewrite.diff, "launch": command}
        print(json.dumps(told | {"devices": launch.devices, "environment": dict(launch.environment)}))
        return 0
    print(rewrite.diff)
    where = f" on each of {launch.nodes} hosts" if launch.nodes > 1 else ""
    print(f"\nwrote {output}; launch it{where} with:\n\n    {command}")
    return 0


def add_kept(parser: argparse.ArgumentParser) -> None:
    """Options for what a run keeps: checkpoints, where to go on, the weights to begin with."""
    parser.add_argument("--save", default="", metavar="DIR", help="write checkpoints into this folder")
    parser.add_argument("--save-every", type=int, default=100, metavar="N", help="batches between them")
    parser.add_argument(
        "--resume", default="", metavar="DIR", help="go on from a checkpoint, or the newest in a folder"
    )
    parser.add_argument("--weights", default="", metavar="DIR", help="begin with these safetensors weights")


def rewritten(script: Path, plan_path: Path, output: Path, args: argparse.Namespace) -> ScriptRewrite:
    """The script rewritten for the plan at ``plan_path``; nothing is written."""
    from autoplan_codegen.script import rewrite_script
    from autoplan_codegen.script_checkpoints import Kept

    if args.save_every < 1:
        raise BadInputError(f"--save-every {args.save_every}: expected 1 or more.")
    kept = Kept(args.save, args.save_every, args.resume, args.weights)

    try:
        with tokenize.open(script) as file:
            source = file.read()
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise BadInputError(f"cannot read the training script {script}: {reason}.") from None
    return rewrite_script(
        source,
        name=str(script),
        plan_path=str(plan_path),
        output_name=str(output),
        folder=script.parent,
        kept=kept,
    )
