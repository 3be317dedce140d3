"""What mkdocs asks while it builds the pages: Markdown in, Markdown with formulas and commands out.

What stands between dollars is LaTeX and becomes MathML, which browsers draw themselves; the line
``<!-- commands -->`` becomes the help of every command, from the command line's own parser.
"""

from __future__ import annotations

import argparse
import os
import re
from typing import Any

from latex2mathml.converter import convert

from autoplan.cli import build_parser

COMMANDS = "<!-- commands -->"
# What the theme writes, and what is written instead.
INSTEAD = (
    # What lets pages opened from a folder be searched (iframe-worker 1.0.4, MIT), from elsewhere.
    ("https://unpkg.com/iframe-worker/shim", "scripts/iframe-worker.js"),
    # A dialog without a name, and code that scrolls out of a keyboard's reach.
    (
        'data-md-component="search" role="dialog"',
        'data-md-component="search" role="dialog" aria-label="Search"',
    ),
    ("<pre><span></span><code>", '<pre><span></span><code tabindex="0">'),
)
WIDTH = "92"  # columns of the help texts


def on_page_markdown(markdown: str, **_: Any) -> str:
    """One page before it is rendered; what stands in code blocks is left as it is."""
    pieces = re.split(r"(^```.*?^```$)", markdown, flags=re.DOTALL | re.MULTILINE)
    text = "".join(piece if piece.startswith("```") else _with_formulas(piece) for piece in pieces)
    return text.replace(COMMANDS, command_help()) if COMMANDS in text else text


def on_post_page(output: str, **_: Any) -> str:
    """One page after it is rendered."""
    for theirs, ours in INSTEAD:
        output = output.replace(theirs, ours)
    return output


on_post_template = on_post_page  # the page that is shown where there is none


def _with_formulas(text: str) -> str:
    """``$$`` blocks, scrollable by keyboard where they are wider than the page, and ``$`` inside a line."""
    blocks = re.sub(
        r"^\$\$\n(.*?)\n\$\$$",
        lambda match: f'<div class="formula" tabindex="0">{convert(match[1], display="block")}</div>',
        text,
        flags=re.DOTALL | re.MULTILINE,
    )
    return re.sub(r"\$([^$\n]+)\$", lambda match: f"<span>{convert(match[1])}</span>", blocks)


def command_help() -> str:
    """A section a command, in the order of ``autoplan --help``."""
    os.environ["COLUMNS"] = WIDTH
    return "\n\n".join(_section(name, parser) for name, parser in _commands(build_parser()))


def _commands(parser: argparse.ArgumentParser, prefix: str = "") -> list[tuple[str, argparse.ArgumentParser]]:
    """Every command that does something, those below another one by both names."""
    found: list[tuple[str, argparse.ArgumentParser]] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, sub in action.choices.items():
                found += _commands(sub, f"{prefix}{name} ") or [(f"{prefix}{name}", sub)]
    return found


def _section(name: str, parser: argparse.ArgumentParser) -> str:
    return f"## autoplan {name}\n\n```text\n{parser.format_help().rstrip()}\n```"
