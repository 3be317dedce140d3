"""Balanced cuts without a solver: whether anything fits at all, and a good first plan.

Comes in: a chain's column pricer. Goes out: a :class:`~autoplan.planner.chain.Cut`, or None when no cut
fits. Greedy is exact for fitting: a stage that fits with more regions fits with fewer, so giving each
stage all it can hold leaves the least to the next.
"""

from __future__ import annotations

from autoplan.plan import RECOMPUTE
from autoplan.planner.chain import NEVER, Cut, Run
from autoplan.planner.mixes import Column, ColumnPricer

BISECTIONS = 14


def fits(pricer: ColumnPricer) -> bool:
    """Whether some cut of the chain fits memory."""
    return fits_within(pricer, NEVER)


def fits_within(pricer: ColumnPricer, longest_s: float) -> bool:
    """The same, with every stage in ``longest_s``."""
    return _fill(pricer, longest_s) is not None


def balanced_cut(pricer: ColumnPricer) -> Cut | None:
    """The cut whose slowest stage is fastest, by bisection on the time a stage may take."""
    best = _fill(pricer, NEVER)
    if best is None:
        return None
    low, high = 0.0, max(column.total_s for column in best)
    for _ in range(BISECTIONS if pricer.chain.stages > 1 else 0):
        middle = (low + high) / 2
        found = _fill(pricer, middle)
        if found is None:
            low = middle
        else:
            best, high = found, max(column.total_s for column in found)
    return cut_of(pricer, best)


def cut_of(pricer: ColumnPricer, columns: list[Column]) -> Cut:
    """Boundaries and, per region, its recompute: within a stage the first of each kind recompute most."""
    recompute: list[str] = []
    ends: list[int] = []
    for column in sorted(columns, key=lambda c: c.stage):
        left = {key: list(counts) for key, counts in column.counts}
        first = ends[-1] if ends else 0
        ends.append(first + sum(n for _, n in column.takes))
        for item in pricer.chain.items[first : ends[-1]]:
            option = max(o for o in range(3) if left[item.key][o] > 0)
            left[item.key][option] -= 1
            recompute.append(RECOMPUTE[option])
    return Cut(tuple(ends), tuple(recompute))


def _fill(pricer: ColumnPricer, longest_s: float) -> list[Column] | None:
    """Give each stage in turn as many regions as fit in memory and ``longest_s``."""
    regions, stages = len(pricer.chain.items), pricer.chain.stages
    columns: list[Column] = []
    first = 0
    for stage in range(stages):
        most = regions - (stages - 1 - stage)
        column = _longest(pricer, stage, first, most, longest_s)
        if column is None:
            return None
        columns.append(column)
        first += sum(n for _, n in column.takes)
    return columns if first == regions else None


def _longest(pricer: ColumnPricer, stage: int, first: int, most: int, longest_s: float) -> Column | None:
    """The column of this stage from ``first`` with the most regions that fits (binary search)."""
    low, high, best = first + 1, most, None
    while low <= high:
        end = (low + high + 1) // 2 if best else low
        takes = takes_of(pricer.runs, first, end)
        column = pricer.column(stage, joint_of(pricer.runs, first), joint_of(pricer.runs, end), takes)
        if column is not None and column.total_s <= longest_s:
            best, low = column, end + 1
        elif best is None:
            return None
        else:
            high = end - 1
    return best


def joint_of(runs: tuple[Run, ...], position: int) -> int:
    """The joint before region ``position``: 2r at the start of run r, 2r + 1 inside it."""
    for index, run in enumerate(runs):
        if position < run.first + run.length:
            return 2 * index + (position > run.first)
    return 2 * len(runs)


def takes_of(runs: tuple[Run, ...], first: int, end: int) -> tuple[tuple[int, int], ...]:
    """(run, regions taken) of the regions first..end-1."""
    takes: list[tuple[int, int]] = []
    for index, run in enumerate(runs):
        taken = min(end, run.first + run.length) - max(first, run.first)
        if taken > 0:
            takes.append((index, taken))
    return tuple(takes)
