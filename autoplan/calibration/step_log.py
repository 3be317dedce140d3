"""The log of a training run in, the seconds of its steps out: warm-up dropped, outliers apart.

Lines are recognised as these write them: Megatron-LM (``training_log`` in ``megatron/training/training.py``),
torchtitan (``MetricsProcessor.log`` in ``torchtitan/components/metrics.py``: tokens a second of a device) and
autoplan (``AUTOPLAN_STEP_LOG``, one JSON object a step).
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autoplan.errors import BadInputError

WARM_UP = 3  # lines dropped, but never more than a third of them
LEAST_STEPS = 3
OUTLIER_DEVIATIONS = 5.0  # from the median, in robust standard deviations, and by at least OUTLIER_SHARE
OUTLIER_SHARE = 0.05
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_NUMBER = r"([\d,]+(?:\.\d+)?(?:[eE][+-]?\d+)?)"
# (who writes it, its line with step and number, what the number is)
FORMATS: tuple[tuple[str, re.Pattern[str], str], ...] = (
    (
        "megatron",
        re.compile(rf"iteration\s+(\d+)/\s*\d+ \|.*?elapsed time per iteration \(ms\): {_NUMBER}"),
        "ms",
    ),
    ("torchtitan", re.compile(rf"\bstep:\s*(\d+)\s+loss:.*?\btps:\s*{_NUMBER}"), "tokens/s"),
    ("autoplan", re.compile(rf'"autoplan_step":\s*(\d+),\s*"seconds":\s*{_NUMBER}'), "s"),
)


@dataclass(frozen=True)
class StepTimes:
    """What a run's steps took. ``spread`` is half of what lies between the 10th and 90th percentile, over the
    median; ``outliers`` are (step, seconds) left out of both."""

    written_by: str
    steps: int
    warm_up: int
    median_s: float
    spread: float
    outliers: tuple[tuple[int, float], ...]


def read_step_times(path: Path, tokens_per_device: float, warm_up: int = WARM_UP) -> StepTimes:
    """The step times in a log; ``tokens_per_device`` is of one step (tokens over devices), for torchtitan.

    Raises BadInputError where no line is known, or too few.
    """
    try:
        text = _ANSI.sub("", path.read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        raise BadInputError(f"cannot read the log {path}: {error.strerror}.") from None
    for name, pattern, unit in FORMATS:
        rows = {int(step): float(number.replace(",", "")) for step, number in pattern.findall(text)}
        if rows:
            times = [(step, _seconds(value, unit, tokens_per_device)) for step, value in sorted(rows.items())]
            return _summary(name, times, warm_up, path)
    raise BadInputError(
        f"{path} has no line with a step's time: expected Megatron's `elapsed time per iteration (ms): ...`, "
        "torchtitan's `step: ... tps: ...`, or autoplan's own `{\"autoplan_step\": ...}` (run with "
        "AUTOPLAN_STEP_LOG=FILE)."
    )


def _seconds(value: float, unit: str, tokens_per_device: float) -> float:
    if unit == "tokens/s":
        return tokens_per_device / max(value, 1e-9)
    return value * 1e-3 if unit == "ms" else value


def _summary(name: str, times: Sequence[tuple[int, float]], warm_up: int, path: Path) -> StepTimes:
    dropped = min(warm_up, len(times) // 3)
    kept = times[dropped:]
    if len(kept) < LEAST_STEPS:
        raise BadInputError(
            f"{path} has {len(times)} steps: expected at least {LEAST_STEPS} after the first ones, which "
            "warm up."
        )
    middle = statistics.median(s for _, s in kept)
    deviation = 1.4826 * statistics.median(abs(s - middle) for _, s in kept)
    limit = max(OUTLIER_DEVIATIONS * deviation, OUTLIER_SHARE * middle)
    outliers = tuple(row for row in kept if abs(row[1] - middle) > limit)
    usual = sorted(s for _, s in kept if abs(s - middle) <= limit)
    low, high = (usual[round(share * (len(usual) - 1))] for share in (0.1, 0.9))
    median = statistics.median(usual)
    return StepTimes(name, len(usual), dropped, median, (high - low) / 2 / median, outliers)
