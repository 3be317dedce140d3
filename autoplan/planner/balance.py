"""Balanced cuts without a solver: whether anything fits at all, and a good first plan.

Comes in: a chain's column pricer. Goes out: a :class:`~autoplan.planner.chain.Cut`, or None when no cut
fits. Greedy is exact for fitting: a stage that fits with more regions fits with fewer, so giving each
stage all it can hold leaves the least to the next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

from autoplan.plan import RECOMPUTE
from autoplan.planner.chain import NEVER, Chain, Cut, Run, least_once_s
from autoplan.planner.mixes import Column, ColumnPricer
from autoplan.planner.relaxed import RelaxedPricer
from autoplan.schedules import splits_backward

BISECTIONS = 14


def fits(pricer: ColumnPricer) -> bool:
    """Whether some cut of the chain fits memory."""
    return fits_within(pricer, NEVER)


def fits_within(pricer: ColumnPricer, longest_s: float) -> bool:
    """The same, with every stage in ``longest_s``."""
    return _fill(pricer, lambda _: longest_s) is not None


def could_beat(chain: Chain, incumbent_s: float) -> bool:
    """Whether some cut of a chain with one stage a rank might take less than ``incumbent_s`` seconds.

    A stage that starts at region i takes t <= (T - P(i)) / m: its m micro-batches follow the first one's way
    through the regions before it, P(i) seconds at least (and back, unless weight gradients fill that time).
    Giving each stage all it can hold within this and its memory covers most regions.
    """
    least = min(item.output_bytes for item in chain.kinds.values())
    even = {key: replace(item, output_bytes=least) for key, item in chain.kinds.items()}
    same = replace(chain, items=tuple(even[item.key] for item in chain.items))
    split = splits_backward(chain.schedule)
    whole = [i.forward_s if split else i.forward_s + i.backward_s + min(i.extra_s) for i in chain.items]
    before, left_s = [0.0, *accumulate(whole)], incumbent_s - least_once_s(chain)
    return _fill(RelaxedPricer(same), lambda first: (left_s - before[first]) / chain.microbatches) is not None


def balanced_cut(pricer: ColumnPricer) -> Cut | None:
    """The cut whose slowest stage is fastest, by bisection on the time a stage may take."""
    best = _fill(pricer, lambda _: NEVER)
    if best is None:
        return None
    low, high = 0.0, max(column.total_s for column in best)
    for _ in range(BISECTIONS if pricer.chain.stages > 1 else 0):
        middle = (low + high) / 2
        found = _fill(pricer, lambda _, most_s=middle: most_s)
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


def _fill(pricer: ColumnPricer, longest_s: Callable[[int], float]) -> list[Column] | None:
    """Give each stage in turn as many regions as fit in memory and in ``longest_s`` of its first region."""
    regions, stages = len(pricer.chain.items), pricer.chain.stages
    columns: list[Column] = []
    first = 0
    for stage in range(stages):
        most = regions - (stages - 1 - stage)
        column = _longest(pricer, stage, first, most, longest_s(first))
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
