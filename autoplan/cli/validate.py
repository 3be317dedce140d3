"""``autoplan validate``: published training runs in, how far the predictions are from them out."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from autoplan.cli.subparsers import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "validate", help="compare predictions with published training runs", description=__doc__
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="ROWS.csv",
        help="other runs, in the columns of the table that ships (autoplan/validation/points.csv)",
    )
    parser.add_argument("--source", metavar="NAME", help="only sources with this in their name")
    parser.add_argument(
        "--record", action="store_true", help="write what each chip's predictions are worth into the project"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Price every point; 2 for a table that cannot be read or has no such source."""
    from autoplan.cli.progress import output_to_stderr, progress
    from autoplan.errors import BadInputError
    from autoplan.report.terminal import console_for
    from autoplan.report.validation import validation_json, validation_report
    from autoplan.validation.points import read_points
    from autoplan.validation.pricing import price_points
    from autoplan.validation.worth import record

    if args.record and (args.data or args.source):
        raise BadInputError("--record is of the whole table that ships: leave out --data and --source.")
    points = read_points(args.data)
    if args.source:
        sources = sorted({point.subset for point in points})
        points = [point for point in points if args.source in point.subset]
        if not points:
            raise BadInputError(f"--source {args.source}: expected part of one of {', '.join(sources)}.")
    with output_to_stderr(args.json), progress(quiet=args.json) as say:
        forecasts = price_points(points, say)
    if args.record:
        record(forecasts)
    if args.json:
        print(json.dumps(validation_json(forecasts)))
        return 0
    console_for(sys.stdout).print(validation_report(forecasts))
    return 0
