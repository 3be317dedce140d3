"""Pipeline schedules as discrete events: when each micro-batch runs on each stage, and the step's length.

Comes in: forward and backward seconds of every stage, micro-batches, seconds of each hop between
stages. Goes out: a :class:`Timeline`, a proved lower bound, and how many micro-batches a stage holds. The
order of events is that of :mod:`autoplan.schedules`, which the runtime executes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autoplan.plan import SCHEDULES
from autoplan.schedules import (
    Kind,
    Task,
    rank_moments,
    rank_orders,
    require_schedule,
    splits_backward,
    task_flow,
)

__all__ = [
    "SCHEDULES",
    "BoundRows",
    "CriticalPath",
    "Event",
    "Kind",
    "Timeline",
    "bound_rows",
    "critical_path",
    "in_flight",
    "lower_bound_s",
    "rank_ends",
    "simulate",
]

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Event:
    """One micro-batch's forward or backward (or a part of a split backward) on one stage."""

    kind: Kind
    stage: int
    microbatch: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """``events[rank]`` in order, a rank being one of the pipeline (with one stage a rank: a stage);
    ``bubble_s`` is the idle time of the busiest rank."""

    makespan_s: float
    events: tuple[tuple[Event, ...], ...]
    bubble_s: float


def in_flight(schedule: str, stage: int, stages: int, microbatches: int, vpp: int = 1) -> int:
    """Most micro-batches whose activations ``stage`` (of all ``stages``) holds at once."""
    ranks = stages // vpp
    moments = rank_moments(schedule, stage % ranks, ranks, vpp, microbatches)
    return max(moment.alive[stage // ranks] for moment in moments)


def simulate(
    schedule: str,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    microbatches: int,
    hop_s: Sequence[float] = (),
    *,
    vpp: int = 1,
    weight_s: Sequence[float] = (),
) -> Timeline:
    """Run every rank's tasks in order, each as soon as its rank is free and its input has arrived.

    Seconds are by stage, ``vpp`` stages a rank. ``hop_s[s]`` is the latency between stages s and s + 1,
    both ways; it delays the receiver and occupies no rank. Empty: no latency. ``weight_s`` is the part
    of ``backward_s`` that a split backward puts off. Forward i needs forward i of the stage before;
    backward i needs forward i here and backward i of the stage after.
    """
    flow = task_flow(schedule, len(forward_s) // vpp, vpp, microbatches)
    seconds = _seconds(schedule, forward_s, backward_s, weight_s)
    ends = _ends(schedule, seconds, vpp, microbatches, hop_s)
    events: list[list[Event]] = [[] for _ in range(len(forward_s) // vpp)]
    for task, rank, place, end in zip(flow.tasks, flow.rank, flow.place, ends):
        events[rank].append(Event(*task, end - seconds[place], end))
    makespan = max(ends)
    busy = max(sum(event.end_s - event.start_s for event in own) for own in events)
    return Timeline(makespan, tuple(map(tuple, events)), makespan - busy)


def rank_ends(
    schedule: str,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    microbatches: int,
    hop_s: Sequence[float] = (),
    *,
    vpp: int = 1,
    weight_s: Sequence[float] = (),
) -> list[float]:
    """When each rank's last task ends (see :func:`simulate`), without building events."""
    seconds = _seconds(schedule, forward_s, backward_s, weight_s)
    ends = _ends(schedule, seconds, vpp, microbatches, hop_s)
    flow = task_flow(schedule, len(forward_s) // vpp, vpp, microbatches)
    return list(dict(zip(flow.rank, ends)).values())


def _seconds(
    schedule: str, forward_s: Sequence[float], backward_s: Sequence[float], weight_s: Sequence[float]
) -> list[float]:
    """Seconds of every kind of task on every stage, in the order of ``Flow.place``."""
    weight = list(weight_s) or [0.0] * len(forward_s)
    whole = list(backward_s)
    rest = [b - w for b, w in zip(whole, weight)] if splits_backward(schedule) else whole
    return [*forward_s, *whole, *rest, *weight]


def _ends(
    schedule: str, seconds: Sequence[float], vpp: int, microbatches: int, hop_s: Sequence[float]
) -> list[float]:
    """When each task of the flow ends."""
    stages = len(seconds) // 4
    flow = task_flow(schedule, stages // vpp, vpp, microbatches)
    hops = [*hop_s, 0.0] if hop_s else [0.0] * stages  # the last: no boundary crossed
    ends = [0.0]
    for place, before, needs, boundary in zip(flow.place, flow.before, flow.needs, flow.boundary):
        free, arrived = ends[before], ends[needs] + hops[boundary]
        ends.append((free if free > arrived else arrived) + seconds[place])
    return ends[1:]


@dataclass(frozen=True)
class CriticalPath:
    """What decides when a step ends: tasks that wait for one another. ``counts`` of forwards, backwards
    (without weight gradients where the schedule splits them) and weight gradients are [3, stages]; whatever
    the stages' seconds, no run ends before their sum and ``hops`` hops, and what follows on ``rank``."""

    counts: Floats
    hops: int
    rank: int
    ends_s: float


def critical_path(
    schedule: str, seconds: Floats, microbatches: int, hop_s: float, *, vpp: int, after_s: Sequence[float]
) -> CriticalPath:
    """The tasks that decide the end of a step: ``seconds`` are [forward, backward, weight gradients][stage]
    (backward without weight gradients), ``after_s`` what each rank adds after its last task."""
    stages = seconds.shape[1]
    flow = task_flow(schedule, stages // vpp, vpp, microbatches)
    forward, backward, weight = (row.tolist() for row in seconds)
    parts = [*forward, *backward, *backward, *weight]
    ends = _ends(schedule, parts, vpp, microbatches, [hop_s] * (stages - 1))
    last = {rank: task for task, rank in enumerate(flow.rank)}
    rank = max(last, key=lambda r: ends[last[r]] + after_s[r])
    counts, hops, task = [0.0] * (4 * stages), 0, last[rank] + 1
    while task:
        place, before, needs = flow.place[task - 1], flow.before[task - 1], flow.needs[task - 1]
        counts[place] += 1.0
        free_s = ends[before - 1] if before else 0.0
        crossed = needs > 0 and flow.boundary[task - 1] >= 0
        arrived_s = (ends[needs - 1] if needs else 0.0) + (hop_s if crossed else 0.0)
        late = needs > 0 and arrived_s > free_s
        hops += late and crossed
        task = needs if late else before
    table = np.array(counts).reshape(4, stages)
    by_kind = np.stack([table[0], table[1] + table[2], table[3]])
    return CriticalPath(by_kind, hops, rank, ends[last[rank]] + after_s[rank])


# ---- a lower bound ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BoundRows:
    """``end >= forward @ f + backward @ b + weight @ w + hops * hop_s`` for every row, with f, b, w the
    seconds of every stage (b without w where the schedule splits the backward), hop_s the least hop, and
    end that of the row's ``rank``; most of it is work of rank ``own``."""

    forward: Floats
    backward: Floats
    weight: Floats
    hops: Floats
    rank: tuple[int, ...]
    own: tuple[int, ...]


def lower_bound_s(
    schedule: str,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    microbatches: int,
    *,
    vpp: int = 1,
    weight_s: Sequence[float] = (),
    hop_s: float = 0.0,
) -> float:
    """Seconds below which no run of the schedule can finish; see :func:`bound_rows`."""
    stages = len(forward_s)
    rows = bound_rows(schedule, stages // vpp, vpp, microbatches)
    seconds = np.array(_seconds(schedule, forward_s, backward_s, weight_s)).reshape(4, stages)
    backward = seconds[2] if splits_backward(schedule) else seconds[1]
    bounds = rows.forward @ seconds[0] + rows.backward @ backward + rows.weight @ seconds[3]
    return float(np.max(bounds + rows.hops * hop_s))


@lru_cache(256)
def bound_rows(schedule: str, ranks: int, vpp: int, microbatches: int) -> BoundRows:
    """Rows of a lower bound on any run of the schedule, several a rank.

    Take two tasks of a rank's order, the first of them some stage's first forward or the rank's first
    backward, the second some stage's last backward, the rank's last forward or its last task. The first
    cannot start before its micro-batch has come through the stages before it; the rank then runs all that
    its order has from one to the other; after the second its micro-batch still has to go the rest of its
    way. The sum of the three is a lower bound, linear in the stages' seconds. (Equal stages: one is exact.)
    """
    few = _few(schedule, ranks, vpp, microbatches)
    found = _rows_of(schedule, ranks, vpp, few)
    repeated = np.zeros((ranks, 3, ranks * vpp))
    for rank in range(ranks):
        repeated[rank, : 3 if splits_backward(schedule) else 2, rank::ranks] = float(microbatches - few)
    rows = np.stack([row + repeated[rank] for rank, (row, _, _) in found]).transpose(1, 0, 2)
    hops = np.array([hops for _, (_, hops, _) in found], float)
    ends = tuple(end for _, (_, _, end) in found)
    return BoundRows(rows[0], rows[1], rows[2], hops, ends, tuple(rank for rank, _ in found))


@lru_cache(64)
def _rows_of(schedule: str, ranks: int, vpp: int, microbatches: int) -> list[tuple[int, Row]]:
    """The rows of every rank."""
    require_schedule(schedule, vpp)
    split = splits_backward(schedule)
    return [
        (rank, row)
        for rank, order in enumerate(rank_orders(schedule, ranks, vpp, microbatches))
        for row in _strongest(_Rows(order, rank, ranks * vpp, split).rows())
    ]


Row = tuple[Floats, int, int]  # coefficients [forward, backward, weight][stage], hops, the rank that ends


def _strongest(rows: list[Row]) -> list[Row]:
    """Without the rows whose every coefficient is at most that of another that ends with the same rank."""
    kept: list[Row] = []
    for row, hops, end in sorted(rows, key=lambda one: -float(one[0].sum())):
        beaten = (end == other[2] and hops <= other[1] and bool((row <= other[0]).all()) for other in kept)
        if not any(beaten):
            kept.append((row, hops, end))
    return kept


def _few(schedule: str, ranks: int, vpp: int, microbatches: int) -> int:
    """A number of micro-batches whose order starts and ends as that of all of them does."""
    most = 3 * ranks
    periodic = schedule != "gpipe" and (vpp == 1 or microbatches % ranks == 0)
    return most if periodic and microbatches > most else microbatches


class _Rows:
    """The bounds of one rank's order."""

    def __init__(self, order: Sequence[Task], rank: int, stages: int, split: bool) -> None:
        self.order, self.rank, self.stages, self.split = order, rank, stages, split
        self.backward = "backward_input" if split else "backward"

    def rows(self) -> list[Row]:
        """One of every pair of a first and a second task in that order."""
        firsts, lasts = self._firsts(), self._lasts()
        run = self._run({position for position, *_ in firsts} | {position + 1 for position, *_ in lasts})
        return [
            (before + run[last + 1] - run[first] + after, hops_before + hops_after, end)
            for first, before, hops_before in firsts
            for last, after, hops_after, end in lasts
            if first <= last
        ]

    def _run(self, positions: set[int]) -> dict[int, Floats]:
        """What the first tasks of the order take, for each number of them asked for."""
        place = {"forward": 0, "backward": 1, "backward_input": 1, "backward_weight": 2}
        counts = np.zeros((3, self.stages))
        found: dict[int, Floats] = {}
        for position in range(len(self.order) + 1):
            if position in positions:
                found[position] = counts.copy()
            if position < len(self.order):
                task = self.order[position]
                counts[place[task.kind], task.stage] += 1
        return found

    def _firsts(self) -> list[tuple[int, Floats, int]]:
        """(position, what its micro-batch has to run before it elsewhere, hops)."""
        found: dict[int, tuple[int, Floats, int]] = {}
        for position, task in enumerate(self.order):
            if task.kind == "forward" and task.stage not in found:
                found[task.stage] = position, self._chain(forward=range(task.stage)), task.stage
            if task.kind == self.backward:
                later = range(task.stage + 1, self.stages)
                chain = self._chain(range(self.stages), later)
                return [*found.values(), (position, chain, self.stages - 1 + len(later))]
        return list(found.values())

    def _lasts(self) -> list[tuple[int, Floats, int, int]]:
        """(position, what its micro-batch has to run after it elsewhere, hops, the rank where that ends)."""
        found = {-1: (len(self.order) - 1, self._chain(), 0, self.rank)}
        for position in reversed(range(len(self.order))):
            task = self.order[position]
            if task.kind == self.backward and task.stage not in found:
                chain = self._chain(backward=range(task.stage))
                chain[2, 0] = float(self.split and task.stage > 0)  # the first stage's weights are left then
                found[task.stage] = position, chain, task.stage, 0
            if task.kind == "forward":
                later = range(task.stage + 1, self.stages)
                chain = self._chain(later, range(self.stages))
                return [*found.values(), (position, chain, self.stages - 1 + len(later), 0)]
        return list(found.values())

    def _chain(self, forward: Sequence[int] = (), backward: Sequence[int] = ()) -> Floats:
        chain = np.zeros((3, self.stages))
        chain[0, list(forward)] = 1.0
        chain[1, list(backward)] = 1.0
        return chain
