"""Columns for bounds: they need no more memory than any run of them would, so no run is faster.

Comes in: a chain. Goes out: a column pricer whose columns fit whenever the real ones do.

With k micro-batches in flight, S the saved bytes of one and tau_o the transient of recompute option o, a
stage's peak is at least, for every option o that n_o > 0 regions of some kind use,

    (k-1) S + n_o saved_o + (least saved by the kinds before) + tau_o      the last of them runs backward
    k S + min tau - (saved after)                                          all but what comes after a run
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autoplan.planner.chain import Chain
from autoplan.planner.mixes import ColumnPricer, Counts, Floats, Mix, Room, splits_of, totals_of
from autoplan.schedules import Moment


@dataclass(frozen=True)
class Points:
    """Mixes whose largest transient is ``peak_bytes``: all saved bytes, those of its users, extra time.

    Point i is split ``i // len(others)`` of the regions of ``key`` with mix ``i % len(others)`` of the rest.
    """

    key: str
    splits: Sequence[tuple[int, int, int]]
    others: Sequence[Mix]
    peak_bytes: float
    saved_bytes: Floats
    own_bytes: Floats
    extra_s: Floats


class RelaxedPricer(ColumnPricer):
    """Columns at the least memory any run of them needs: whether they fit in truth, pricing them says."""

    def __init__(self, chain: Chain) -> None:
        super().__init__(chain)
        if chain.stages > 1:
            self.arriving_bytes = 0.0  # a small stage has less on its way
        self._first_run: dict[str, int] = {}
        self._last_run: dict[str, int] = {}
        for index, run in enumerate(self.runs):
            self._first_run.setdefault(run.key, index)
            self._last_run[run.key] = index
        self._points = functools.cache(self._all_points)
        self._least = functools.cache(self._least_extra)

    def mix(
        self, counts: Counts, rooms: tuple[Room, ...], takes: tuple[tuple[int, int], ...]
    ) -> tuple[float, Mix] | None:
        return self._least(counts, rooms, self._least_peak(takes))

    def _kept(self, moment: Moment, chunk: int) -> int:
        return moment.deferred[chunk]

    def _least_extra(
        self, counts: Counts, rooms: tuple[Room, ...], least_peak: float
    ) -> tuple[float, Mix] | None:
        best: tuple[float, Mix] | None = None
        for points in self._points(counts):
            fits = np.full(points.saved_bytes.shape, True)
            for room in rooms:
                fits &= room.alive * points.saved_bytes + room.running * least_peak <= room.bytes
                if room.running:
                    own = points.own_bytes + points.peak_bytes
                    fits &= (room.alive - 1) * points.saved_bytes + own <= room.bytes
            if fits.any():
                index = int(np.argmin(np.where(fits, points.extra_s, np.inf)))
                extra_s = float(points.extra_s[index])
                if best is None or extra_s < best[0]:
                    split, other = divmod(index, len(points.others))
                    best = extra_s, (*points.others[other], (points.key, points.splits[split]))
        return best

    def _all_points(self, counts: Counts) -> list[Points]:
        return list(self._build_points(counts))

    def _build_points(self, counts: Counts) -> Iterator[Points]:
        """Every mix, grouped by which kind's option has the largest transient."""
        for index, (key, count) in enumerate(counts):
            for option in self.kinds[key].allowed:
                peak = self.kinds[key].transient_bytes[option]
                within = [
                    tuple(o for o in self.kinds[k].allowed if self.kinds[k].transient_bytes[o] <= peak)
                    for k, _ in counts
                ]
                if all(within):
                    yield self._points_of(counts, within, index, count, option)

    def _points_of(
        self, counts: Counts, within: list[tuple[int, ...]], index: int, count: int, option: int
    ) -> Points:
        kind = self.kinds[counts[index][0]]
        others = self.merge(counts[:index] + counts[index + 1 :], within[:index] + within[index + 1 :], 0.0)
        splits = [split for split in splits_of(count, within[index]) if split[option] > 0]
        saved, extra = totals_of(kind, splits)
        own = np.array([split[option] for split in splits]) * kind.saved_bytes[option]
        own += self._saved_before(counts, index)
        return Points(
            key=counts[index][0],
            splits=splits,
            others=others.mixes,
            peak_bytes=kind.transient_bytes[option],
            saved_bytes=(saved[:, None] + others.saved_bytes[None, :]).ravel(),
            own_bytes=np.repeat(own, len(others.saved_bytes)),
            extra_s=(extra[:, None] + others.extra_s[None, :]).ravel(),
        )

    def _saved_before(self, counts: Counts, index: int) -> float:
        """What the kinds that lie wholly before this one keep at least: alive while it runs backward."""
        first = self._first_run[counts[index][0]]
        before = [(self.kinds[key], n) for key, n in counts if self._last_run[key] < first]
        return sum(n * min(kind.saved_bytes[o] for o in kind.allowed) for kind, n in before)

    def _least_peak(self, takes: tuple[tuple[int, int], ...]) -> float:
        """The most, over runs, of a run's least transient less what the regions after it can have saved."""
        after, peak = 0.0, 0.0
        for run, taken in reversed(takes):
            kind = self.kinds[self.runs[run].key]
            peak = max(peak, min(kind.transient_bytes[o] for o in kind.allowed) - after)
            after += taken * max(kind.saved_bytes[o] for o in kind.allowed)
        return peak
