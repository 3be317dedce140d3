"""A path and what goes into it in, the file out; or one sentence that says why it could not be written."""

from __future__ import annotations

from pathlib import Path

from autoplan.errors import BadInputError


def write_file(path: str | Path, content: str | bytes, advice: str = "") -> None:
    """Write text (as UTF-8, with the line ends it has) or bytes; BadInputError, ending in ``advice``, where
    that fails."""
    try:
        Path(path).write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        hint = f" {advice}" if advice else ""
        raise BadInputError(f"cannot write {path}: {error.strerror}.{hint}") from None
