"""``autoplan check``: a plan and its model in, the proof out that the parallel run equals one process."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoplan.cli.progress import output_to_stderr
from autoplan.errors import BadInputError, ParityError

if TYPE_CHECKING:
    from autoplan.plan import Plan
    from autoplan.runtime.check import CheckResult

HEADINGS = ("layout", "recompute", "ranks", "loss", "worst gradient", "norm", "bits", "result")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage] - argparse has no public name for it
    parser = subparsers.add_parser(
        "check", help="prove on CPU ranks that a plan trains as one process would", description=__doc__
    )
    parser.add_argument("plan", metavar="plan.yaml", help="the plan (with --matrix it may be left out)")
    parser.add_argument("model", metavar="model.py", nargs="?", help="the model the plan is for")
    parser.add_argument("--dtype", choices=("fp64", "fp32"), default="fp64", help="compare in (fp64)")
    parser.add_argument("--shrink", action="store_true", help="fewer blocks, every axis above 1 becomes 2")
    parser.add_argument(
        "--matrix", action="store_true", help="check dp2, tp2, pp2, tp2xpp2, dp2xtp2, recompute none and full"
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
    if not 1 <= args.devices <= 8:
        raise BadInputError(f"--devices {args.devices}: `check` starts 1 to 8 ranks on the CPU.")
    with output_to_stderr(args.json):
        results = _matrix(args) if args.matrix else [_single(args)]
    failed = [result for result in results if not result.ok]
    if args.json:
        print(json.dumps(_json(results, args.matrix)))
    else:
        _print_results(results)
    if failed and not args.json:
        raise ParityError("\n".join(_failure(result) for result in failed))
    return 1 if failed else 0


def _single(args: argparse.Namespace) -> CheckResult:
    from autoplan.cli.old_forecast import warn_of_old_forecast
    from autoplan.plan import Plan
    from autoplan.runtime.check import Checker
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
    checker = Checker(model, checked, dtype=args.dtype, timeout_s=args.timeout, shrunk=small)
    return checker.check(checked)


def _recorded_source(path: str, plan: Plan) -> str:
    """The model's file as the plan names it, if it is there."""
    source = plan.model.source
    if not Path(source).is_file():
        raise BadInputError(
            f"{path} was made from {source}, which is not here: type `autoplan check {path} MODEL.py`."
        )
    return source


def _matrix(args: argparse.Namespace) -> list[CheckResult]:
    from autoplan.plan import Plan
    from autoplan.runtime.matrix import check_matrix, searched_plans

    plan = Plan.load(args.plan) if Path(args.plan).suffix in (".yaml", ".yml") else None
    model = args.model or (_recorded_source(args.plan, plan) if plan else args.plan)
    sizes = {
        **(plan.workload.sizes if plan else {}),
        **({"sequence": args.sequence} if args.sequence else {}),
    }
    make_plan = searched_plans(
        model,
        dtype=args.dtype,
        hw=args.hw or (plan.hardware if plan else "cpu"),
        sizes=sizes,
        opaque=plan.workload.opaque if plan else (),
    )
    return list(
        check_matrix(model, make_plan, dtype=args.dtype, devices=args.devices, timeout_s=args.timeout)
    )


def _json(results: list[CheckResult], matrix: bool) -> dict[str, Any]:
    from dataclasses import asdict

    rows = [asdict(result) for result in results]
    return {"ok": all(result.ok for result in results), "rows": rows} if matrix else rows[0]


def _print_results(results: list[CheckResult]) -> None:
    from tabulate import tabulate

    first = results[0]
    print(
        f"{first.gradients} gradients against one process, {first.dtype}, global batch {first.global_batch}, "
        f"tolerance {first.tolerance:g}"
    )
    print(tabulate([_row(result) for result in results], HEADINGS, disable_numparse=True))
    for note in dict.fromkeys(note for result in results for note in result.notes):
        print(f"note: {note}")


def _row(result: CheckResult) -> tuple[str, ...]:
    bits = {True: "equal", False: "differ", None: "-"}[result.bitwise]
    worst = result.worst_gradient
    return (
        result.layout,
        result.recompute,
        str(result.ranks),
        f"{result.loss_difference:.1e}",
        f"{worst.relative_difference:.1e} {worst.name}",
        f"{result.grad_norm_difference:.1e}",
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
        f"{', bits that differ' if result.bitwise is False else ''}."
    )
