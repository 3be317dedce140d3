"""Plans that the price model cannot tell apart: plans inside its error band in, sturdiest first out.

A proof to 1% over prices good to 5% says little about which of two plans 2% apart is faster. What can be
asked is which of them loses least where a price is off: every cause of the step (compute, each kind of
traffic, the bubble) in turn takes longer by twice the band, and a plan's regret is the most that it is then
behind the best of the list. Plans that run out of memory if that is off by the band come last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from autoplan.plan import FUSE, Plan, Prediction
from autoplan.planner.pricing import Priced

CAUSE_ERRORS = 2.0  # of one cause, in bands: the band is the error of a whole step, in which errors cancel


@dataclass(frozen=True)
class Sturdy:
    """``slower`` is against the fastest, ``regret`` as above, ``spare`` the share of memory left over."""

    plan: Plan
    slower: float
    regret: float
    spare: float


def inside_band(tried: Iterable[Priced], best: Priced, band: float) -> list[Priced]:
    """The fastest plan that fits of every candidate, slower than the best by the band at most; best first."""
    limit_s = best.prediction.step_time_s * (1 + band)
    fastest: dict[object, Priced] = {_kind(best): best}
    for priced in sorted(tried, key=lambda one: one.prediction.step_time_s):
        if priced.fits and priced.prediction.step_time_s <= limit_s:
            fastest.setdefault(_kind(priced), priced)
    return list(fastest.values())


def _kind(priced: Priced) -> object:
    return replace(priced.candidate, fuse=FUSE[0])


def sturdiest(plans: Sequence[Plan], band: float, count: int) -> tuple[Sturdy, ...]:
    """``count`` of the plans, the sturdiest first; the fastest is always among them."""
    told = [_told(plan) for plan in plans]
    fastest_s = min(one.step_time_s for one in told)
    causes = sorted({cause for one in told for cause in one.breakdown_s})
    least = {cause: min(_stretched_s(one, cause, band) for one in told) for cause in causes}
    found = [
        Sturdy(
            plan,
            one.step_time_s / fastest_s - 1,
            max(_stretched_s(one, cause, band) / least[cause] - 1 for cause in causes),
            _spare(plan),
        )
        for plan, one in zip(plans, told)
    ]
    ranked = sorted(found, key=lambda one: (one.spare < band, one.regret, one.slower))
    kept = ranked[:count]
    if not any(one.slower == 0 for one in kept):
        kept[-1] = next(one for one in ranked if one.slower == 0)
    return tuple(kept)


def _told(plan: Plan) -> Prediction:
    assert plan.prediction is not None
    return plan.prediction


def _stretched_s(told: Prediction, cause: str, band: float) -> float:
    return told.step_time_s + CAUSE_ERRORS * band * told.breakdown_s.get(cause, 0.0)


def _spare(plan: Plan) -> float:
    """Of the fullest stage."""
    stages = [stage.prediction for part in plan.parts for stage in part.stages if stage.prediction]
    return min(1 - stage.memory_peak_bytes / stage.memory_limit_bytes for stage in stages)
