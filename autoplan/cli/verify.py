"""``autoplan verify``: a plan and its model in, whether its whole rewritten graph type-checks out."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoplan.cli.progress import output_to_stderr, progress
from autoplan.cli.subparsers import Subparsers
from autoplan.errors import BadInputError, VerifyError

if TYPE_CHECKING:
    from autoplan.plan import Plan
    from autoplan.runtime.verify import ClassChecked, VerifyResult

HEADINGS = ("region", "times", "ops", "axes", "sends forward", "backward", "a micro-batch")


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "verify", help="type-check the whole rewritten graph of a plan, on no device", description=__doc__
    )
    parser.add_argument("plan", metavar="plan.yaml")
    parser.add_argument("model", metavar="model.py", nargs="?", help="the model, if not where the plan says")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 if everything type-checks, 1 with region, op and what was expected if not, 2 for bad input."""
    from autoplan.plan import Plan
    from autoplan.runtime.verify import verify_plan

    plan = Plan.load(args.plan)
    model = args.model or plan.model.source
    if not Path(model).exists():
        raise BadInputError(
            f"Expected the model of {args.plan} at {model}, which is not here: type "
            f"`autoplan verify {args.plan} MODEL.py`."
        )
    with output_to_stderr(args.json), progress(quiet=args.json) as say:
        say(f"tracing {model}")
        result = verify_plan(plan, model)
    if args.json:
        print(json.dumps(_json(result)))
        return 0 if result.ok else 1
    if not result.ok:
        raise VerifyError(_failure(result))
    _print(plan, result)
    return 0


def _failure(result: VerifyResult) -> str:
    return "the plan does not type-check:\n" + "\n".join(f"  {fault}" for fault in result.faults)


def _json(result: VerifyResult) -> dict[str, Any]:
    from dataclasses import asdict

    faults = [{"region": one.region, "axis": one.axis, **asdict(one.fault)} for one in result.faults]
    return {
        "ok": result.ok,
        "faults": faults,
        "devices": result.mesh.devices,
        "mesh": asdict(result.mesh),
        "regions": result.regions,
        "ops": result.ops,
        "classes": [asdict(one) for one in result.classes],
        "stages": [
            {side: [asdict(sent) for sent in getattr(one, side)] for side in ("forward", "backward")}
            for one in result.collectives
        ],
        "wall_s": dict(result.wall_s),
    }


def _print(plan: Plan, result: VerifyResult) -> None:
    from tabulate import tabulate

    print(
        f"{plan.model.name} on {result.mesh.devices:,} ranks ({result.mesh}): {result.ops:,} ops in "
        f"{result.regions} regions, {len(result.classes)} distinct"
    )
    print(tabulate([_row(one) for one in result.classes], HEADINGS, disable_numparse=True))
    lists = len({(one.forward, one.backward) for one in result.collectives})
    print(
        "Every tensor and every gradient lies as its users need it; regions and stages hand on what the\n"
        f"next one takes; ranks of a group issue the same collectives ({lists} list{'s' * (lists != 1)} over "
        f"{len(result.collectives)} stage{'s' * (len(result.collectives) != 1)}).\n"
        f"Checked in {result.wall_s['check']:.1f} s, after tracing in {result.wall_s['capture']:.1f} s."
    )


def _row(one: ClassChecked) -> tuple[str, ...]:
    from autoplan.units import bytes_text

    axes = " ".join(f"{axis} {size}" for axis, size in one.axes.items())
    sent = [", ".join(f"{n} {kind}" for kind, n in side.items()) for side in (one.forward, one.backward)]
    return (one.region, str(one.regions), str(one.ops), axes, *sent, bytes_text(one.sent_bytes))
