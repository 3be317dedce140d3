"""Commands of a documentation page run as typed: a page in, what each printed out, compared or written back.

A ``console`` block holds a command after ``$`` and what it prints; an ``sh`` block holds commands
alone; one after ``<!-- not run -->`` is for readers.
"""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from autoplan.cli import main

BLOCK = re.compile(r"^(<!-- not run -->\n)?```(console|sh)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# What differs from run to run (seconds), from machine to machine (the last bits of sums), and with what the
# search tried on its way to the same plan.
VARYING = (
    (r"planned in import.*?total [\d.]+ \w+", "planned in a while"),
    (r"\(gap [^)]*\)", "(gap)"),
    (r"^runners-up\n.*?\n\n", ""),
    (r"Checked in [\d.]+ s, after tracing in [\d.]+ s", "Checked"),
    (r"\d\.\de[+-]\d\d( +[a-z][\w.]+)?", "rounding"),
    (r"[█░]+|─+|-{3,}", ""),
    (r"/\S+/", ""),
)
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
NEAR = 0.02


def blocks(page: str) -> Iterator[re.Match[str]]:
    """The blocks to run, in order."""
    return (match for match in BLOCK.finditer(page) if not match[1])


def run_page(page: str, capture: pytest.CaptureFixture[str]) -> str:
    """The page as it would be if it were written now: every block run, every output put in its place."""

    def rewritten(match: re.Match[str]) -> str:
        if match[1]:
            return match[0]
        if match[2] == "sh":
            for command in match[3].splitlines():
                run(command, capture)
            return match[0]
        commands = [line[2:] for line in match[3].splitlines() if line.startswith("$ ")]
        return "```console\n" + "\n".join(f"$ {one}\n{run(one, capture)}" for one in commands) + "```"

    return BLOCK.sub(rewritten, page)


def run(command: str, capture: pytest.CaptureFixture[str]) -> str:
    """What a command prints and its errors, without trailing blanks; ``autoplan`` runs in this process."""
    program, *words = shlex.split(command, comments=True)
    if program == "pytest":
        return ""  # the suite runs it
    capture.readouterr()
    if program == "python":
        run_script(Path(words[0]))
        out = capture.readouterr().out
    elif program == "autoplan":
        main(words)
        told = capture.readouterr()
        refused = [line for line in told.err.splitlines() if line.startswith("autoplan: ")]
        out = told.out + (told.err[told.err.index(refused[0]) :] if refused else "")
    else:
        done = subprocess.run([program, *words], capture_output=True, text=True, check=True)
        out = done.stdout
    return "".join(f"{line.rstrip()}\n" for line in out.strip().splitlines())


def run_script(path: Path) -> None:
    """A script as ``python`` runs it, in this process; modules beside it are forgotten again."""
    before = set(sys.modules)
    runpy.run_path(str(path), run_name="__main__")
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) in map(str, path.resolve().parent.glob("*.py")):
            del sys.modules[name]


def same_text(one: str, other: str) -> list[str]:
    """The words that differ; numbers may by ``NEAR``."""
    pairs = [_words(text) for text in (one, other)]
    found = [f"{a} | {b}" for a, b in zip(*pairs) if not _near(a, b)]
    return found + [f"{len(p)} words" for p in pairs if len(p) != min(map(len, pairs))]


def _words(text: str) -> list[str]:
    for pattern, plain in VARYING:
        text = re.sub(pattern, plain, text, flags=re.DOTALL | re.MULTILINE)
    return text.split()


def _near(one: str, other: str) -> bool:
    if one == other:
        return True
    if NUMBER.sub("#", one) != NUMBER.sub("#", other):
        return False
    values = [[float(n.replace(",", "")) for n in NUMBER.findall(text)] for text in (one, other)]
    return all(abs(a - b) <= NEAR * max(abs(a), abs(b)) for a, b in zip(*values))


def written(path: Path, page: str, update: bool) -> list[str]:
    """What differs between a page and the same page run now; ``update`` rewrites the page instead."""
    if update:
        path.write_text(page, encoding="utf-8")
        return []
    old = path.read_text(encoding="utf-8")
    return [text for before, now in zip(blocks(old), blocks(page)) for text in same_text(before[3], now[3])]
