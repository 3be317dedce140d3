"""Pipeline schedules: the event simulation against closed forms and proved bounds."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from autoplan.errors import BadInputError
from autoplan_cost_models import in_flight, lower_bound_1f1b, simulate

EQUAL = [(1, 1), (2, 2), (4, 4), (4, 16), (8, 8), (8, 32), (5, 13)]


@pytest.mark.parametrize(("stages", "microbatches"), EQUAL)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_equal_stages_take_the_closed_form(schedule: str, stages: int, microbatches: int) -> None:
    """(m + p - 1)(f + b), and with latency l a hop, gpipe adds 2 (p - 1) l."""
    timeline = simulate(schedule, [1.0] * stages, [2.0] * stages, microbatches)
    assert math.isclose(timeline.makespan_s, 3.0 * (microbatches + stages - 1))
    assert math.isclose(timeline.bubble_s, 3.0 * (stages - 1))
    late = simulate("gpipe", [1.0] * stages, [2.0] * stages, microbatches, [0.1] * (stages - 1))
    assert math.isclose(late.makespan_s, timeline.makespan_s + 0.2 * (stages - 1))


def test_simulation_is_never_below_the_bound_and_often_near() -> None:
    """The textbook formula is no bound (stages of wild ratios beat it by 4%); the rows are."""
    draw = random.Random(0)
    ratios: list[float] = []
    for _ in range(400):
        stages = draw.choice([2, 4, 8])
        microbatches = draw.choice([stages, 2 * stages, 4 * stages])
        forward = [draw.uniform(0.2, 3) for _ in range(stages)]
        backward = [draw.uniform(0.2, 3) for _ in range(stages)]
        hops = [draw.choice([0.0, 0.05]) for _ in range(stages - 1)]
        made = simulate("1f1b", forward, backward, microbatches, hops).makespan_s
        bound = lower_bound_1f1b(forward, backward, microbatches)
        assert made >= bound * (1 - 1e-12)
        ratios.append(made / bound)
    assert sorted(ratios)[len(ratios) // 2] < 1.02


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "microbatches"), [(4, 2), (4, 9), (3, 3)])
def test_events_are_legal_and_hold_what_in_flight_says(schedule: str, stages: int, microbatches: int) -> None:
    """No stage runs two things at once, data arrives before it is used, nothing runs twice."""
    timeline = simulate(schedule, [1.0, 1.5, 0.5, 1.0][:stages], [2.0] * stages, microbatches)
    ended: dict[tuple[str, int, int], float] = {}
    for event in sorted((e for stage in timeline.events for e in stage), key=lambda e: (e.end_s, e.start_s)):
        before = (
            event.kind,
            event.stage - 1 if event.kind == "forward" else event.stage + 1,
            event.microbatch,
        )
        if 0 <= before[1] < stages:
            assert ended[before] <= event.start_s
        ended[event.kind, event.stage, event.microbatch] = event.end_s
    assert len(ended) == 2 * stages * microbatches
    for index, events in enumerate(timeline.events):
        assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(events))
        held = most = 0
        for event in events:
            held += 1 if event.kind == "forward" else -1
            most = max(most, held)
        assert most == in_flight(schedule, index, stages, microbatches)


def test_unknown_schedule_names_the_known_ones() -> None:
    """A typo in a pin must not run as 1f1b."""
    with pytest.raises(BadInputError, match="expected one of 1f1b, gpipe"):
        simulate("zigzag", [1.0], [1.0], 1)
