"""Forecasts come in; how good they are goes out, by source and chip and in total.

Totals are medians over the groups of each group's value, so that a source with many small runs does not
drown the others.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from autoplan.validation.pricing import Forecast


@dataclass(frozen=True)
class Score:
    """One source on one chip. Errors are fractions of what was measured; None where nothing was.

    ``rank_correlation`` (Spearman) and ``regret`` (how much slower the configuration with the best forecast
    is than the best measured) are over runs that differ only in configuration, means weighted by runs.
    ``oom_refused`` of ``oom`` published as out of memory are refused, ``running_refused`` of ``running``
    published as running.
    """

    source: str
    chip: str
    points: int
    skipped: int
    step_time_median_error: float | None
    step_time_p90_error: float | None
    step_time_bias: float | None
    memory_points: int
    memory_median_error: float | None
    memory_bias: float | None
    rank_correlation: float | None
    regret: float | None
    compared: int
    oom: int
    oom_refused: int
    running: int
    running_refused: int


# What a total is a median of; everything else is summed.
MEDIANS = (
    *("step_time_median_error", "step_time_p90_error", "step_time_bias", "memory_median_error"),
    *("memory_bias", "rank_correlation", "regret"),
)


def scores(forecasts: Iterable[Forecast]) -> list[Score]:
    """One score for each source and chip, in the order they come."""
    groups: dict[tuple[str, str], list[Forecast]] = {}
    for forecast in forecasts:
        groups.setdefault((forecast.point.subset, forecast.point.chip), []).append(forecast)
    return [_score(source, chip, members) for (source, chip), members in groups.items()]


def _score(source: str, chip: str, members: Sequence[Forecast]) -> Score:
    priced = [forecast for forecast in members if not forecast.skipped]
    steps = [error for forecast in priced if (error := forecast.step_error) is not None]
    memory = [error for forecast in priced if (error := forecast.memory_error) is not None]
    correlation, regret, compared = _ranking(priced)
    failed = [forecast for forecast in priced if forecast.point.out_of_memory]
    ran = [forecast for forecast in priced if not forecast.point.out_of_memory]
    return Score(
        source=source,
        chip=chip,
        points=len(priced),
        skipped=len(members) - len(priced),
        step_time_median_error=_median([abs(error) for error in steps]),
        step_time_p90_error=_high([abs(error) for error in steps]),
        step_time_bias=_median(steps),
        memory_points=len(memory),
        memory_median_error=_median([abs(error) for error in memory]),
        memory_bias=_median(memory),
        rank_correlation=correlation,
        regret=regret,
        compared=compared,
        oom=len(failed),
        oom_refused=sum(forecast.refused for forecast in failed),
        running=len(ran),
        running_refused=sum(forecast.refused for forecast in ran),
    )


def total(groups: Sequence[Score]) -> dict[str, Any]:
    """The sum of counts and the median over groups of each group's value."""
    found: dict[str, Any] = {}
    for field in fields(Score):
        values = [getattr(group, field.name) for group in groups]
        if field.name in MEDIANS:
            found[field.name] = _median([value for value in values if value is not None])
        elif field.name not in ("source", "chip"):
            found[field.name] = sum(values)
    return found


def skip_reasons(forecasts: Iterable[Forecast]) -> dict[str, int]:
    """How many points were skipped, by reason, the most first."""
    counts = Counter(forecast.skipped for forecast in forecasts if forecast.skipped)
    return dict(counts.most_common())


def worst(forecasts: Iterable[Forecast], count: int = 10) -> list[Forecast]:
    """The points whose step time is furthest off, by the factor between forecast and measurement."""
    told = [forecast for forecast in forecasts if forecast.step_error is not None]
    return sorted(told, key=lambda f: -abs(math.log(1 + (f.step_error or 0.0))))[:count]


def _ranking(priced: Sequence[Forecast]) -> tuple[float | None, float | None, int]:
    """Rank correlation, regret, and how many runs stand in a group of at least three (two for the regret)."""
    groups: dict[tuple[object, ...], list[Forecast]] = {}
    for forecast in priced:
        if forecast.step_error is not None:
            groups.setdefault(forecast.point.workload_key, []).append(forecast)
    compared = [members for members in groups.values() if len(members) > 1]
    ranked = [members for members in compared if len(members) > 2]
    return (
        _weighted(ranked, _correlation),
        _weighted(compared, _regret),
        sum(len(members) for members in compared),
    )


def _weighted(
    groups: Sequence[Sequence[Forecast]], value: Callable[[Sequence[Forecast]], float]
) -> float | None:
    if not groups:
        return None
    return sum(len(members) * value(members) for members in groups) / sum(map(len, groups))


def _correlation(members: Sequence[Forecast]) -> float:
    """Spearman's, with equal values at their mean rank; 0 where one side does not vary."""
    predicted = _ranks([forecast.step_s for forecast in members])
    measured = _ranks([forecast.point.step_time_s or 0.0 for forecast in members])
    if len(set(predicted)) == 1 or len(set(measured)) == 1:
        return 0.0
    return statistics.correlation(predicted, measured)


def _ranks(values: Sequence[float]) -> list[float]:
    return [
        sum(other < value for other in values) + (sum(other == value for other in values) - 1) / 2
        for value in values
    ]


def _regret(members: Sequence[Forecast]) -> float:
    chosen = min(members, key=lambda forecast: forecast.step_s)
    best = min(forecast.point.step_time_s or math.inf for forecast in members)
    return (chosen.point.step_time_s or math.inf) / best - 1


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _high(values: Sequence[float]) -> float | None:
    """The 90th percentile."""
    return sorted(values)[int(0.9 * (len(values) - 1))] if values else None


def as_json(score: Score) -> dict[str, Any]:
    return asdict(score)
