"""Recompute of the first blocks of every stage, as frameworks have it: a chain in, its columns and cuts out.

Comes in: a :class:`~autoplan.planner.chain.Chain` whose ``first`` says how blocks are recomputed (None: each
region by itself). Goes out: the column pricers of the stage search, and solutions over every legal count.
Where all stages recompute equally many, each count is a chain of its own: with n more blocks recomputed no
stage is faster, so that counts are tried upwards until no boundaries are fast enough even in endless memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from autoplan.plan import RECOMPUTE
from autoplan.planner.balance import balanced_cut, fits_within
from autoplan.planner.chain import NEVER, Chain, Cut, Solved, even_ends
from autoplan.planner.interleave import boundaries_bound_s, move_ends
from autoplan.planner.mixes import ColumnPricer, Counts, Mix, Room
from autoplan.planner.rank_room import RankRoom, stages_of
from autoplan.planner.relaxed import RelaxedPricer

NONE, FULL = RECOMPUTE.index("none"), RECOMPUTE.index("full")
ENDLESS_BYTES = 2.0**60
Takes = tuple[tuple[int, int], ...]


def certain_pricer(chain: Chain) -> ColumnPricer:
    """Columns that fit for certain."""
    return ColumnPricer(chain) if chain.first is None else FirstBlocksPricer(chain)


def relaxed_pricer(chain: Chain) -> RelaxedPricer:
    """Columns for bounds."""
    return RelaxedPricer(chain) if chain.first is None else RelaxedFirstBlocksPricer(chain)


def _mixes(pricer: ColumnPricer, counts: Counts, takes: Takes) -> Iterator[tuple[float, Mix, float, float]]:
    """(extra seconds, mix, saved bytes, largest transient) of every legal number of first blocks, upwards."""
    first = pricer.chain.first
    assert first is not None
    blocks = [(pricer.runs[run].key, n) for run, n in takes if first.blocks[pricer.runs[run].first]]
    most = sum(n for _, n in blocks)
    for count in range(most + 1) if first.count is None else (min(first.count, most),):
        left, full = count, dict.fromkeys((key for key, _ in counts), 0)
        for key, n in blocks:
            full[key] += min(left, n)
            left -= min(left, n)
        mix = tuple((key, (n - full[key], 0, full[key])) for key, n in counts)
        used = [(pricer.kinds[key], o, n) for key, split in mix for o, n in enumerate(split) if n]
        if all(kind.extra_s[o] < NEVER for kind, o, _ in used):
            saved = sum(kind.saved_bytes[o] * n for kind, o, n in used)
            peak = max(kind.transient_bytes[o] for kind, o, _ in used)
            yield sum(kind.extra_s[o] * n for kind, o, n in used), mix, saved, peak


class FirstBlocksPricer(ColumnPricer):
    """Columns whose first blocks are recomputed."""

    def mix(self, counts: Counts, rooms: tuple[Room, ...], takes: Takes) -> tuple[float, Mix] | None:
        for extra_s, mix, saved, peak in _mixes(self, counts, takes):
            if all(room.alive * saved + room.running * peak <= room.bytes for room in rooms):
                return extra_s, mix
        return None


class RelaxedFirstBlocksPricer(RelaxedPricer):
    """The same at the least memory that any run of them needs."""

    def mix(self, counts: Counts, rooms: tuple[Room, ...], takes: Takes) -> tuple[float, Mix] | None:
        least_peak = self._least_peak(takes)
        for extra_s, mix, saved, _ in _mixes(self, counts, takes):
            if all(room.alive * saved + room.running * least_peak <= room.bytes for room in rooms):
                return extra_s, mix
        return None


def variants(chain: Chain) -> Sequence[Chain]:
    """The chains to be solved one by one, fewest recomputed blocks first."""
    first = chain.first
    if first is None or first.count is not None or not (first.alike or chain.vpp > 1):
        return (chain,)
    return [replace(chain, first=replace(first, count=count)) for count in first.counts]


def is_in_time(chain: Chain, incumbent_s: float) -> bool:
    """Whether some boundaries could beat the incumbent if memory were endless."""
    if incumbent_s == NEVER:
        return True
    endless = replace(chain, limit_bytes=ENDLESS_BYTES)
    return fits_within(certain_pricer(endless), incumbent_s / chain.microbatches)


def first_balanced(chain: Chain) -> Cut | None:
    """The balanced cut of the least recompute that fits, found by bisection, or by trying all."""
    options = variants(chain)
    cuts = {len(options) - 1: _balanced(options[-1])}
    low, high = 0, len(options) - 1
    if cuts[high] is None:
        return next((cut for option in options if (cut := _balanced(option)) is not None), None)
    while low < high:
        middle = (low + high) // 2
        cuts[middle] = _balanced(options[middle])
        low, high = (low, middle) if cuts[middle] is not None else (middle + 1, high)
    return cuts[high]


def _balanced(chain: Chain) -> Cut | None:
    return balanced_cut(certain_pricer(chain)) or balanced_cut(relaxed_pricer(chain))


def interleaved_first(chain: Chain, *, incumbent_s: float = NEVER) -> Solved:
    """Cuts of several stages a rank whose first blocks are recomputed, as few as fit, and the bound on their
    boundaries, whatever is recomputed under them."""
    least = [min(item.allowed) for item in chain.items]
    ends = move_ends(chain, even_ends(chain), least)
    bound_s = boundaries_bound_s(chain, ends, least)
    if bound_s >= incumbent_s:
        return Solved((), bound_s)
    for option in variants(chain):
        options = _first_options(option, ends)
        if options is not None and _ranks_fit(option, ends, options):
            return Solved((Cut(tuple(ends), tuple(RECOMPUTE[o] for o in options)),), bound_s)
    return Solved((), bound_s)


def _first_options(chain: Chain, ends: Sequence[int]) -> list[int] | None:
    """The recompute of every region, or None where a pin is against it."""
    first = chain.first
    assert first is not None and first.count is not None
    options: list[int] = []
    for start, end in pairwise([0, *ends]):
        left = first.count
        for region in range(start, end):
            full = first.blocks[region] and left > 0
            left -= full
            options.append(FULL if full else NONE)
    legal = all(option in item.allowed for option, item in zip(options, chain.items))
    return options if legal else None


def _ranks_fit(chain: Chain, ends: Sequence[int], options: Sequence[int]) -> bool:
    spans = list(pairwise([0, *ends]))
    for rank in range(chain.ranks):
        stages = stages_of(chain, ends, rank)
        held = [s.held(options[first:end]) for s, (first, end) in zip(stages, spans[rank :: chain.ranks])]
        if RankRoom(chain, rank, stages).peak_bytes(held) > chain.limit_bytes - chain.arriving_bytes:
            return False
    return True
