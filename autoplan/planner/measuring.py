"""Measuring every way to cut a model, in two processes: costs and ways come in, the costs know them after.

What is measured is the same in whichever process; what the other one did not do is done when asked for.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from autoplan.capture.forked import Beside
from autoplan.plan import FUSE
from autoplan.planner.model_costs import Known, ModelCosts
from autoplan.planner.space import ALONE, Inside

LEAST_GROUPS = 3  # ways to cut, from which another process pays
WAIT_S = 30  # for the other process, beyond twice what this one's half took


def measure_all(costs: ModelCosts, insides: Iterable[Inside]) -> None:
    """Measure every region class under every way to cut it, half of them in a forked copy of this process."""
    groups: dict[Inside, list[Inside]] = {}
    for inside in sorted(set(insides)):
        groups.setdefault(replace(inside, ep=1, fuse=FUSE[0]), []).append(inside)
    if len(groups) < LEAST_GROUPS:
        return
    halves: tuple[list[Inside], list[Inside]] = ([], [])
    for group in sorted(groups.values(), key=len, reverse=True):
        min(halves, key=len).extend(group)
    with costs.timed():
        _measure(costs, [ALONE])  # all others are compared with it
        beside = Beside(lambda: _measure(costs, halves[1]))
        start_s = time.perf_counter()
        _measure(costs, halves[0])
        known: Known | None = beside.result(timeout_s=WAIT_S + 2 * (time.perf_counter() - start_s))
        costs.learn(known or {})


def _measure(costs: ModelCosts, insides: Sequence[Inside]) -> Known:
    for inside in insides:
        for class_id in costs.classes:
            costs.measured(class_id, inside)
    return costs.known()
