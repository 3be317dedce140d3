"""Consecutive regions that run alike, as one line: ``layers.0``, ``layers.1`` to ``layers.0-1`` and back."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoplan.plan import RegionPlan

_NUMBER = re.compile(r"(0|[1-9]\d*)")
_LONGEST_RUN = 100_000  # a typo in a file must not fill the memory
_RANGE = re.compile(r"(0|[1-9]\d*)-(0|[1-9]\d*)")


@dataclass(frozen=True)
class RegionRun:
    """``names`` are consecutive regions with one layout and one recompute; ``label`` names them all."""

    names: tuple[str, ...]
    layout: str
    recompute: str

    @property
    def label(self) -> str:
        return range_label(self.names)


def fold_regions(regions: Sequence[RegionPlan]) -> tuple[RegionRun, ...]:
    """``layers.0, layers.1, ..., layers.15 -> layers.0-15`` where layout and recompute are equal too."""
    runs: list[RegionRun] = []
    for region in regions:
        last = runs[-1] if runs else None
        alike = last is not None and (last.layout, last.recompute) == (region.layout, region.recompute)
        if last is not None and alike and _follows(last, region.region):
            runs[-1] = replace(last, names=(*last.names, region.region))
        else:
            runs.append(RegionRun((region.region,), region.layout, region.recompute))
    return tuple(runs)


def _follows(run: RegionRun, name: str) -> bool:
    """Whether ``name`` is the next of the run, counting in the component the run counts in."""
    step = _counted_component(run.names[-1], name)
    if step is None:
        return False
    return len(run.names) == 1 or step == _counted_component(run.names[-2], run.names[-1])


def _counted_component(before: str, after: str) -> int | None:
    """Index of the one dotted component that goes from n to n + 1, or None."""
    a, b = before.split("."), after.split(".")
    differing = [i for i, (x, y) in enumerate(zip(a, b)) if x != y]
    if len(a) != len(b) or len(differing) != 1:
        return None
    (at,) = differing
    numbers = _NUMBER.fullmatch(a[at]) and _NUMBER.fullmatch(b[at])
    return at if numbers and int(b[at]) == int(a[at]) + 1 else None


def range_label(names: Sequence[str]) -> str:
    """``("m.0.a", "m.1.a", "m.2.a") -> "m.0-2.a"``; one name stays as it is."""
    first, last = names[0], names[-1]
    if first == last:
        return first
    pairs = zip(first.split("."), last.split("."))
    return ".".join(x if x == y else f"{x}-{y}" for x, y in pairs)


def expand_range(label: str) -> tuple[str, ...] | None:
    """Inverse of :func:`range_label`; None where ``label`` holds no ascending range, or more than one."""
    components = label.split(".")
    ranges = [(i, match) for i, text in enumerate(components) if (match := _RANGE.fullmatch(text))]
    if len(ranges) != 1:
        return None
    ((at, match),) = ranges
    first, last = int(match[1]), int(match[2])
    if not 0 < last - first < _LONGEST_RUN:
        return None
    return tuple(".".join((*components[:at], str(n), *components[at + 1 :])) for n in range(first, last + 1))


def container_of(region: str) -> str:
    """``model.layers.3 -> model.layers``; empty for a region that is no block."""
    found = re.fullmatch(r"(.+)\.\d+", region)
    return found[1] if found and found[1] != "glue" else ""


def fold_names(names: Sequence[str]) -> list[str]:
    """``layers.0, layers.1, layers.5 -> ["layers.0-1", "layers.5"]``."""
    return [run.label for run in fold_regions([RegionPlan(name, "") for name in names])]
