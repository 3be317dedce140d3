"""Step times of a run and its forecast in, the share of the short-run rate that the cluster sustains out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from autoplan.calibration.step_log import StepTimes
from autoplan.hardware import HardwareProfile, Quantity

LEAST_SHARE, MOST_SHARE = 0.1, 1.0  # what a profile may say
ROUNDS, CLOSE = 8, 1e-4


@dataclass(frozen=True)
class Correction:
    """One factor from one run: ``sustained`` was ``before`` and becomes ``after`` for ``dtype``.

    ``residual`` is the corrected forecast over the measurement, less 1: not 0 where the share alone, between
    0.1 and 1, cannot explain the run.
    """

    dtype: str
    times: StepTimes
    forecast_s: float
    before: float
    after: float
    corrected_s: float

    @property
    def residual(self) -> float:
        return self.corrected_s / self.times.median_s - 1


def with_sustained(profile: HardwareProfile, dtype: str, share: float, source: str = "") -> HardwareProfile:
    """The profile with another sustained share for one dtype."""
    return replace(profile, sustained={**profile.sustained, dtype: Quantity(share, "measured", source)})


def sustained_share(profile: HardwareProfile, dtype: str) -> float:
    """What the profile has for a dtype: its own, else the first one's."""
    return profile.sustained.get(dtype, next(iter(profile.sustained.values()))).value


def correct(
    profile: HardwareProfile, dtype: str, times: StepTimes, step_s: Callable[[HardwareProfile], float]
) -> Correction:
    """The share at which the forecast is what was measured; ``step_s`` falls as the share rises.

    A step takes a + b / share, nearly: the line through two shares gives the next.
    """

    def at(share: float) -> float:
        return step_s(with_sustained(profile, dtype, share))

    before = sustained_share(profile, dtype)
    forecast_s = at(before)
    low, high = LEAST_SHARE, MOST_SHARE
    slow_s, fast_s = at(low), at(high)
    share, found_s = before, forecast_s
    if times.median_s <= fast_s:
        share, found_s = high, fast_s
    elif times.median_s >= slow_s:
        share, found_s = low, slow_s
    else:
        for _ in range(ROUNDS):
            per_inverse = (slow_s - fast_s) / (1 / low - 1 / high)
            share = 1 / (1 / high + (times.median_s - fast_s) / per_inverse)
            found_s = at(share)
            if abs(found_s / times.median_s - 1) < CLOSE:
                break
            if found_s > times.median_s:
                low, slow_s = share, found_s
            else:
                high, fast_s = share, found_s
    return Correction(dtype, times, forecast_s, before, share, found_s)
