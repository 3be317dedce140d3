"""One line of progress on standard error for anything longer than two seconds; silent when not wanted."""

from __future__ import annotations

import contextlib
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
