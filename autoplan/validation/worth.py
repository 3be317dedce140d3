"""What a chip's predictions are worth: forecasts of published runs in, a small table by chip out, and back.

``autoplan validate --record`` writes the table into the project; every plan prints its chip's line.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import yaml

if TYPE_CHECKING:
    from autoplan.validation.pricing import Forecast

TABLE = Path(__file__).parent / "worth.yaml"
HEADER = "# Written by `autoplan validate --record`: errors of predicted step times, by profile.\n"


@dataclass(frozen=True)
class Worth:
    """How far a profile's predicted step times are off: the median over its sources of each one's median.

    ``bias`` is signed: positive where predictions are too slow.
    """

    points: int
    sources: int
    median_error: float
    bias: float

    def __str__(self) -> str:
        plural = "s" if self.sources > 1 else ""
        return (
            f"validated on {self.points} published runs of {self.sources} source{plural}: median error "
            f"{self.median_error:.1%}, bias {self.bias:+.1%}"
        )


def worth_by_profile(forecasts: Iterable[Forecast]) -> dict[str, Worth]:
    """One entry for each profile with at least one priced run whose step time was measured."""
    errors: dict[str, dict[str, list[float]]] = {}
    for forecast in forecasts:
        profile, error = forecast.point.profile, forecast.step_error
        if profile is not None and error is not None:
            errors.setdefault(profile, {}).setdefault(forecast.point.subset, []).append(error)
    return {
        profile: Worth(
            points=sum(map(len, sources.values())),
            sources=len(sources),
            median_error=statistics.median(statistics.median(map(abs, found)) for found in sources.values()),
            bias=statistics.median(map(statistics.median, sources.values())),
        )
        for profile, sources in sorted(errors.items())
    }


def record(forecasts: Iterable[Forecast], path: Path = TABLE) -> None:
    """Write the table, rounded to a tenth of a per cent."""
    rows = {
        profile: {k: round(v, 3) if isinstance(v, float) else v for k, v in asdict(worth).items()}
        for profile, worth in worth_by_profile(forecasts).items()
    }
    path.write_text(HEADER + yaml.safe_dump(rows, sort_keys=True), encoding="utf-8")


def worth_of(profile: str, path: Path = TABLE) -> Worth | None:
    """The recorded line of a profile; None: never validated."""
    rows = cast(dict[str, dict[str, Any]], yaml.safe_load(path.read_text(encoding="utf-8")) or {})
    return Worth(**rows[profile]) if profile in rows else None


def worth_text(profile: str) -> str:
    """One sentence for a report."""
    found = worth_of(profile)
    told = str(found) if found else "never validated (no published run of it is priced)"
    return f"predictions for {profile}: {told}"
