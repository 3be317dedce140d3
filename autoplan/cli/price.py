"""``autoplan price``: a model and pins in, seconds and bytes of that plan out; once, or a line per request.

With ``--requests FILE`` (``-`` is standard input) every line is a JSON object with ``pins`` (a list) and
optional ``devices`` and ``global_batch``, and every answer is one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoplan.cli.search import add_workload_options, sizes_of
from autoplan.cli.subparsers import Subparsers
from autoplan.errors import AutoplanError, BadInputError
from autoplan.plan_table import part_text
from autoplan.units import seconds_text

if TYPE_CHECKING:
    from autoplan.planner.pricer import Pricer, Quote


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("price", help="price a plan made by hand", description=__doc__)
    parser.add_argument("model", help="model.py with build_model() and example_inputs(), or a config.json")
    add_workload_options(parser)
    parser.add_argument("--requests", metavar="FILE", help="price every line of a file, or of - (stdin)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0: it fits; 1: it does not. With ``--requests`` 0, and every line says for itself."""
    from autoplan.cli.progress import output_to_stderr, progress
    from autoplan.planner.pricer import Pricer

    with output_to_stderr(args.json or bool(args.requests)), progress(quiet=args.json) as say:
        pricer = Pricer(
            args.model,
            hw=args.hw,
            devices=args.devices,
            global_batch=args.global_batch,
            dtype=args.dtype or "bf16",
            optimizer=args.optimizer or "adamw",
            sizes=sizes_of(args),
            opaque=args.opaque,
            target=args.target,
            say=say,
        )
        quote = None if args.requests else pricer.price(args.pin)
    if quote is None:
        for line in _lines(args.requests):
            print(json.dumps(_answer(pricer, line)), flush=True)
        return 0
    if args.json:
        print(json.dumps(_told(quote)))
    else:
        _say(quote)
    return 0 if quote.fits else 1


def _lines(requests: str) -> Iterator[str]:
    if requests == "-":
        yield from sys.stdin
        return
    try:
        with Path(requests).open(encoding="utf-8") as file:
            yield from file
    except OSError as error:
        raise BadInputError(f"cannot read --requests {requests}: {error.strerror}.") from None


def _answer(pricer: Pricer, line: str) -> dict[str, Any]:
    """The price, or ``error`` with what was wrong with the line."""
    try:
        asked: Any = json.loads(line)
    except json.JSONDecodeError as error:
        return {"error": f'expected one JSON object a line, such as {{"pins": ["tp=8"]}}: {error}.'}
    known = {"pins", "devices", "global_batch"}
    if not isinstance(asked, dict) or not set(asked) <= known:
        return {"error": f"expected an object with {', '.join(sorted(known))} and nothing else."}
    pins = asked.get("pins", [])
    if not isinstance(pins, list) or not all(isinstance(pin, str) for pin in pins):
        return {"error": 'pins: expected a list of texts, such as ["tp=8", "pp=2"].'}
    try:
        quote = pricer.price(pins, devices=asked.get("devices"), global_batch=asked.get("global_batch"))
    except AutoplanError as error:
        return {"error": str(error)}
    return _told(quote)


def _told(quote: Quote) -> dict[str, Any]:
    from autoplan.report.quote import quote_json

    part = quote.part
    return quote_json(quote) | {
        "mesh": asdict(quote.mesh),
        "micro_batch": part.micro_batch,
        "microbatches": part.microbatches,
        "zero": part.zero,
        "schedule": part.schedule,
        "choices": quote.choices,
    }


def _say(quote: Quote) -> None:
    from autoplan.report.quote import memory_lines, step_line

    print("\n".join([part_text(quote.part), step_line(quote), *memory_lines(quote)]))
    spent = ", ".join(
        f"{name.replace('_', ' ')} {seconds_text(s)}" for name, s in quote.breakdown_s.items() if s
    )
    print(f"time: {spent}")
    if quote.choices > 1:
        print(f"the pins left {quote.choices} plans open; this is the fastest with balanced stages")
