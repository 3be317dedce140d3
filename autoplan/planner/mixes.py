"""Columns: one way to fill a stage, under the cheapest mix of recompute that fits its memory.

Comes in: a :class:`~autoplan.planner.chain.Chain`. Goes out: priced :class:`Column` records.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autoplan.planner.chain import NEVER, Chain, ChainItem, Floats, find_runs, shown_once_s
from autoplan.schedules import Moment, rank_moments

Counts = tuple[tuple[str, int], ...]
Mix = tuple[tuple[str, tuple[int, int, int]], ...]


class Room(NamedTuple):
    """At one moment of the schedule a stage keeps its saved bytes ``alive`` times, and ``bytes`` are left for
    them and for what a running region needs (``running``: some region is)."""

    alive: int
    bytes: float
    running: bool


@dataclass(frozen=True)
class Column:
    """One way to fill a stage: ``takes`` holds (run, regions taken); times under the cheapest mix that fits.

    ``start`` and ``end`` are joints: 2r before run r begins, 2r + 1 inside run r.
    """

    stage: int
    start: int
    end: int
    takes: tuple[tuple[int, int], ...]
    forward_s: float
    backward_s: float
    counts: Mix
    sync_s: float = 0.0
    update_s: float = 0.0
    weight_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class Frontier:
    """Recompute mixes whose largest transient is within ``peak_bytes``; none better exist."""

    peak_bytes: float
    saved_bytes: Floats
    extra_s: Floats
    mixes: Sequence[Mix]


class ColumnPricer:
    """Prices columns of one chain, remembering equal ones (same kinds of regions, same stage depth).

    A stage holds, at most, all its regions for every micro-batch in flight and its largest transient.
    """

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.runs = find_runs(chain)
        self.kinds = chain.kinds
        self.arriving_bytes = chain.arriving_bytes
        self._mix = functools.cache(self._cheapest_mix)
        self._frontiers = functools.cache(self._build_frontiers)
        run_of = {run.first: index for index, run in enumerate(self.runs)}
        self._shared = [(run_of[a], run_of[b], size) for a, b, size in chain.shared]

    def column(self, stage: int, start: int, end: int, takes: tuple[tuple[int, int], ...]) -> Column | None:
        """The column, or None when nothing fits."""
        totals: Counter[str] = Counter()
        for run, taken in takes:
            totals[self.runs[run].key] += taken
        counts = tuple(sorted(totals.items()))
        mix = self.mix(counts, self._rooms(stage, counts, takes, inside=start % 2 == 1), takes)
        if mix is None:
            return None
        extra_s, chosen = mix
        kinds = [(self.kinds[key], n) for key, n in counts]
        forward_s = sum(kind.forward_s * n for kind, n in kinds)
        backward_s = sum(kind.backward_s * n for kind, n in kinds) + extra_s
        return Column(
            stage=stage,
            start=start,
            end=end,
            takes=takes,
            forward_s=forward_s,
            backward_s=backward_s,
            counts=chosen,
            sync_s=self._shown_s(takes, forward_s, backward_s),
            update_s=sum(kind.once.update_s * n for kind, n in kinds),
            weight_s=sum(kind.weight_s * n for kind, n in kinds),
        )

    def _shown_s(self, takes: tuple[tuple[int, int], ...], forward_s: float, backward_s: float) -> float:
        """What reduction and gather add to a stage, at least."""
        if self.chain.stages == 1:  # a longer backward hides more of it, by as much at most
            shown_s, least_s = self.chain.once_whole_s
            shortest_s = sum(item.backward_s + min(item.extra_s) for item in self.chain.items)
            return max(least_s, shown_s - (backward_s - shortest_s))
        regions = [(self.kinds[self.runs[run].key].once, n) for run, n in takes]
        if not any(one.reduce_alone_s or one.gather_alone_s for one, _ in regions):
            return 0.0
        return shown_once_s([one for one, n in regions for _ in range(n)], forward_s, backward_s)

    def mix(
        self, counts: Counts, rooms: tuple[Room, ...], takes: tuple[tuple[int, int], ...]
    ) -> tuple[float, Mix] | None:
        """Least extra time of a stage's regions within the room at every moment, and who recomputes what."""
        del takes  # where the regions lie does not matter here
        return self._mix(counts, rooms)

    def _fixed_bytes(self, counts: Counts, takes: tuple[tuple[int, int], ...]) -> float:
        """States and gathered units of a stage, whatever is recomputed; shared parameters once."""
        touched = {run for run, _ in takes}
        twice = sum(size for a, b, size in self._shared if a in touched and b in touched)
        states = sum(self.kinds[key].static_bytes * n for key, n in counts)
        units = sorted(
            (self.kinds[key].gathered_bytes for key, n in counts for _ in range(min(n, 2))), reverse=True
        )
        return states - twice + sum(units[:2])

    def _rooms(
        self, stage: int, counts: Counts, takes: tuple[tuple[int, int], ...], *, inside: bool
    ) -> tuple[Room, ...]:
        """What is left at every moment of the schedule after states, side inputs and tensors on their way."""
        chain = self.chain
        (first, _), (last, _) = takes[0], takes[-1]
        before = self.runs[first if inside else first - 1].key
        received = self.kinds[before].output_bytes if stage else 0.0
        sent = self.kinds[self.runs[last].key].output_bytes if stage < chain.stages - 1 else 0.0
        side = sum(dict(pair for run, _ in takes for pair in self.kinds[self.runs[run].key].side).values())
        deferred = sum(self.kinds[key].deferred_bytes * n for key, n in counts)
        left = chain.limit_bytes - self._fixed_bytes(counts, takes) - self.arriving_bytes
        chunk = stage // chain.ranks
        rooms: list[Room] = []
        for moment in rank_moments(
            chain.schedule, stage % chain.ranks, chain.ranks, chain.vpp, chain.microbatches
        ):
            taken = moment.alive[chunk] * side + self._kept(moment, chunk) * deferred
            taken += moment.waits_to_receive(chunk) * received + moment.waits_to_send(chunk) * sent
            running = moment.chunk == chunk and moment.kind != "backward_weight"
            rooms.append(Room(moment.alive[chunk], float(round(left - taken)), running))
        return _tightest(rooms)

    def _kept(self, moment: Moment, chunk: int) -> int:
        """How often what weight gradients need is kept: at most once for the backward that runs, too."""
        return moment.deferred[chunk] + (moment.kind == "backward_input" and moment.chunk == chunk)

    def _cheapest_mix(self, counts: Counts, rooms: tuple[Room, ...]) -> tuple[float, Mix] | None:
        """Least extra time whose saved and transient bytes fit, with the mix of each kind.

        Exact: for every possible largest transient, only options within it are allowed and it is paid.
        """
        best: tuple[float, Mix] | None = None
        for frontier in self._frontiers(counts):
            most = min(
                (room.bytes - room.running * frontier.peak_bytes) / room.alive
                if room.alive
                else (NEVER if room.bytes >= 0 else -NEVER)
                for room in rooms
            )
            fits = int(np.searchsorted(frontier.saved_bytes, most, side="right"))
            if fits and (best is None or frontier.extra_s[fits - 1] < best[0]):
                best = float(frontier.extra_s[fits - 1]), frontier.mixes[fits - 1]
        return best

    def _build_frontiers(self, counts: Counts) -> list[Frontier]:
        """For every possible largest transient, the best (saved bytes, extra time) of all regions."""
        kinds = [self.kinds[key] for key, _ in counts]
        legal = [kind.allowed for kind in kinds]
        frontiers: list[Frontier] = []
        peaks = sorted({kind.transient_bytes[o] for kind, options in zip(kinds, legal) for o in options})
        for peak in peaks:
            used = [
                tuple(o for o in options if kind.transient_bytes[o] <= peak)
                for kind, options in zip(kinds, legal)
            ]
            if all(used):
                frontiers.append(self.merge(counts, used, peak))
        return frontiers

    def merge(self, counts: Counts, used: Sequence[tuple[int, ...]], peak_bytes: float) -> Frontier:
        """Merge the frontiers of all kinds into one, bytes ascending and time descending."""
        saved, extra = np.zeros(1), np.zeros(1)
        mixes: list[Mix] = [()]
        for (key, count), options in zip(counts, used):
            item = self.kinds[key]
            splits = list(splits_of(count, options))
            kind_saved, kind_extra = totals_of(item, splits)
            all_saved = (saved[:, None] + kind_saved[None, :]).ravel()
            all_extra = (extra[:, None] + kind_extra[None, :]).ravel()
            keep = _best_points(all_saved, all_extra)
            saved, extra = all_saved[keep], all_extra[keep]
            mixes = [(*mixes[int(i) // len(splits)], (key, splits[int(i) % len(splits)])) for i in keep]
        return Frontier(peak_bytes, saved, extra, mixes)


def _tightest(rooms: Sequence[Room]) -> tuple[Room, ...]:
    """Without the rooms in which all fits that fits in another."""
    kept: list[Room] = []
    for room in sorted(set(rooms), key=lambda one: (-one.alive, one.bytes, not one.running)):
        if not any(
            o.alive >= room.alive and o.bytes <= room.bytes and o.running >= room.running for o in kept
        ):
            kept.append(room)
    return tuple(kept)


def totals_of(item: ChainItem, splits: Sequence[tuple[int, int, int]]) -> tuple[Floats, Floats]:
    """(saved bytes, extra seconds) of every split of regions of one kind."""
    table = np.array(splits, dtype=float)
    extra_s = np.array([e if e < NEVER else 0.0 for e in item.extra_s])
    return table @ np.array(item.saved_bytes), table @ extra_s


def splits_of(count: int, options: tuple[int, ...]) -> Iterable[tuple[int, int, int]]:
    """All ways to give ``count`` regions to the allowed options."""
    for a in range(count + 1) if 0 in options else (0,):
        for b in range(count - a + 1) if 1 in options else (0,):
            rest = count - a - b
            if rest == 0 or 2 in options:
                yield (a, b, rest)


def _best_points(saved: Floats, extra: Floats) -> NDArray[np.int64]:
    """Indices of points that no other point beats in both bytes and time, by bytes ascending."""
    order = np.lexsort((extra, saved))
    least = np.minimum.accumulate(extra[order])
    first = np.concatenate(([True], least[1:] < least[:-1]))
    return order[first]
