"""``autoplan run``: a plan and a plain training script in, the script running under the plan out."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from autoplan.cli.apply import add_kept, rewritten
from autoplan.cli.progress import output_to_stderr
from autoplan.cli.subparsers import Subparsers
from autoplan.errors import BadInputError
from autoplan.output_files import write_file

if TYPE_CHECKING:
    from autoplan.cli.launch import Launch
    from autoplan.hardware import HardwareProfile


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("run", help="apply a plan and train under it", description=__doc__)
    parser.add_argument("plan", type=Path, metavar="plan.yaml")
    parser.add_argument("script", type=Path, metavar="train.py")
    parser.add_argument("arguments", nargs="*", metavar="ARG", help="for the script; put `--` before options")
    add_kept(parser)
    parser.add_argument("--hw", help="the chip's profile, where the plan's own name for it is not known")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Rewrite into a file that goes away, start one process a device; the script's own exit code."""
    from autoplan.cli.launch import launch_of
    from autoplan.cli.old_forecast import warn_of_old_forecast
    from autoplan.hardware import load_profile
    from autoplan.plan import Plan

    plan = Plan.load(args.plan)
    profile = load_profile(args.hw or plan.hardware)
    warn_of_old_forecast(plan, profile)
    launch = launch_of(plan, profile)
    _require_devices(launch, profile, args)
    rewrite = rewritten(args.script, args.plan.resolve(), args.script, args)
    with tempfile.TemporaryDirectory(
        prefix=f".{args.script.stem}_", dir=_writable(args.script.parent)
    ) as folder:
        path = Path(folder) / f"{args.script.stem}_autoplan.py"
        write_file(path, rewrite.text, "Give another file with -o.")
        code = _start(launch, path, args)
    if args.json:
        print(
            json.dumps(
                {"exit_code": code, "devices": launch.devices, "launch": launch.text(str(args.script))}
            )
        )
    return code


def _start(launch: Launch, path: Path, args: argparse.Namespace) -> int:
    """Run under torchrun's own launcher; the script finds the modules beside the user's file."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    beside = [str(args.script.parent.resolve()), os.environ.get("PYTHONPATH", "")]
    os.environ.update({name: os.environ.get(name, value) for name, value in launch.environment.items()})
    os.environ.update({name: "" for name, value in launch.environment.items() if not value})
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, beside))
    options = torchrun.parse_args(launch.options(str(path), args.arguments))
    try:
        with output_to_stderr(args.json):
            torchrun.run(options)
    except ChildFailedError as failure:
        rank, first = failure.get_first_failure()
        print(f"autoplan: rank {rank} ended with exit code {first.exitcode}.", file=sys.stderr)
        return first.exitcode if first.exitcode > 0 else 1
    return 0


def _writable(folder: Path) -> Path | None:
    """The script's own folder where it can be written to, else the system's for temporary files."""
    return folder if os.access(folder, os.W_OK) else None


def _require_devices(launch: Launch, profile: HardwareProfile, args: argparse.Namespace) -> None:
    """Refuse what this machine cannot hold, with what to type on the cluster; CPU ranks share the cores."""
    import torch

    kind = profile.software.device_type
    if kind == "cpu":
        return
    module = getattr(torch, kind, None)
    here = module.device_count() if module is not None and module.is_available() else 0
    if here >= launch.devices:
        return
    output = f"{args.script.stem}_autoplan.py"
    raise BadInputError(
        f"the plan runs on {launch.devices} {profile.name} devices, this machine has {here}.\n"
        f"Type here:         autoplan apply {args.plan} {args.script}\n"
        f"Type on each host: {launch.text(output, args.arguments)}"
    )
