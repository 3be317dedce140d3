"""``autoplan show``: a plan file in, the plan as tables, pictures or JSON out."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from autoplan.cli.subparsers import Subparsers
from autoplan.errors import BadInputError, BadPlanError
from autoplan.output_files import write_file


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("show", help="print a plan, or draw it", description=__doc__)
    parser.add_argument("plan", type=Path, metavar="plan.yaml")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the whole report as one page")
    parser.add_argument(
        "--model", type=Path, metavar="model.py", help="with --html: trace it and draw what a rank runs"
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write the timeline for Perfetto (.json, or .pftrace)"
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the plan as SVG")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the plan as PNG")
    parser.add_argument("--dot", type=Path, metavar="FILE", help="write the drawing's Graphviz source")
    parser.add_argument("--mermaid", type=Path, metavar="FILE", help="write the drawing as Mermaid text")
    parser.add_argument(
        "--stages", type=Path, metavar="DIR", help="write the code of each stage (stage_0.py, ...)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Load, draw what was asked for, print; 2 for a plan or a path that cannot be used."""
    from autoplan.cli.old_forecast import warn_of_old_forecast
    from autoplan.plan import Plan
    from autoplan.report.summary import plan_summary_json
    from autoplan.report.terminal import print_plan

    if args.model is not None and args.html is None:
        raise BadInputError(
            f"--model is drawn in the report: type `--html report.html --model {args.model}`."
        )
    plan = Plan.load(args.plan)
    warn_of_old_forecast(plan)
    drawn = _draw(plan, args) + _write_stages(plan, args.stages)
    if args.json:
        print(json.dumps(plan_summary_json(plan, args.plan) | {"drawn": drawn}))
        return 0
    if not drawn:
        print_plan(plan, sys.stdout)
    for path in drawn:
        print(f"wrote {path}")
    return 0


def _draw(plan: Any, args: argparse.Namespace) -> list[str]:
    """Write each picture asked for; the paths written."""
    from autoplan.report.draw import FORMATS
    from autoplan.report.graph import plan_dot
    from autoplan.report.html import write_html
    from autoplan.report.mermaid import plan_mermaid
    from autoplan.report.trace import write_trace

    writers: dict[str, Callable[[Path], None]] = {
        "html": lambda path: write_html(plan, path, _graphs(plan, args.model)),
        "trace": lambda path: write_trace(plan, path),
        "dot": lambda path: write_file(path, plan_dot(plan)),
        "mermaid": lambda path: write_file(path, plan_mermaid(plan)),
        **{form: partial(_write_drawing, plan, form) for form in FORMATS},
    }
    asked = {kind: path for kind in writers if (path := getattr(args, kind)) is not None}
    for kind, path in asked.items():
        writers[kind](path)
    return [str(path) for path in asked.values()]


def _graphs(plan: Any, model: Path | None) -> dict[str, Any]:
    """What one rank runs by layout, where the model's file is given."""
    if model is None:
        return {}
    from autoplan.cli.progress import progress
    from autoplan.runtime.layout_graphs import layout_graphs

    with progress() as say:
        say(f"tracing {model}")
        return layout_graphs(plan, model)


def _write_drawing(plan: Any, form: str, path: Path) -> None:
    from autoplan.report.draw import write_picture
    from autoplan.report.graph import plan_dot

    write_picture(plan_dot(plan), path, form)


def _require_release(hardware: str, name: str, text: str) -> None:
    """Raises BadPlanError for code that the chip's release of torch lacks something of."""
    from autoplan.hardware import load_profile
    from autoplan_codegen.versions import too_new

    try:
        software = load_profile(hardware).software
    except BadInputError:  # a profile of the user's own, which is not here
        return
    missing = too_new(text, software.release)
    if missing:
        raise BadPlanError(
            f"{name} is for {hardware}, whose torch is {software.torch_version}, and {missing[0]}.\n"
            f"Search again for the chip (--hw {hardware}), or state its torch_version in its profile."
        )


def _write_stages(plan: Any, directory: Path | None) -> list[str]:
    """Trace the plan's model and write the module that each stage runs; the paths written."""
    if directory is None:
        return []
    from autoplan.cli.progress import progress
    from autoplan.runtime.prepare import prepare_from_file

    with progress() as say:
        say(f"tracing {plan.model.source}")
        program = prepare_from_file(plan)
    for index, source in enumerate(program.sources):
        _require_release(plan.hardware, f"stage_{index}.py", source.text)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        paths = [directory / f"stage_{index}.py" for index in range(len(program.sources))]
        for path, source in zip(paths, program.sources):
            path.write_text(source.text, encoding="utf-8")
    except OSError as error:
        raise BadInputError(f"cannot write into {directory}: {error.strerror}.") from None
    return [str(path) for path in paths]
