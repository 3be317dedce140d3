"""``autoplan import``: another framework's launch script in; whether it is legal, fits and wastes, out.

The script is read, never run: variables are filled in from the script itself and from ``--set``.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoplan.cli.search import positive
from autoplan.cli.subparsers import Subparsers
from autoplan.errors import BadInputError
from autoplan.units import seconds_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from autoplan.importing.replan import Replan
    from autoplan.importing.report import ImportReport
    from autoplan.importing.settings import Settings
    from autoplan.planner.pricer import Pricer


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "import", help="read another framework's launch script: legal, fits, faster?", description=__doc__
    )
    parser.add_argument("script", type=Path, metavar="launch.sh", help="a script; TOML or JSON for some")
    parser.add_argument(
        "--from", dest="framework", required=True, help="megatron, loongforge, torchtitan or deepspeed"
    )
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a shell variable")
    parser.add_argument(
        "--model", type=Path, metavar="model.py", help="where the script does not state sizes"
    )
    parser.add_argument("--hw", help="hardware profile, for prices (else AUTOPLAN_HW)")
    parser.add_argument("--devices", type=positive, metavar="N", help="where the script does not say")
    parser.add_argument("--global-batch", type=positive, metavar="N", help="where the script does not say")
    parser.add_argument("--sequence", type=positive, metavar="N", help="where the script does not say")
    parser.add_argument("--no-price", action="store_true", help="check the rules alone")
    parser.add_argument(
        "--replan", action="store_true", help="plan anew for the same framework: the flags to change"
    )
    parser.add_argument(
        "--top", type=positive, default=1, metavar="K", help="so many plans, sturdiest first (--replan)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0: legal, and fits where it was priced; 1: not."""
    from autoplan.cli.progress import output_to_stderr, progress
    from autoplan.importing.report import check_settings
    from autoplan.importing.settings import read_settings

    settings = _completed(read_settings(args.script, args.framework, _variables(args.set)), args)
    with output_to_stderr(args.json), progress(quiet=args.json) as say:
        make = None if args.no_price else partial(_pricer, settings, args, say)
        report = check_settings(settings, make)
        replans = _replans(settings, args, say) if args.replan else None
    if args.json:
        told = _told(report)
        print(json.dumps(told if replans is None else told | {"replans": _replans_told(report, replans)}))
    else:
        _say(report)
        if replans is not None:
            _say_replans(report, replans)
    if replans is not None:
        return 0
    return 0 if report.legal and (report.quote is None or report.quote.fits) else 1


def _variables(texts: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise BadInputError(f"--set {text!r}: expected NAME=VALUE, such as --set NNODES=4.")
        found[name] = value
    return found


def _completed(settings: Settings, args: argparse.Namespace) -> Settings:
    from dataclasses import replace

    return replace(
        settings,
        devices=args.devices or settings.devices,
        global_batch=args.global_batch or settings.global_batch,
        sequence=args.sequence or settings.sequence,
    )


def _pricer(settings: Settings, args: argparse.Namespace, say: Callable[[str], None]) -> Pricer:
    from autoplan.importing.model import model_of
    from autoplan.planner.pricer import Pricer
    from autoplan.targets import targets

    return Pricer(
        model_of(settings) if args.model is None else args.model,
        hw=args.hw,
        devices=settings.devices,
        global_batch=settings.global_batch,
        dtype=settings.dtype,
        sizes=_sizes(settings, args),
        layouts=settings.framework if settings.framework in targets() else "",
        say=say,
    )


def _sizes(settings: Settings, args: argparse.Namespace) -> dict[str, int]:
    fixed = args.model is None and not settings.gated and settings.model.get("experts", 0) < 2
    return {} if fixed or not settings.sequence else {"sequence": settings.sequence}


def _replans(settings: Settings, args: argparse.Namespace, say: Callable[[str], None]) -> list[Replan]:
    """New plans for the framework of the script, the sturdiest first."""
    from autoplan.cli.top import error_band
    from autoplan.hardware import load_profile
    from autoplan.importing.model import model_of
    from autoplan.importing.replan import replan_flags
    from autoplan.planner.driver import Request, search_request
    from autoplan.planner.top import sturdiest
    from autoplan.targets import targets

    if settings.framework not in targets():
        known = ", ".join(name for name in targets() if name != "autoplan")
        raise BadInputError(f"--replan: expected a script of {known}, this one is {settings.framework}'s.")
    source = model_of(settings) if args.model is None else args.model
    request = Request(
        str(args.model or args.script),
        args.hw,
        settings.devices,
        settings.global_batch,
        settings.dtype,
        None,
        _sizes(settings, args),
        target=settings.framework,
    )
    band = error_band(load_profile(args.hw))[0] if args.top > 1 else 0.0
    plans = search_request(source, request, say, band=band)
    chosen = [one.plan for one in sturdiest(plans, band, args.top)]
    text = args.script.read_text(encoding="utf-8")
    return [replan_flags(settings, plan, text) for plan in chosen]


def _replans_told(report: ImportReport, replans: list[Replan]) -> list[dict[str, Any]]:
    return [
        {
            "step_time_s": _step_s(one),
            "relative": _relative(report, one),
            "changes": [asdict(change) for change in one.changes],
            "environment": dict(one.environment),
            "append": one.paste,
        }
        for one in replans
    ]


def _step_s(replan: Replan) -> float:
    assert replan.plan.prediction is not None
    return replan.plan.prediction.step_time_s


def _relative(report: ImportReport, replan: Replan) -> float | None:
    return None if report.quote is None else _step_s(replan) / report.quote.step_time_s - 1


def _say_replans(report: ImportReport, replans: list[Replan]) -> None:
    from autoplan.importing.replan import text_of
    from autoplan.plan_table import part_text

    for index, one in enumerate(replans):
        relative = _relative(report, one)
        against = "" if relative is None else f" ({relative:+.1%} against the script)"
        print(f"\nplan {index + 1}: {part_text(one.plan.parts[0])}")
        print(f"{seconds_text(_step_s(one))} a step{against}")
        print(text_of(replans, index))
        if one.paste:
            print(f"to append, once the lines with - are out:\n  {one.paste}")


def _told(report: ImportReport) -> dict[str, Any]:
    settings, quote = report.settings, report.quote
    shown = {name: value for name, value in asdict(settings).items() if name not in ("said", "environment")}
    told: dict[str, Any] = {
        "settings": shown,
        "legal": report.legal,
        "findings": [asdict(finding) for finding in report.findings],
        "pins": list(report.pins),
        "unpriced": report.unpriced,
        "wasted": list(report.wasted),
        "changes": [asdict(change) for change in report.changes],
        "fits": None,
        "step_time_s": None,
    }
    if quote is None:
        return told
    from autoplan.report.quote import quote_json

    return told | quote_json(quote)


def _say(report: ImportReport) -> None:
    s = report.settings
    degrees = " x ".join(f"{axis} {getattr(s, axis)}" for axis in ("pp", "cp", "ep", "tp"))
    where = f"{s.devices} devices" if s.devices else "an unknown number of devices"
    print(f"{s.framework}: {degrees} on {where}, micro-batch {s.micro_batch}, {s.dtype}, ZeRO {s.zero}")
    if s.unknown:
        print(f"taken from elsewhere, not known here: {', '.join(s.unknown)} (--set NAME=VALUE)")
    for finding in report.findings:
        print(f"{finding.severity}: {finding.rule}: {finding.text}")
    print("legal" if report.legal else "ILLEGAL: the framework refuses to start")
    if report.unpriced:
        print(f"not priced: {report.unpriced}")
    if report.quote is not None:
        _say_price(report)


def _say_price(report: ImportReport) -> None:
    from autoplan.report.quote import memory_lines, step_line

    quote = report.quote
    assert quote is not None
    print("\n".join([*memory_lines(quote), step_line(quote)]))
    for text in report.wasted:
        print(f"wasted: {text}")
    for change in report.changes:
        print(f"better: {change.text}: {change.relative:+.1%} ({seconds_text(change.step_time_s)} a step)")
