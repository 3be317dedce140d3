"""Pipeline schedules: torch's own tables, the event simulation, and bounds that no run may break."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import numpy as np
import pytest
from torch.distributed.pipelining import schedules as torch_schedules

import autoplan.schedules
from autoplan.errors import BadInputError
from autoplan.schedules import SCHEDULES, Task, rank_actions, rank_moments, rank_orders, splits_backward
from autoplan_cost_models import in_flight, lower_bound_s, simulate
from autoplan_cost_models.schedule import critical_path

EQUAL = [(1, 1), (2, 2), (4, 4), (4, 16), (8, 8), (8, 32), (5, 13)]
SHAPES = [  # schedule, ranks, stages a rank
    *(("1f1b", ranks, 1) for ranks in (1, 2, 3, 4, 6)),
    *itertools.product(("interleaved_1f1b", "zb_h1", "gpipe"), (1, 2, 3, 4), (1, 2, 3)),
]


@pytest.mark.parametrize(("stages", "microbatches"), EQUAL)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_equal_stages_take_the_closed_form(schedule: str, stages: int, microbatches: int) -> None:
    """(m + p - 1)(f + b), and with latency l a hop, gpipe adds 2 (p - 1) l."""
    timeline = simulate(schedule, [1.0] * stages, [2.0] * stages, microbatches)
    assert math.isclose(timeline.makespan_s, 3.0 * (microbatches + stages - 1))
    assert math.isclose(timeline.bubble_s, 3.0 * (stages - 1))
    late = simulate("gpipe", [1.0] * stages, [2.0] * stages, microbatches, [0.1] * (stages - 1))
    assert math.isclose(late.makespan_s, timeline.makespan_s + 0.2 * (stages - 1))


@pytest.mark.parametrize(("ranks", "groups"), [(2, 1), (4, 2), (8, 4)])
@pytest.mark.parametrize("vpp", [1, 2, 4])
def test_interleaving_divides_the_bubble(ranks: int, groups: int, vpp: int) -> None:
    """m t + (p - 1) t / v for equal stages (arXiv 2104.04473, section 2.2)."""
    m, stages = groups * ranks, ranks * vpp
    timeline = simulate("interleaved_1f1b", [1 / vpp] * stages, [2 / vpp] * stages, m, vpp=vpp)
    assert math.isclose(timeline.makespan_s, 3.0 * m + 3.0 * (ranks - 1) / vpp)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (8, 32)])
@pytest.mark.parametrize(("forward", "weight"), [(1.0, 1.0), (1.2, 0.8), (1.0, 0.5)])
def test_zero_bubble_fills_all_but_the_closed_form(
    ranks: int, microbatches: int, forward: float, weight: float
) -> None:
    """ZB-H1: m t + (p - 1)(f + b - w) with b the gradient of the input (arXiv 2401.10241, table 2)."""
    backward = 1.0 + weight
    timeline = simulate(
        "zb_h1", [forward] * ranks, [backward] * ranks, microbatches, weight_s=[weight] * ranks
    )
    whole = microbatches * (forward + backward)
    assert math.isclose(timeline.makespan_s, whole + (ranks - 1) * (forward + 1.0 - weight))


def torch_orders(name: str, ranks: int, vpp: int, microbatches: int) -> tuple[tuple[Task, ...], ...]:
    """The table that ``torch.distributed.pipelining`` makes for the same schedule, without its idle slots."""
    kinds = {"FORWARD": "forward", "FULL_BACKWARD": "backward"}
    kinds |= {"BACKWARD_INPUT": "backward_input", "BACKWARD_WEIGHT": "backward_weight"}
    base: Any = getattr(torch_schedules, name)
    made: Any = object.__new__(base)
    made.pp_group_size, made.n_local_stages, made._n_microbatches = ranks, vpp, microbatches
    made.number_of_rounds = max(1, microbatches // ranks)
    made.microbatches_per_round = microbatches // made.number_of_rounds
    return tuple(
        tuple(
            Task(kinds[action.computation_type.name], action.stage_index, action.microbatch_index)  # pyright: ignore[reportArgumentType]  one of the four
            for action in made._calculate_single_rank_operations(rank)
            if action is not None
        )
        for rank in range(ranks)
    )


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
@pytest.mark.parametrize("vpp", [1, 2, 3])
def test_orders_are_those_of_torch(ranks: int, vpp: int) -> None:
    """A schedule of our own making under a known name would surprise whoever knows that name."""
    ours = {"interleaved_1f1b": "ScheduleInterleaved1F1B", "zb_h1": "ScheduleInterleavedZeroBubble"}
    for microbatches in (1, 2, ranks, ranks + 1, 2 * ranks, 3 * ranks, 5 * ranks):
        if microbatches % max(1, microbatches // ranks):
            continue  # torch refuses it
        for schedule, theirs in ours.items():
            if schedule == "interleaved_1f1b" and vpp == 1:
                continue  # torch starts twice as many forwards as are needed
            expected = torch_orders(theirs, ranks, vpp, microbatches)
            assert rank_orders(schedule, ranks, vpp, microbatches) == expected


@pytest.mark.parametrize(("schedule", "ranks", "vpp"), SHAPES)
def test_messages_wait_for_nobody(schedule: str, ranks: int, vpp: int) -> None:
    """With every send and receive blocking until the other side is there, each rank gets to its end."""
    for microbatches in (1, 2, 3, ranks, ranks + 1, 4 * ranks):
        actions = [list(own) for own in rank_actions(schedule, ranks, vpp, microbatches)]
        arrived: set[Task] = set()
        while any(actions):
            progress = False
            for rank, own in enumerate(actions):
                while own and own[0].what == "run":
                    arrived.add(own.pop(0).task)
                    progress = True
                for other in actions:
                    pair = own and other and own[0].what == "send" and other[0].what == "receive"
                    if pair and own[0].task == other[0].task:
                        assert own[0].task in arrived and own[0].task.stage % ranks == rank
                        own.pop(0)
                        other.pop(0)
                        progress = True
            assert progress, (schedule, ranks, vpp, microbatches)


def test_simulation_is_never_below_the_bound_and_often_near() -> None:
    """The textbook formula is no bound (stages of wild ratios beat it by 4%); the rows are."""
    draw = random.Random(0)
    ratios: dict[str, list[float]] = {name: [] for name in ("1f1b", "interleaved_1f1b", "zb_h1")}
    for _ in range(500):
        schedule, ranks = draw.choice(list(ratios)), draw.choice([1, 2, 3, 4, 8])
        vpp = 1 if schedule == "1f1b" else draw.choice([1, 2, 3])
        microbatches = draw.choice([1, 2, ranks, ranks + 1, 2 * ranks, 4 * ranks])
        low, high = draw.choice([(0.2, 3.0), (0.9, 1.1)])
        forward = [draw.uniform(low, high) for _ in range(ranks * vpp)]
        backward = [2 * draw.uniform(low, high) for _ in forward]
        weight = [draw.uniform(0.3, 0.6) * b for b in backward]
        hop_s = draw.choice([0.0, 0.05])
        hops = [hop_s] * (len(forward) - 1)
        made = simulate(schedule, forward, backward, microbatches, hops, vpp=vpp, weight_s=weight)
        bound = lower_bound_s(
            schedule, forward, backward, microbatches, vpp=vpp, weight_s=weight, hop_s=hop_s
        )
        assert made.makespan_s >= bound * (1 - 1e-12)
        ratios[schedule].append(made.makespan_s / bound)
    assert all(sorted(found)[len(found) // 2] < 1.02 for found in ratios.values())


@pytest.mark.parametrize(("schedule", "ranks", "vpp"), SHAPES)
def test_a_critical_path_holds_for_any_seconds(schedule: str, ranks: int, vpp: int) -> None:
    """It is exact for the seconds it was found with, and becomes a row of a bound on all others."""
    draw = np.random.default_rng(ranks * vpp)
    for microbatches in (1, ranks, 3 * ranks + 1):
        after_s = draw.uniform(0, 2, ranks).tolist()
        pair = draw.uniform(0.2, 3.0, (2, 3, ranks * vpp))
        pair[:, 2] *= splits_backward(schedule)
        path, other = (
            critical_path(schedule, seconds, microbatches, 0.05, vpp=vpp, after_s=after_s) for seconds in pair
        )
        rows_s = [float(np.sum(path.counts * seconds)) for seconds in pair]
        more_s = 0.05 * path.hops + after_s[path.rank]
        assert math.isclose(rows_s[0] + more_s, path.ends_s)
        assert rows_s[1] + more_s <= other.ends_s * (1 + 1e-9)


@pytest.mark.parametrize(("schedule", "ranks", "vpp"), SHAPES)
@pytest.mark.parametrize("extra", [0, 1, 9])
def test_events_are_legal_and_hold_what_in_flight_says(
    schedule: str, ranks: int, vpp: int, extra: int
) -> None:
    """No rank runs two things at once, data arrives before it is used, nothing runs twice."""
    stages, microbatches = ranks * vpp, ranks + extra
    forward, weight = [1.0 + 0.3 * (s % 3) for s in range(stages)], [0.7] * stages
    timeline = simulate(schedule, forward, [2.0] * stages, microbatches, vpp=vpp, weight_s=weight)
    ended: dict[Task, float] = {}
    for event in sorted((e for rank in timeline.events for e in rank), key=lambda e: (e.end_s, e.start_s)):
        before = event.stage - 1 if event.kind == "forward" else event.stage + 1
        if event.kind != "backward_weight" and 0 <= before < stages:
            assert ended[Task(event.kind, before, event.microbatch)] <= event.start_s + 1e-9
        ended[Task(event.kind, event.stage, event.microbatch)] = event.end_s
    assert len(ended) == (3 if schedule == "zb_h1" else 2) * stages * microbatches
    for rank, events in enumerate(timeline.events):
        assert all(a.end_s <= b.start_s + 1e-9 for a, b in itertools.pairwise(events))
        assert (
            tuple(Task(e.kind, e.stage, e.microbatch) for e in events)
            == rank_orders(schedule, ranks, vpp, microbatches)[rank]
        )
        for stage in range(rank, stages, ranks):
            held = most = 0
            for event in events:
                if event.stage == stage and event.kind != "backward_weight":
                    held += 1 if event.kind == "forward" else -1
                    most = max(most, held)
            assert most == in_flight(schedule, stage, stages, microbatches, vpp)


@pytest.mark.parametrize(("schedule", "ranks", "vpp"), SHAPES)
def test_long_steps_hold_what_shorter_ones_do(
    schedule: str, ranks: int, vpp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is counted over a shorter step: it must have every moment of the long one."""
    long = 7 * ranks + (1 if vpp == 1 else 0)
    for rank in range(ranks):
        short = set(rank_moments(schedule, rank, ranks, vpp, long))
        with monkeypatch.context() as patch:
            patch.setattr(autoplan.schedules, "_PERIODS", 100)
            assert short == set(rank_moments(schedule, rank, ranks, vpp, long))


def test_unknown_schedule_names_the_known_ones() -> None:
    """A typo in a pin must not run as 1f1b."""
    with pytest.raises(BadInputError, match=f"expected one of {', '.join(SCHEDULES)}"):
        simulate("zigzag", [1.0], [1.0], 1)
    with pytest.raises(BadInputError, match="schedule=interleaved_1f1b"):
        simulate("1f1b", [1.0, 1.0], [1.0, 1.0], 1, vpp=2)
