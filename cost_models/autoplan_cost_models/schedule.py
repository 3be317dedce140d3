"""Pipeline schedules as discrete events: when each micro-batch runs on each stage, and the step's length.

Comes in: forward and backward seconds of every stage, micro-batches, seconds of each hop between
stages. Goes out: a :class:`Timeline`, a proved lower bound, and how many micro-batches a stage holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from autoplan.errors import BadInputError

SCHEDULES = ("1f1b", "gpipe")


@dataclass(frozen=True)
class Event:
    """One micro-batch's forward or backward on one stage."""

    kind: Literal["forward", "backward"]
    stage: int
    microbatch: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """``events[stage]`` in order; ``bubble_s`` is the idle time of the busiest stage."""

    makespan_s: float
    events: tuple[tuple[Event, ...], ...]
    bubble_s: float


Slot = tuple[Literal["forward", "backward"], int]


def in_flight(schedule: str, stage: int, stages: int, microbatches: int) -> int:
    """Most micro-batches whose activations ``stage`` holds at once."""
    if schedule == "gpipe":
        return microbatches
    return min(microbatches, stages - stage)


def slots(schedule: str, stage: int, stages: int, microbatches: int) -> tuple[Slot, ...]:
    """The order in which one stage runs its forwards and backwards.

    1f1b: min(m, p - 1 - stage) forwards, then one forward and one backward in turn, then the rest.
    Raises BadInputError for an unknown schedule.
    """
    if schedule == "gpipe":
        forwards: list[Slot] = [("forward", i) for i in range(microbatches)]
        return (*forwards, *(("backward", i) for i in range(microbatches)))
    if schedule != "1f1b":
        raise BadInputError(f"schedule {schedule!r}: expected one of {', '.join(SCHEDULES)}.")
    started = min(microbatches, stages - 1 - stage)
    order: list[Slot] = [("forward", i) for i in range(started)]
    for finished in range(microbatches):
        if started < microbatches:
            order.append(("forward", started))
            started += 1
        order.append(("backward", finished))
    return tuple(order)


def simulate(
    schedule: str,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    microbatches: int,
    hop_s: Sequence[float] = (),
) -> Timeline:
    """Run every stage's slots in order, each as soon as its stage is free and its input has arrived.

    ``hop_s[s]`` is the latency between stages s and s + 1, both ways; it delays the receiver and
    occupies no stage. Empty: no latency. Forward i needs forward i of the stage before; backward i
    needs forward i here and backward i of the stage after.
    """
    ends = finish_times(schedule, forward_s, backward_s, microbatches, hop_s)
    stages = len(forward_s)
    durations = {"forward": forward_s, "backward": backward_s}
    events: list[tuple[Event, ...]] = []
    for stage in range(stages):
        order = slots(schedule, stage, stages, microbatches)
        events.append(
            tuple(
                Event(kind, stage, i, end - durations[kind][stage], end)
                for (kind, i), end in zip(order, ends[stage])
            )
        )
    makespan = max(stage_ends[-1] for stage_ends in ends)
    busy = max(microbatches * (f + b) for f, b in zip(forward_s, backward_s))
    return Timeline(makespan, tuple(events), makespan - busy)


def finish_times(
    schedule: str,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    microbatches: int,
    hop_s: Sequence[float] = (),
) -> list[list[float]]:
    """When each slot of each stage ends (see :func:`simulate`), without building events."""
    stages = len(forward_s)
    hops = tuple(hop_s) or (0.0,) * (stages - 1)
    orders = [slots(schedule, stage, stages, microbatches) for stage in range(stages)]
    arrived = _Arrivals(stages, microbatches)
    ends: list[list[float]] = [[] for _ in range(stages)]
    waiting = sum(len(order) for order in orders)
    while waiting:
        for stage, order in enumerate(orders):
            waiting -= _advance(
                stage, order, ends[stage], arrived, hops, (forward_s[stage], backward_s[stage])
            )
    return ends


class _Arrivals:
    """When the input of each micro-batch's forward and backward arrives at each stage; NaN: not yet."""

    def __init__(self, stages: int, microbatches: int) -> None:
        unknown = math.nan
        self.forward = [[unknown] * microbatches for _ in range(stages)]
        self.backward = [[unknown] * microbatches for _ in range(stages)]
        self.forward[0] = [0.0] * microbatches
        self.backward[-1] = [0.0] * microbatches


def _advance(
    stage: int,
    order: tuple[Slot, ...],
    ends: list[float],
    arrived: _Arrivals,
    hops: Sequence[float],
    durations: tuple[float, float],
) -> int:
    """Run this stage's slots until one waits for another stage; how many ran."""
    before = len(ends)
    clock = ends[-1] if ends else 0.0
    forward, backward = arrived.forward[stage], arrived.backward[stage]
    while len(ends) < len(order):
        kind, microbatch = order[len(ends)]
        going_forward = kind == "forward"
        ready = forward[microbatch] if going_forward else backward[microbatch]
        if ready != ready:  # NaN: its input has not been sent
            break
        clock = max(clock, ready) + durations[not going_forward]
        ends.append(clock)
        if going_forward and stage < len(hops):
            arrived.forward[stage + 1][microbatch] = clock + hops[stage]
        elif not going_forward and stage > 0:
            arrived.backward[stage - 1][microbatch] = clock + hops[stage - 1]
    return len(ends) - before


def lower_bound_1f1b(forward_s: Sequence[float], backward_s: Sequence[float], microbatches: int) -> float:
    """Seconds below which no 1F1B run of m >= p micro-batches can finish, whatever the latencies.

    ``max_s [sum_j t_j + (m-1) t_s - min(sum_{j>s} t_j, (p-1-s) min(f_s, b_s))]`` with t = f + b: the
    first micro-batch reaches s, s does its m, the last one drains, less what may overlap.
    """
    stages = len(forward_s)
    times = [f + b for f, b in zip(forward_s, backward_s)]
    total = sum(times)
    return max(
        total
        + (microbatches - 1) * times[s]
        - min(sum(times[s + 1 :]), (stages - 1 - s) * min(forward_s[s], backward_s[s]))
        for s in range(stages)
    )
