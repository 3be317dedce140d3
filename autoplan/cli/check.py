"""``autoplan check``: a plan and its model in, the proof out that the parallel run equals one process."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoplan.cli.progress import output_to_stderr, progress
from autoplan.cli.subparsers import Subparsers
from autoplan.errors import BadInputError, ParityError

if TYPE_CHECKING:
    from autoplan.plan import Plan
    from autoplan.runtime.check import CheckResult
    from autoplan.runtime.matrix import LeftOut

HEADINGS = ("layout", "recompute", "ranks", "loss", "worst gradient", "norm", "parameters", "bits", "result")


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "check", help="prove on CPU ranks that a plan trains as one process would", description=__doc__
    )
    parser.add_argument("plan", metavar="plan.yaml", help="the plan (with --matrix it may be left out)")
    parser.add_argument("model", metavar="model.py", nargs="?", help="the model the plan is for")
    parser.add_argument("--dtype", choices=("fp64", "fp32"), default="fp64", help="compare in (fp64)")
    parser.add_argument("--shrink", action="store_true", help="fewer blocks, every axis above 1 becomes 2")
    parser.add_argument(
        "--matrix",
        action="store_true",
        help="check every legal layout of 2, 4 and 8 ranks, with and without recompute",
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="GLOB", help="rows of --matrix ('tp2*'); repeatable"
    )
    parser.add_argument(
        "--steps", type=int, default=0, metavar="N", help="compare the parameters after N steps of SGD too"
    )
    parser.add_argument("--devices", type=int, default=8, metavar="N", help="most ranks to start (8)")
    parser.add_argument("--hw", help="profile whose plans --matrix checks (the plan's own)")
    parser.add_argument("--sequence", type=int, metavar="N", help="passed to example_inputs by --matrix")
    parser.add_argument(
        "--timeout", type=float, default=120.0, metavar="S", help="seconds a check may take (120)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 if every check passed, 1 with the worst gradient's name if one did not, 2 for bad input."""
    from autoplan.runtime.check import CheckResult

    if not 1 <= args.devices <= 8:
        raise BadInputError(f"--devices {args.devices}: `check` starts 1 to 8 ranks on the CPU.")
    with output_to_stderr(args.json):
        found = _matrix(args) if args.matrix else [_single(args)]
    results = [one for one in found if isinstance(one, CheckResult)]
    left_out = [one for one in found if not isinstance(one, CheckResult)]
    failed = [result for result in results if not result.ok]
    if args.json:
        print(json.dumps(_json(results, left_out, args.matrix)))
    else:
        _print_results(results, left_out)
    if failed and not args.json:
        raise ParityError("\n".join(_failure(result) for result in failed))
    return 1 if failed or not results else 0


def _single(args: argparse.Namespace) -> CheckResult:
    from autoplan.cli.old_forecast import warn_of_old_forecast
    from autoplan.plan import Plan
    from autoplan.runtime.check import Checker
    from autoplan.runtime.locate import locate
    from autoplan.runtime.shrink import shrink

    plan = Plan.load(args.plan)
    warn_of_old_forecast(plan)
    small = shrink(plan) if args.shrink else None
    checked = small.plan if small else plan
    model = args.model or _recorded_source(args.plan, plan)
    devices = checked.parts[0].mesh.devices
    if devices > args.devices:
        raise BadInputError(
            f"The plan runs on {devices} ranks and `check` starts at most {args.devices} on the CPU. "
            f"Check a small plan of the same kind: autoplan check {args.plan} {model} --shrink"
        )
    checker = Checker(
        model, checked, dtype=args.dtype, timeout_s=args.timeout, shrunk=small, steps=args.steps
    )
    result = checker.check(checked)
    return result if result.ok else replace(result, notes=(*result.notes, *locate(checker, checked)))


def _recorded_source(path: str, plan: Plan) -> str:
    """The model's file as the plan names it, if it is there."""
    source = plan.model.source
    if not Path(source).is_file():
        raise BadInputError(
            f"{path} was made from {source}, which is not here: type `autoplan check {path} MODEL.py`."
        )
    return source


def _matrix(args: argparse.Namespace) -> list[CheckResult | LeftOut]:
    from autoplan.cli.old_forecast import warn_of_old_forecast
    from autoplan.hardware import load_profile
    from autoplan.plan import Plan
    from autoplan.runtime.matrix import SearchedPlans, check_matrix, chosen_rows

    rows = chosen_rows(devices=args.devices, only=args.only)
    plan = Plan.load(args.plan) if Path(args.plan).suffix in (".yaml", ".yml") else None
    if plan:
        warn_of_old_forecast(plan, load_profile(args.hw) if args.hw else None)
    model = args.model or (_recorded_source(args.plan, plan) if plan else args.plan)
    sizes = {
        **(plan.workload.sizes if plan else {}),
        **({"sequence": args.sequence} if args.sequence else {}),
    }
    hw, opaque = args.hw or (plan.hardware if plan else "cpu"), plan.workload.opaque if plan else ()
    found: list[CheckResult | LeftOut] = []
    with progress(quiet=args.json) as say:
        make_plan = SearchedPlans(model, args.dtype, hw, sizes, opaque)
        checks = check_matrix(
            model, make_plan, dtype=args.dtype, rows=rows, timeout_s=args.timeout, steps=args.steps
        )
        for one in checks:
            found.append(one)
            say(f"checked {one.layout} ({len({done.layout for done in found})} of {len(rows)} layouts)")
    return found


def _json(results: list[CheckResult], left_out: list[LeftOut], matrix: bool) -> dict[str, Any]:
    from dataclasses import asdict

    rows = [asdict(result) for result in results]
    if not matrix:
        return rows[0]
    ok = bool(results) and all(result.ok for result in results)
    return {"ok": ok, "rows": rows, "left_out": [asdict(one) for one in left_out]}


def _print_results(results: list[CheckResult], left_out: list[LeftOut]) -> None:
    from tabulate import tabulate

    if results:
        first = results[0]
        print(
            f"{first.gradients} gradients against one process, {first.dtype}, global batch "
            f"{first.global_batch}, tolerance {first.tolerance:g}"
        )
        print(tabulate([_row(result) for result in results], HEADINGS, disable_numparse=True))
    for note in dict.fromkeys(note for result in results for note in result.notes):
        print(f"note: {note}")
    for reason in dict.fromkeys(one.reason for one in left_out):
        layouts = ", ".join(one.layout for one in left_out if one.reason == reason)
        print(f"left out: {layouts}: {reason}")


def _row(result: CheckResult) -> tuple[str, ...]:
    bits = {True: "equal", False: "differ", None: "-"}[result.bitwise]
    worst, parameter = result.worst_gradient, result.worst_parameter
    return (
        result.layout,
        result.recompute,
        str(result.ranks),
        f"{result.loss_difference:.1e}",
        f"{worst.relative_difference:.1e} {worst.name}",
        f"{result.grad_norm_difference:.1e}",
        f"{parameter.relative_difference:.1e} {parameter.name}" if parameter else "-",
        bits,
        "ok" if result.ok else "FAILED",
    )


def _failure(result: CheckResult) -> str:
    worst = result.worst_gradient
    return (
        f"parity failed for {result.layout}, recompute {result.recompute}: expected loss, gradients and norm "
        f"within {result.tolerance:g} of one process, got loss {result.loss_difference:.1e}, "
        f"worst gradient {worst.name or '-'} {worst.relative_difference:.1e}, "
        f"norm {result.grad_norm_difference:.1e}"
        f"{_parameter_text(result)}"
        f"{', bits that differ' if result.bitwise is False else ''}."
    )


def _parameter_text(result: CheckResult) -> str:
    worst = result.worst_parameter
    return f", worst parameter {worst.name or '-'} {worst.relative_difference:.1e}" if worst else ""
