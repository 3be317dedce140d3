"""What goes to standard error while a command works: one line of progress, and what the user's code prints.

Progress shows after two seconds and is silent when not wanted; with ``--json``, standard output is kept
for the one object.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Generator

from rich.console import Console

SHOW_AFTER_S = 2.0


@contextlib.contextmanager
def progress(*, quiet: bool = False) -> Generator[Callable[[str], None]]:
    """Yields ``say(text)``: what is being done now; shown as a spinner on a terminal, as lines elsewhere."""
    console = Console(stderr=True, quiet=quiet)
    if not console.is_terminal:
        yield _late_lines(console)
        return
    status = console.status("")
    timer = threading.Timer(SHOW_AFTER_S, status.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda text: status.update(text)
    finally:
        timer.cancel()
        status.stop()


def _late_lines(console: Console) -> Callable[[str], None]:
    """Prints a line only when two seconds have gone by since the last one."""
    import time

    last = time.monotonic()

    def say(text: str) -> None:
        nonlocal last
        if time.monotonic() - last >= SHOW_AFTER_S:
            last = time.monotonic()
            console.print(text, highlight=False)

    return say


@contextlib.contextmanager
def output_to_stderr(wanted: bool) -> Generator[None]:
    """What is printed inside (by the user's code, by child processes) goes to standard error, if wanted."""
    if not wanted:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
