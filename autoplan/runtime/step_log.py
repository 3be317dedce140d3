"""The steps of a run in, one JSON line each with its seconds out, where ``AUTOPLAN_STEP_LOG`` names a file.

``autoplan hw calibrate --from-log`` reads it. The seconds are those from one step's end to the next one's,
the optimizer and the data between them included; nothing waits for the device.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from autoplan.errors import BadInputError

VARIABLE = "AUTOPLAN_STEP_LOG"


class StepLog:
    """Writes on rank 0; nothing where the variable is not set."""

    def __init__(self, rank: int) -> None:
        path = os.environ.get(VARIABLE, "")
        self._path = Path(path) if path and rank == 0 else None
        self._last_s: float | None = None

    def note(self, step: int) -> None:
        """A step has ended."""
        if self._path is None:
            return
        now_s = time.perf_counter()
        if self._last_s is not None:
            line = json.dumps({"autoplan_step": step, "seconds": round(now_s - self._last_s, 6)})
            try:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")
            except OSError as error:
                raise BadInputError(f"{VARIABLE}={self._path}: cannot write: {error.strerror}.") from None
        self._last_s = now_s
