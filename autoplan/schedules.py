"""Pipeline schedules as tables: the order in which every pipeline rank runs its forwards and backwards.

Comes in: a schedule's name, the pipeline ranks, stages a rank (``vpp``), micro-batches. Goes out: one order
of :class:`Task` a rank, and the same orders with the messages between ranks put in. The runtime executes
these tables, and the cost models time them and count memory over them.

=================  ==============================================================================
1f1b               p - 1 - r forwards, then forward and backward in turn (PipeDream-flush)
gpipe              all forwards, then all backwards
interleaved_1f1b   1f1b over vpp stages a rank (arXiv 2104.04473, section 2.2)
zb_h1              1f1b whose backward is split: weight gradients fill the waiting at the end
                   (ZB-H1 of arXiv 2401.10241; with vpp > 1 interleaved)
=================  ==============================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

import numpy as np

from autoplan.errors import BadInputError
from autoplan.plan import SCHEDULES

Kind = Literal["forward", "backward", "backward_input", "backward_weight"]
KINDS: tuple[Kind, ...] = ("forward", "backward", "backward_input", "backward_weight")
SPLIT_SCHEDULES = ("zb_h1",)
_KEPT = 64  # tables remembered; a search asks for the same few again and again


class Task(NamedTuple):
    """One micro-batch on one stage. ``backward_input`` makes the gradient of what the stage received,
    ``backward_weight`` the gradients of its weights; ``backward`` both."""

    kind: Kind
    stage: int
    microbatch: int


class Action(NamedTuple):
    """What a rank does next: run a task, send what it made, or start to receive what another rank's made."""

    what: Literal["run", "send", "receive"]
    task: Task


def splits_backward(schedule: str) -> bool:
    """Whether the schedule runs the gradients of inputs and of weights apart."""
    return schedule in SPLIT_SCHEDULES


def require_schedule(schedule: str, vpp: int) -> None:
    """Raises BadInputError for an unknown schedule, or several stages a rank where it has one."""
    if schedule not in SCHEDULES:
        raise BadInputError(f"schedule {schedule!r}: expected one of {', '.join(SCHEDULES)}.")
    if schedule == "1f1b" and vpp > 1:
        raise BadInputError(
            f"schedule 1f1b with vpp={vpp}: it runs one stage a rank. Type --pin schedule=interleaved_1f1b."
        )


@lru_cache(_KEPT)
def rank_orders(schedule: str, ranks: int, vpp: int, microbatches: int) -> tuple[tuple[Task, ...], ...]:
    """The order of every rank's tasks; stage s is on rank s % ranks. See :func:`require_schedule`."""
    require_schedule(schedule, vpp)
    code = TaskCode(ranks * vpp, microbatches)
    orders = (_rank_order(schedule, rank, ranks, vpp, microbatches) for rank in range(ranks))
    return tuple(tuple(map(code.task, order)) for order in orders)


@dataclass(frozen=True)
class TaskCode:
    """Tasks as whole numbers, (kind x stages + stage) x micro-batches + micro-batch: tables are long."""

    stages: int
    microbatches: int

    def kind(self, kind: int) -> int:
        """The code of the kind's first task."""
        return kind * self.stages * self.microbatches

    def task(self, code: int) -> Task:
        place, microbatch = divmod(code, self.microbatches)
        kind, stage = divmod(place, self.stages)
        return Task(KINDS[kind], stage, microbatch)


FORWARD, BACKWARD, INPUT, WEIGHT = range(4)  # places in KINDS


def _rank_order(schedule: str, rank: int, ranks: int, vpp: int, microbatches: int) -> list[int]:
    """Forwards until the first backward can follow, then one of each in turn, then the backwards left.

    A weight gradient follows its input gradient by ``rank`` others: so many are left when nothing else is.
    """
    gpipe, split = schedule == "gpipe", splits_backward(schedule)
    rounds, code = _rounds(1 if gpipe else ranks, microbatches), TaskCode(ranks * vpp, microbatches)
    first = [(chunk * ranks + rank) * microbatches for chunk in range(vpp)]
    forwards = [first[c] + i for group in rounds for c in range(vpp) for i in group]
    backwards = [first[c] + i for group in rounds for c in reversed(range(vpp)) for i in group]
    total, apart = len(forwards), ranks - 1 - rank
    step = 2 if schedule == "interleaved_1f1b" and vpp > 1 else 1
    started = total if gpipe else min(total, (vpp - 1) * len(rounds[0]) + step * apart)
    backward, weight = code.kind(INPUT if split else BACKWARD), code.kind(WEIGHT)
    order = forwards[:started]
    for done, place in enumerate(backwards):
        if started + done < total:
            order.append(forwards[started + done])
        order.append(backward + place)
        if split and done >= rank:
            order.append(weight + backwards[done - rank])
    left = backwards[max(0, total - rank) :] if split else []
    return order + [weight + place for place in left]


def _rounds(ranks: int, microbatches: int) -> list[range]:
    """Micro-batches in groups that pass through all of a rank's stages before the next group starts: as many
    groups as the ranks divide them into, sizes even, the larger first."""
    count = max(1, microbatches // ranks)
    size, larger = divmod(microbatches, count)
    ends = [size * (i + 1) + min(i + 1, larger) for i in range(count)]
    return [range(start, end) for start, end in zip((0, *ends), ends)]


@dataclass(frozen=True)
class Flow:
    """All tasks of a schedule in an order in which each comes after everything it waits for.

    For task i: ``rank[i]``; ``place[i]``, its kind's place in ``KINDS`` times the stages plus its stage;
    ``before[i]`` and ``needs[i]``, one more than the index of the task before it on its rank and of the
    task on another stage whose result it takes (0: none); ``boundary[i]``, the boundary between stages that
    this result crosses (-1: none).
    """

    codes: tuple[int, ...]
    code: TaskCode
    rank: tuple[int, ...]
    place: tuple[int, ...]
    before: tuple[int, ...]
    needs: tuple[int, ...]
    boundary: tuple[int, ...]

    @cached_property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks themselves."""
        return tuple(map(self.code.task, self.codes))


@lru_cache(_KEPT)
def task_flow(schedule: str, ranks: int, vpp: int, microbatches: int) -> Flow:
    """The tasks of all ranks in one legal order, with what each waits for."""
    require_schedule(schedule, vpp)
    code = TaskCode(ranks * vpp, microbatches)
    sources = _sources(schedule, code)
    orders = [_rank_order(schedule, rank, ranks, vpp, microbatches) for rank in range(ranks)]
    found: list[int] = []
    rows: list[tuple[int, int, int]] = []
    at = [0] * (len(KINDS) * code.stages * microbatches)
    last, reached = [0] * ranks, [0] * ranks
    while len(found) < sum(map(len, orders)):
        made = len(found)
        for rank, order in enumerate(orders):
            for position in range(reached[rank], len(order)):
                task = order[position]
                source = sources[task]
                if source >= 0 and not at[source]:
                    break
                found.append(task)
                rows.append((rank, last[rank], at[source] if source >= 0 else 0))
                at[task] = last[rank] = len(found)
                reached[rank] = position + 1
        assert len(found) > made, f"the orders of {schedule} wait for one another"
    rank, before, needs = zip(*rows)
    place = tuple(task // microbatches for task in found)
    stage = [one % code.stages for one in place]
    boundary = tuple(min(stage[need - 1], own) if need else -1 for need, own in zip(needs, stage))
    return Flow(tuple(found), code, rank, place, before, needs, boundary)


def _sources(schedule: str, code: TaskCode) -> list[int]:
    """For each task's code that of the task on the stage before or after whose result it takes; -1: none."""
    sources = [-1] * (len(KINDS) * code.stages * code.microbatches)
    backward = code.kind(INPUT if splits_backward(schedule) else BACKWARD)
    for earlier in range((code.stages - 1) * code.microbatches):
        later = earlier + code.microbatches
        sources[later] = earlier
        sources[backward + earlier] = backward + later
    return sources


@lru_cache(_KEPT)
def rank_actions(schedule: str, ranks: int, vpp: int, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """The orders with messages put in: every rank's actions are taken from one order of all of them.

    So no rank waits for another for ever, even where a send or a receive blocks until the other side is
    there. Messages stand where they would be if all forwards took one unit of time and all backwards two.
    """
    code = TaskCode(ranks * vpp, microbatches)
    steps = _rank_steps(schedule, ranks, vpp, microbatches)
    return tuple(tuple(Action(WHAT[what], code.task(task)) for what, task in own) for own in steps)


WHAT: tuple[Literal["run", "send", "receive"], ...] = ("run", "send", "receive")
RUN, SEND, RECEIVE = range(3)  # places in WHAT
_UNITS = (1, 2, 1, 1)  # of the kinds of tasks


@lru_cache(_KEPT)
def _rank_steps(
    schedule: str, ranks: int, vpp: int, microbatches: int
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """(what, task) of every action of every rank, in whole numbers."""
    flow = task_flow(schedule, ranks, vpp, microbatches)
    stages = ranks * vpp
    placed: list[list[tuple[int, int, int, int]]] = [[] for _ in range(ranks)]  # time, index, what, task
    ends = [0]
    for i, (code, rank, place) in enumerate(zip(flow.codes, flow.rank, flow.place)):
        needs = flow.needs[i]
        start = max(ends[flow.before[i]], ends[needs])
        ends.append(
            start + 2 * _UNITS[place // stages]
        )  # times are even, messages come before what starts then
        placed[rank].append((start + 1, i, RUN, code))
        sender = flow.rank[needs - 1] if needs else rank
        if sender != rank:
            sent = ends[needs], needs - 1, flow.codes[needs - 1]
            placed[sender].append((sent[0], sent[1], SEND, sent[2]))
            placed[rank].append((sent[0], sent[1], RECEIVE, sent[2]))
    return tuple(tuple((what, task) for *_, what, task in sorted(own)) for own in placed)


@dataclass(frozen=True)
class Moment:
    """What a rank holds while one task runs; tuples have an entry for each of its stages (its *chunks*,
    ``stage // ranks``).

    ``alive``: micro-batches whose forward has begun and whose backward (of the input) has not ended;
    ``deferred``: those whose weight gradients are still to be made; ``waiting``: activations received whose
    forward has not begun; ``gradients``: gradients received whose backward has not ended. ``sending_forward``
    and ``sending_backward``: stages' messages that left since the task before, counted the same way.
    """

    kind: Kind
    chunk: int
    alive: tuple[int, ...]
    deferred: tuple[int, ...]
    waiting: tuple[int, ...]
    gradients: tuple[int, ...]
    sending_forward: tuple[int, ...]
    sending_backward: tuple[int, ...]

    def waits_to_send(self, chunk: int) -> int:
        """How many tensors like those that the stage sends on are held: outputs, and their gradients."""
        made = self.kind == "forward" and self.chunk == chunk
        return self.gradients[chunk] + self.sending_forward[chunk] + made

    def waits_to_receive(self, chunk: int) -> int:
        """The same of tensors like those that the stage receives."""
        return self.waiting[chunk] + self.sending_backward[chunk]

    def counts(self) -> tuple[int, ...]:
        """All counts in a row."""
        return (
            *self.alive, *self.deferred, *self.waiting, *self.gradients,
            *self.sending_forward, *self.sending_backward,
        )  # fmt: skip


def moments_of(schedule: str, ranks: int, vpp: int, microbatches: int) -> int:
    """Micro-batches of the shortest step with the same moments: a long step repeats its middle, so one of as
    many groups of micro-batches as it takes to fill and drain has them all."""
    most = _PERIODS * ranks
    periodic = schedule != "gpipe" and (vpp == 1 or microbatches % ranks == 0)
    return most if periodic and microbatches > most else microbatches


def rank_moments(schedule: str, rank: int, ranks: int, vpp: int, microbatches: int) -> tuple[Moment, ...]:
    """The moments of one rank over the whole step, each once, without those that hold less than another."""
    return _rank_moments(schedule, rank, ranks, vpp, moments_of(schedule, ranks, vpp, microbatches))


@lru_cache(64 * _KEPT)
def _rank_moments(schedule: str, rank: int, ranks: int, vpp: int, microbatches: int) -> tuple[Moment, ...]:
    walk = _Walk(TaskCode(ranks * vpp, microbatches), ranks, vpp)
    for what, task in _rank_steps(schedule, ranks, vpp, microbatches)[rank]:
        walk.take(what, task)
    return _largest(list(walk.seen))


_PERIODS = 3  # fill, one round of the steady state, drain


class _Walk:
    """Counts what a rank holds, action by action."""

    def __init__(self, code: TaskCode, ranks: int, vpp: int) -> None:
        self.code, self.ranks, self.vpp = code, ranks, vpp
        self.alive, self.deferred, self.waiting = [0] * vpp, [0] * vpp, [0] * vpp
        self.gradients, self.forward, self.backward = [0] * vpp, [0] * vpp, [0] * vpp
        self.seen: dict[Moment, None] = {}

    def take(self, what: int, task: int) -> None:
        kind, stage = divmod(task // self.code.microbatches, self.code.stages)
        chunk = stage // self.ranks
        if what == RUN:
            self._run(kind, chunk)
        elif what == SEND:
            (self.backward if kind else self.forward)[chunk] += 1
        elif kind == FORWARD:
            self.waiting[(stage + 1) // self.ranks] += 1
        else:
            self.gradients[(stage - 1) // self.ranks] += 1

    def _run(self, kind: int, chunk: int) -> None:
        if kind == FORWARD:
            self.waiting[chunk] = max(0, self.waiting[chunk] - 1)
            self.alive[chunk] += 1
        held = (self.alive, self.deferred, self.waiting, self.gradients, self.forward, self.backward)
        self.seen[Moment(KINDS[kind], chunk, *map(tuple, held))] = None
        self.forward, self.backward = [0] * self.vpp, [0] * self.vpp
        if kind in (BACKWARD, INPUT):
            self.alive[chunk] -= 1
            self.gradients[chunk] = max(0, self.gradients[chunk] - 1)
        if kind in (INPUT, WEIGHT):
            self.deferred[chunk] += 1 if kind == INPUT else -1


def _largest(moments: Sequence[Moment]) -> tuple[Moment, ...]:
    """Without the moments in which another of the same task holds at least as much of everything."""
    kept: list[Moment] = []
    groups: dict[tuple[Kind, int], list[Moment]] = {}
    for moment in moments:
        groups.setdefault((moment.kind, moment.chunk), []).append(moment)
    for group in groups.values():
        counts = np.array([moment.counts() for moment in group])
        order = np.argsort(-counts.sum(1), kind="stable")
        counts, maximal = counts[order], np.ones(len(group), bool)
        for i in range(1, len(group)):
            before = counts[:i][maximal[:i]]
            maximal[i] = not bool((before >= counts[i]).all(1).any())
        kept += [group[int(i)] for i, largest in zip(order, maximal) if largest]
    return tuple(kept)
