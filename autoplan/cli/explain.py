"""``autoplan explain``: a plan in, what limits it and what other choices would cost out, each re-solved."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from autoplan.cli.subparsers import Subparsers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from autoplan.hardware import HardwareProfile
    from autoplan.plan import Plan
    from autoplan.planner.what_if import WhatIf
    from autoplan.report.explain import Claim
    from autoplan.report.numbers import Number

TITLES = {
    "limit": "what limits this plan",
    "alternative": "one setting changed, everything else solved again",
    "shadow price": "what more or less would buy",
    "why": "the other values",
    "why not": "the best plan with it",
}


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "explain", help="say why a plan is what it is, and what others cost", description=__doc__
    )
    parser.add_argument("plan", type=Path, metavar="plan.yaml")
    parser.add_argument("--model", type=Path, metavar="model.py", help="where the model's file is now")
    parser.add_argument("--hw", help="the chip's profile, where the plan's own name for it is not known")
    parser.add_argument("--why", metavar="KEY=VALUE", help="why the plan has it: tp=8")
    parser.add_argument("--why-not", metavar="KEY=VALUE", help="what it would cost: pp=4")
    parser.add_argument(
        "--number",
        metavar="NAME",
        help="a number's formula, inputs and sources: step_time, compute/REGION, ...",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Capture the model once, solve every question, print claims."""
    from autoplan.cli.progress import progress
    from autoplan.hardware import load_profile
    from autoplan.plan import Plan
    from autoplan.report.explain import explain, why, why_not
    from autoplan.report.numbers import Numbers

    plan = Plan.load(args.plan)
    profile = load_profile(args.hw or plan.hardware)
    with progress(quiet=args.json) as say:
        what_if = _what_if(plan, args.model, profile, say)
        if args.number:
            return _say_number(Numbers(plan, what_if.costs).find(args.number), args.json)
        claims: list[Claim] = []
        claims += why(what_if, args.why) if args.why else []
        claims += why_not(what_if, args.why_not) if args.why_not else []
        claims = claims or explain(what_if)
    if args.json:
        print(json.dumps({"plan": str(args.plan), "claims": [asdict(claim) for claim in claims]}))
        return 0
    _say(plan, claims)
    return 0


def _what_if(plan: Plan, model: Path | None, profile: HardwareProfile, say: Callable[[str], None]) -> WhatIf:
    from autoplan.planner.what_if import WhatIf
    from autoplan.runtime.prepare import capture_planned

    say(f"tracing {model or plan.model.source}")
    return WhatIf(plan, capture_planned(plan, model), profile, say)


def _say(plan: Plan, claims: list[Claim]) -> None:
    from autoplan.report.explain import by_kind, shape
    from autoplan.units import seconds_text

    step = f": {seconds_text(plan.prediction.step_time_s)} a step" if plan.prediction else ""
    print(f"{plan.model.name} on {plan.workload.devices} x {plan.hardware}: {shape(plan)}{step}")
    for kind, group in by_kind(claims).items():
        print(f"\n{TITLES[kind]}")
        for claim in group:
            print(f"  {claim.text}")


SHOWN = 12


def _say_number(number: Number, as_json: bool) -> int:
    """The number, its inputs, and theirs."""
    if as_json:
        print(json.dumps(asdict(number)))
        return 0
    for line in _lines(number, 0):
        print(line)
    deeper = next((one.name for one in number.inputs if one.inputs), "")
    if deeper:
        print(f"\ndeeper: --number '{deeper}'")
    return 0


def _lines(number: Number, depth: int) -> Iterator[str]:
    from autoplan.units import value_text

    name = number.name if depth == 0 else number.name.rpartition("/")[2]
    formula = f"  = {number.formula}" if number.formula else ""
    source = f"  [{number.source}]" if number.source else ""
    yield f"{'  ' * depth}{name}: {value_text(number.value, number.unit)}{formula}{source}"
    if depth < 2:
        for one in number.inputs[:SHOWN]:
            yield from _lines(one, depth + 1)
        if len(number.inputs) > SHOWN:
            yield f"{'  ' * (depth + 1)}and {len(number.inputs) - SHOWN} smaller ones"
