"""``autoplan search``: a model and a chip in, the best plan out, with every assumption it made."""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from autoplan.cli.subparsers import Subparsers
from autoplan.errors import BadInputError
from autoplan.output_files import write_file

if TYPE_CHECKING:
    from autoplan.planner.driver import Request


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "search", help="find the best plan for a model on a cluster", description=__doc__
    )
    parser.add_argument("model", help="model.py with build_model() and example_inputs(), or a config.json")
    add_workload_options(parser)
    parser.add_argument(
        "-o", "--output", default="plan.yaml", metavar="FILE", help="where the plan goes (plan.yaml)"
    )
    parser.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="NAME=N,N",
        help="a plan for every value: devices, global_batch, sequence or a size; --hw takes several chips",
    )
    parser.add_argument(
        "--time-limit",
        type=positive,
        metavar="SECONDS",
        help="take the best plan found by then, with its gap to the bound",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw a sweep")
    parser.add_argument(
        "--device-hour",
        action="append",
        default=[],
        metavar="HW=PRICE",
        help="price of a device-hour, for a sweep",
    )
    parser.add_argument(
        "--top", type=positive, metavar="K", help="K plans that the prices cannot tell apart, sturdiest first"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def add_workload_options(parser: argparse.ArgumentParser) -> None:
    """The options that say what is trained and where."""
    parser.add_argument("--hw", help="hardware profile: a name, alias or path (else AUTOPLAN_HW)")
    parser.add_argument(
        "--devices", type=positive, metavar="N", help="devices of the cluster (one node, or what fits)"
    )
    parser.add_argument("--global-batch", type=positive, metavar="N", help="samples per optimizer step")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32", "fp64"), help="the model's dtype")
    parser.add_argument("--optimizer", choices=("adamw", "sgd"), default=None, help="the optimizer (adamw)")
    parser.add_argument(
        "--sequence", type=positive, metavar="N", help="passed to example_inputs as sequence=N"
    )
    parser.add_argument("--size", action="append", default=[], metavar="NAME=N", help="another size")
    parser.add_argument(
        "--pin", action="append", default=[], metavar="KEY=VALUE", help="fix part of the plan"
    )
    parser.add_argument(
        "--target",
        default="autoplan",
        metavar="NAME",
        help="what is to run the plan: autoplan, megatron, loongforge or torchtitan",
    )
    parser.add_argument("--opaque", action="append", default=[], metavar="NAME", help="sub-module kept whole")


def positive(text: str) -> int:
    """A whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return value


def sizes_of(args: argparse.Namespace) -> dict[str, int]:
    """``--sequence`` and ``--size`` as keyword arguments of ``example_inputs``."""
    sizes: dict[str, int] = {}
    for text in args.size:
        name, _, value = text.partition("=")
        if not name.isidentifier() or not value.isdigit():
            raise BadInputError(f"--size {text!r}: expected NAME=N, such as --size image=224.")
        sizes[name] = int(value)
    if args.sequence is not None:
        sizes["sequence"] = args.sequence
    return sizes


def _require_writable(output: Path) -> None:
    """Found out before the search, not after it."""
    if output.is_dir():
        raise BadInputError(f"--output {output} is a folder: type `-o {output / 'plan.yaml'}`.")
    if not output.resolve().parent.is_dir():
        raise BadInputError(f"--output {output}: the folder {output.parent} does not exist; make it.")
    if not os.access(output if output.exists() else output.resolve().parent, os.W_OK):
        raise BadInputError(f"--output {output} cannot be written: give another file with -o.")


def request_of(args: argparse.Namespace) -> Request:
    """What the workload options ask for."""
    from autoplan.planner.driver import Request

    return Request(
        args.model,
        args.hw,
        args.devices,
        args.global_batch,
        args.dtype,
        args.optimizer,
        sizes_of(args),
        tuple(args.pin),
        tuple(args.opaque),
        args.target,
        args.time_limit,
    )


def run_sweep(args: argparse.Namespace) -> int:
    """A table of plans; exit code 1 where no point has one."""
    from autoplan.cli.progress import output_to_stderr, progress
    from autoplan.planner.sweep import parse_sweeps, sweep
    from autoplan.report.sweep import print_sweep, sweep_json, sweep_svg
    from autoplan.targets import target_named

    values, hourly = parse_sweeps(args.sweep), _prices(args.device_hour)
    sizes = {name: size for name, size in sizes_of(args).items() if name not in values}
    request = replace(request_of(args), hw=None, sizes=sizes)
    target_named(args.target)
    with output_to_stderr(args.json), progress(quiet=args.json) as say:
        points = sweep(request, args.hw.split(",") if args.hw else [None], values, hourly=hourly, say=say)
    if args.plot:
        write_file(args.plot, sweep_svg(points), "Give another file with --plot.")
    if args.json:
        print(json.dumps(sweep_json(points)))
    else:
        print_sweep(points)
    return 0 if any(point.plan for point in points) else 1


def _prices(texts: list[str]) -> dict[str, float]:
    """``["h100=2.5"]`` by the profile's own name."""
    from autoplan.hardware import load_profile

    prices: dict[str, float] = {}
    for text in texts:
        name, _, price = text.partition("=")
        try:
            prices[load_profile(name).name] = float(price)
        except ValueError:
            raise BadInputError(f"--device-hour {text!r}: expected HW=PRICE, such as h100=2.5.") from None
    return prices


def run(args: argparse.Namespace) -> int:
    if args.sweep or (args.hw and "," in args.hw):
        if args.top:
            raise BadInputError("--top lists plans of one search: leave --sweep out, and give one chip.")
        return run_sweep(args)
    output = Path(args.output)
    _require_writable(output)
    began_s = time.perf_counter()
    from autoplan.cli.progress import output_to_stderr, progress
    from autoplan.cli.top import error_band, print_top, top_json, write_top
    from autoplan.hardware import load_profile
    from autoplan.planner.driver import search_request
    from autoplan.planner.top import sturdiest

    import_s = time.perf_counter() - began_s
    band, why = error_band(load_profile(args.hw)) if args.top else (0.0, "")
    with output_to_stderr(args.json), progress(quiet=args.json) as say:
        plans = search_request(args.model, request_of(args), say, band=band)
    plan = plans[0]
    walls = {"import": import_s, **plan.wall_s, "total": import_s + plan.wall_s["total"]}
    plan = replace(plan, wall_s=walls)
    plan.save(output)
    top = sturdiest((plan, *plans[1:]), band, args.top) if args.top else ()
    paths = write_top(top, output)
    if args.json:
        from autoplan.report.summary import plan_summary_json

        told = {**plan_summary_json(plan), "plan": str(output)}
        told |= {"error_band": band, "top": top_json(top, paths)} if args.top else {}
        print(json.dumps(told))
        return 0
    from autoplan.report.terminal import print_plan

    print_plan(plan)
    if args.top and plan.certificate:
        print_top(top, paths, band, why, plan.certificate.gap)
    print(f"\nplan written to {output}; look at it with `autoplan show {output} --svg plan.svg`")
    return 0
