"""What to say when nothing fits: the limit, what takes the most, and changes that were tried and do fit.

Comes in: the pricing that found nothing, and the finder that can try other settings. Goes out: the message.
"""

from __future__ import annotations

import contextlib
from typing import Protocol

from autoplan.errors import BadInputError
from autoplan.planner.pricing import Priced, Pricing
from autoplan.planner.solve import describe, first_best, first_cuts, memory_first
from autoplan.planner.space import Candidate, Pins
from autoplan.units import GIB, seconds_text

TOP = 3
HALVINGS = 7


class Finder(Protocol):
    """What can try other settings of the same search."""

    @property
    def pins(self) -> Pins: ...

    def smallest_devices(self, above: int) -> int | None: ...

    def holds(self, devices: int, batch: int | None = None, pins: Pins | None = None) -> bool: ...

    def pricing(self, devices: int, batch: int, pins: Pins) -> Pricing: ...

    def candidates(self, devices: int, batch: int, pins: Pins) -> list[Candidate]: ...


def infeasible_message(pricing: Pricing, finder: Finder, devices: int, batch: int) -> str:
    """The whole message: limit, top contributors of the tightest plan, and changes that fit."""
    limit = pricing.limit_bytes
    candidate, priced = _tightest(pricing)
    worst = max(priced.stages, key=lambda stage: stage.memory_peak_bytes)
    lines = [
        f"nothing fits: every plan on {devices} devices needs more than the {limit / GIB:.1f} GiB left for "
        f"tensors on each {pricing.profile.name}.",
        f"The smallest need is {worst.memory_peak_bytes / GIB:.1f} GiB ({describe(candidate)}), most of it:",
    ]
    lines += [f"  {item.bytes / GIB:8.2f} GiB  {item.name}" for item in worst.memory_items[:TOP]]
    changes = _changes_that_fit(finder, devices, batch)
    if changes:
        lines.append("These changes were tried and do fit:")
        lines += [f"  {change}" for change in changes]
    else:
        lines.append("No larger cluster that was tried fits either: a shorter --sequence needs less.")
    return "\n".join(lines)


def _tightest(pricing: Pricing) -> tuple[Candidate, Priced]:
    """The plan that needs the least memory, found by giving more and more of it."""
    limit = pricing.limit_bytes
    while True:
        limit *= 1.25
        found: list[tuple[float, Candidate, Priced]] = []
        for candidate in memory_first(pricing):
            cuts, _ = first_cuts(pricing.chain(candidate, limit_bytes=limit))
            for cut in cuts:
                priced = pricing.priced(candidate, cut)
                found.append((max(s.memory_peak_bytes for s in priced.stages), candidate, priced))
        if found:
            _, candidate, priced = min(found, key=lambda entry: entry[0])
            return candidate, priced


def _changes_that_fit(finder: Finder, devices: int, batch: int) -> list[str]:
    """A larger cluster, a smaller batch (fewer micro-batches wait in a pipeline), and no pins."""
    changes: list[str] = []
    smallest = finder.smallest_devices(devices)
    if smallest is not None:
        took = _took(finder, smallest, batch, finder.pins)
        changes.append(f"--devices {smallest} (the smallest count that fits){took}")
    smaller = next(
        (b for b in (batch // 2**n for n in range(1, HALVINGS)) if b and finder.holds(devices, b)), None
    )
    if smaller is not None:
        changes.append(f"--global-batch {smaller}{_took(finder, devices, smaller, finder.pins)}")
    if finder.pins != Pins() and finder.holds(devices, batch, Pins()):
        changes.append(f"the same command without --pin{_took(finder, devices, batch, Pins())}")
    return changes


def _took(finder: Finder, devices: int, batch: int, pins: Pins) -> str:
    """The predicted step of the fastest plan with balanced stages."""
    try:
        found = first_best(finder.pricing(devices, batch, pins))
    except BadInputError:
        return ""  # holds with another batch
    return f": {seconds_text(found.prediction.step_time_s)} a step" if found else ""


def without_idle(finder: Finder, devices: int, batch: int, assumptions: list[str]) -> int:
    """The devices; where no mesh of them divides the batch and nothing is pinned, the most of them that do.

    Raises the BadInputError of the search where there are none.
    """
    try:
        finder.candidates(devices, batch, finder.pins)
        return devices
    except BadInputError:
        if finder.pins != Pins():
            raise
        for fewer in range(devices - 1, max(1, devices // 2) - 1, -1):
            with contextlib.suppress(BadInputError):
                finder.candidates(fewer, batch, finder.pins)
                idle = devices - fewer
                assumptions.append(
                    f"{fewer} of {devices} devices: no mesh of them all divides the global batch of {batch}, "
                    f"so {idle} stay{'s' if idle == 1 else ''} idle (--global-batch)"
                )
                return fewer
        raise
