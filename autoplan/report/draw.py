"""DOT text in, SVG or PNG out, by Graphviz's ``dot`` or, without it, the pure port ``graphviz-pure``."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import graphviz

from autoplan.errors import BadInputError
from autoplan.output_files import write_file

FORMATS = ("svg", "png")
_PURE = "graphviz-pure"
_DPI = 144  # sharp on a doubled screen; SVG has no dots
_LIMIT_S = 120


def write_picture(dot_text: str, path: str | Path, form: str) -> None:
    """Render to ``path`` as ``form`` (one of FORMATS); BadInputError where that cannot be done."""
    write_file(path, render(dot_text, form))


def render(dot_text: str, form: str) -> bytes:
    """The picture's bytes."""
    source = dot_text if form == "svg" else dot_text.replace("graph [", f"graph [dpi={_DPI}, ", 1)
    if shutil.which("dot"):
        return graphviz.Source(source).pipe(format=form)
    return _render_pure(source, form)


def _render_pure(source: str, form: str) -> bytes:
    beside = Path(sys.executable).with_name(_PURE)
    command = shutil.which(_PURE) or (str(beside) if beside.exists() else None)
    if command is None:
        raise BadInputError(
            f"expected Graphviz to draw with, found neither `dot` nor `{_PURE}`.\n"
            f"Type `pip install {_PURE}`, or write the source alone with --dot FILE."
        )
    done = subprocess.run(
        [command, f"-T{form}"], input=source.encode(), capture_output=True, timeout=_LIMIT_S, check=False
    )
    if done.returncode or not done.stdout:
        reason = done.stderr.decode(errors="replace").strip()
        raise BadInputError(f"{_PURE} could not draw the plan: {reason}")
    return done.stdout
