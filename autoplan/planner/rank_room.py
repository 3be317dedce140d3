"""What the stages of one pipeline rank hold over their schedule, and the recompute with which they fit.

Comes in: a chain, its boundaries, a rank. Goes out: the fullest moment in bytes, options that fit, and the
least recompute that any choice needs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autoplan.planner.chain import NEVER, Chain, ChainItem, Floats
from autoplan.schedules import moments_of, rank_moments

MOST_MOMENTS = 8  # that the least recompute looks at: those that lack most


def stages_of(chain: Chain, ends: Sequence[int], rank: int) -> list[RankStage]:
    """The stages of one rank under these boundaries."""
    spans = list(pairwise([0, *ends]))
    return [RankStage(chain, index, *spans[index]) for index in range(rank, chain.stages, chain.ranks)]


@dataclass
class RankStage:
    """One stage of a rank: its regions ``first`` to ``end`` - 1."""

    chain: Chain
    index: int
    first: int
    end: int
    items: tuple[ChainItem, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.items = self.chain.items[self.first : self.end]
        before = self.chain.items[self.first - 1] if self.first else None
        last = self.index == self.chain.stages - 1
        self.received_bytes = before.output_bytes if before else 0.0
        self.sent_bytes = 0.0 if last else self.items[-1].output_bytes
        self.side_bytes = sum(dict(pair for item in self.items for pair in item.side).values())
        self.deferred = np.array([item.deferred_bytes for item in self.items])

    def held(self, options: Sequence[int]) -> tuple[float, float, float]:
        """(saved bytes of a micro-batch, what a running task adds to them, the same of a split backward)."""
        saved = np.array([item.saved_bytes[o] for item, o in zip(self.items, options)])
        transient = np.array([item.transient_bytes[o] for item, o in zip(self.items, options)])
        alive = np.cumsum(saved)
        total = float(alive[-1])
        later = np.cumsum(self.deferred[::-1])[::-1]
        plain = float(np.max(alive + transient)) - total
        return total + self.side_bytes, plain, float(np.max(alive + transient + later)) - total


class _Table(NamedTuple):
    """The moments of one rank's schedule: counts are [moments, stages of the rank]; ``running`` is 0 for
    weight gradients alone, 1 for a forward or whole backward, 2 for a backward of the inputs."""

    alive: Floats
    deferred: Floats
    to_send: Floats
    to_receive: Floats
    chunk: NDArray[np.intp]
    running: NDArray[np.intp]


def _table(schedule: str, rank: int, ranks: int, vpp: int, microbatches: int) -> _Table:
    """The moments as arrays; those of a long step are those of a shorter one."""
    return _table_of(schedule, rank, ranks, vpp, moments_of(schedule, ranks, vpp, microbatches))


@functools.lru_cache(4096)
def _table_of(schedule: str, rank: int, ranks: int, vpp: int, microbatches: int) -> _Table:
    moments = rank_moments(schedule, rank, ranks, vpp, microbatches)
    stages = range(vpp)
    running = {"backward_weight": 0, "backward_input": 2}
    return _Table(
        alive=np.array([moment.alive for moment in moments], float),
        deferred=np.array([moment.deferred for moment in moments], float),
        to_send=np.array([[moment.waits_to_send(c) for c in stages] for moment in moments], float),
        to_receive=np.array([[moment.waits_to_receive(c) for c in stages] for moment in moments], float),
        chunk=np.array([moment.chunk for moment in moments]),
        running=np.array([running.get(moment.kind, 1) for moment in moments]),
    )


class RankRoom:
    """What one rank holds at every moment of its schedule."""

    def __init__(self, chain: Chain, rank: int, stages: list[RankStage]) -> None:
        table = _table(chain.schedule, rank, chain.ranks, chain.vpp, chain.microbatches)
        self.stages, self.limit_bytes, self.table = stages, chain.limit_bytes, table
        self.alive, self.arriving_bytes = table.alive, chain.arriving_bytes
        self.fixed = (
            table.deferred @ np.array([float(stage.deferred.sum()) for stage in stages])
            + table.to_send @ np.array([stage.sent_bytes for stage in stages])
            + table.to_receive @ np.array([stage.received_bytes for stage in stages])
            + self._states_bytes(chain)
        )

    def _states_bytes(self, chain: Chain) -> float:
        items = [item for stage in self.stages for item in stage.items]
        units = sorted((item.gathered_bytes for item in items), reverse=True)[:2]
        here = {i for stage in self.stages for i in range(stage.first, stage.end)}
        twice = sum(size for a, b, size in chain.shared if a in here and b in here)
        return sum(item.static_bytes for item in items) + sum(units) - twice

    def peak_bytes(self, held: Sequence[tuple[float, float, float]]) -> float:
        """The fullest moment."""
        saved = np.array([one[0] for one in held])
        extra: Floats = np.array([[0.0, plain, split] for _, plain, split in held])
        return float(np.max(self.fixed + self.alive @ saved + extra[self.table.chunk, self.table.running]))

    def least_extra_s(self) -> float:
        """Seconds of recompute that a micro-batch costs here at least; ``inf`` where the rank never fits."""
        hulls = [[_hull(item) for item in stage.items] for stage in self.stages]
        most = [sum(hull[0][1] for hull in own) + s.side_bytes for own, s in zip(hulls, self.stages)]
        missing = self.fixed + self.alive @ np.array(most) - self.limit_bytes
        needy = np.argsort(-missing)[:MOST_MOMENTS]
        return max(self._recompute_s(hulls, self.alive[i], float(missing[i])) for i in needy)

    def _recompute_s(self, hulls: list[list[Hull]], alive: Floats, missing: float) -> float:
        """The least seconds that save the missing bytes at one moment."""
        if missing <= 0:
            return 0.0
        steps = [
            (b[0] - a[0], float(count) * (a[1] - b[1]))
            for count, own in zip(alive, hulls)
            for hull in own
            for a, b in pairwise(hull)
            if count
        ]
        return _cheapest_s(steps, missing)

    def fit(self, options: Sequence[Sequence[int]]) -> list[list[int]] | None:
        """Options of every stage's regions with which the rank fits: the change that saves most bytes a
        second is made to as many equal regions as it takes, then the next."""
        chosen = [list(own) for own in options]
        held = [stage.held(own) for stage, own in zip(self.stages, chosen)]
        peak = self.peak_bytes(held)
        limit_bytes = self.limit_bytes - self.arriving_bytes
        while peak > limit_bytes:
            best: tuple[float, float, int, list[int], int] | None = None
            for c, regions, option in self._changes(chosen):
                item = self.stages[c].items[regions[0]]
                spent = item.extra_s[option] - item.extra_s[chosen[c][regions[0]]]
                trial = self.stages[c].held(_changed(chosen[c], regions[:1], option))
                gain = peak - self.peak_bytes([*held[:c], trial, *held[c + 1 :]])
                if gain > 0 and (best is None or gain / max(spent, 1e-12) > best[0]):
                    best = gain / max(spent, 1e-12), gain, c, regions, option
            if best is None:
                return None
            _, gain, c, regions, option = best
            chosen[c] = _changed(chosen[c], regions[: math.ceil((peak - limit_bytes) / gain)], option)
            held[c] = self.stages[c].held(chosen[c])
            peak = self.peak_bytes(held)
        return chosen

    def _changes(self, chosen: list[list[int]]) -> list[tuple[int, list[int], int]]:
        """(stage, equal regions, another option) where the option saves less."""
        found: dict[tuple[int, str, int], list[int]] = {}
        for c, (stage, own) in enumerate(zip(self.stages, chosen)):
            for region, (item, now) in enumerate(zip(stage.items, own)):
                found.setdefault((c, item.key, now), []).append(region)
        return [
            (c, regions, option)
            for (c, _, now), regions in found.items()
            for item in (self.stages[c].items[regions[0]],)
            for option in item.allowed
            if item.saved_bytes[option] < item.saved_bytes[now]
        ]


def _changed(options: list[int], regions: Sequence[int], option: int) -> list[int]:
    return [option if region in regions else now for region, now in enumerate(options)]


Hull = list[tuple[float, float]]


def _hull(item: ChainItem) -> Hull:
    """(extra seconds, saved bytes) of the options worth mixing, the fastest first: each step saves less bytes
    a second than the one before."""
    points = sorted((item.extra_s[o], item.saved_bytes[o]) for o in item.allowed)
    hull: Hull = []
    for point in points:
        if hull and point[1] >= hull[-1][1]:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _slope(a: tuple[float, float], b: tuple[float, float]) -> float:
    """Bytes saved a second between two options."""
    return (a[1] - b[1]) / max(b[0] - a[0], 1e-18)


def _cheapest_s(steps: Sequence[tuple[float, float]], missing: float) -> float:
    """Least seconds of steps (seconds, bytes), the last one in part, that save the missing bytes."""
    total_s = 0.0
    for seconds, saved in sorted(steps, key=lambda step: step[0] / step[1]):
        if missing <= 0:
            break
        total_s += seconds * min(1.0, missing / saved)
        missing -= saved
    return total_s if missing <= 0 else NEVER
