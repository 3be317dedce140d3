"""The command ``autoplan``: parses the command line, runs one command, prints errors without a traceback."""

from __future__ import annotations

import argparse
import difflib
import errno
import importlib
import json
import keyword
import os
import sys
from collections.abc import Sequence
from typing import Any

from autoplan.errors import AutoplanError, BadInputError

COMMANDS = (
    "search",
    "show",
    "diff",
    "verify",
    "check",
    "apply",
    "run",
    "weights",
    "explain",
    "export",
    "price",
    "import",
    "validate",
    "hw",
)


class _Parser(argparse.ArgumentParser):
    """argparse whose errors are ours: one message with the nearest name, ending in what to type next."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise BadInputError(f"{message}\nType `{self.prog} --help` for the options.")

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def, override] - argparse's own overloads
        """Each command refuses what it does not know itself, so that the message names its options."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = [option for action in self._actions for option in action.option_strings]
            hint = _nearest(unknown[0].partition("=")[0], options)
            self.error(f"unknown argument{'s' * (len(unknown) > 1)} {' '.join(unknown)}.{hint}")
        return found, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices = [str(choice) for choice in action.choices or ()]
        if choices and value not in choices:
            raise argparse.ArgumentError(
                action, f"{value!r} is not one of {', '.join(choices)}.{_nearest(str(value), choices)}"
            )


def _nearest(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, 1)
    return f" Did you mean `{near[0]}`?" if near else ""


def build_parser() -> argparse.ArgumentParser:
    """The whole command line; each command lives in its own module of this package."""
    what = "Plan, prove, draw and run the parallel training of a PyTorch model."
    parser = _Parser(prog="autoplan", description=what)
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    for name in COMMANDS:
        module = f"{name}_plan" if keyword.iskeyword(name) else name
        importlib.import_module(f"autoplan.cli.{module}").add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: 0 done, 1 the answer is no, 2 bad input."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        parser = build_parser()
        args = parser.parse_args(arguments)
        if args.version:
            from importlib.metadata import version

            print(f"autoplan {version('autoplan-fx')}")
            return 0
        if not args.command:
            parser.print_help()
            return 2
        return int(args.run(args))
    except AutoplanError as error:
        if "--json" in arguments:
            print(json.dumps({"error": str(error), "kind": type(error).__name__}))
        print(f"autoplan: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("autoplan: interrupted.", file=sys.stderr)
        return 130  # what a shell reports for Ctrl-C
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print("autoplan: the disk is full: make room, or write elsewhere.", file=sys.stderr)
        return 2
