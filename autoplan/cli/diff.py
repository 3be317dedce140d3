"""``autoplan diff a.yaml b.yaml``: two plans in; what was decided differently and what it costs out."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from autoplan.cli.subparsers import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "diff", help="what two plans decide differently, and what it costs", description=__doc__
    )
    parser.add_argument("before", type=Path, metavar="a.yaml")
    parser.add_argument("after", type=Path, metavar="b.yaml")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the differences; 0 whether or not there are any, 2 for a plan that cannot be read."""
    from autoplan.plan import Plan
    from autoplan.report.compare import Comparison, compare
    from autoplan.report.differences import print_comparison

    before, after = Plan.load(args.before), Plan.load(args.after)
    found: Comparison = compare(before, after)
    if args.json:
        print(json.dumps(_as_json(found, args)))
        return 0
    print_comparison(found, str(args.before), str(args.after), sys.stdout)
    return 0


def _as_json(found: Any, args: argparse.Namespace) -> dict[str, Any]:
    """The comparison's records; ``relative`` is after / before - 1, null where there was nothing before."""

    def cost(one: Any) -> dict[str, Any]:
        return {**dataclasses.asdict(one), "relative": one.relative}

    return {
        "before": str(args.before),
        "after": str(args.after),
        "same": found.same,
        "changes": [dataclasses.asdict(change) for change in found.changes],
        "costs": [cost(one) for one in found.costs],
        "causes_s": [cost(one) for one in found.causes],
    }
