"""A plan whose check failed in, sentences that say where it went wrong out.

Two ways: the type check of the very graphs that ran, and the first rewrite of the sharding pass without which
the check holds, by bisection.
"""

from __future__ import annotations

from collections.abc import Iterator

from autoplan.errors import AutoplanError
from autoplan.plan import Plan
from autoplan.runtime.check import Checker
from autoplan.runtime.prepare import single_part
from autoplan.runtime.verify import verify_capture
from autoplan_passes.fuel import VARIABLE, Fuel, Rewrite


def locate(checker: Checker, plan: Plan) -> Iterator[str]:
    """What can be said of a plan whose check against ``checker``'s reference failed."""
    capture, regions = checker.traced(single_part(plan).micro_batch)
    faults = verify_capture(capture, regions, plan, passes=checker.passes).faults
    yield from (f"type check: {fault}" for fault in faults)
    total = len(checker.prepare(plan, Fuel()).fuel.asked)
    wrong = first_wrong_rewrite(checker, plan)
    if wrong is None:
        yield (
            "the sharding pass is not to blame: the check fails with none of its rewrites made "
            f"({VARIABLE}=0). What is left are replicas, stages and the sums over them."
        )
        return
    number, rewrite = wrong
    yield (
        f"the first wrong rewrite is number {number} of {total}: {rewrite}. The check holds with "
        f"{VARIABLE}={number - 1} and fails with {VARIABLE}={number}."
    )


def first_wrong_rewrite(checker: Checker, plan: Plan) -> tuple[int, Rewrite] | None:
    """The number of the first rewrite that makes the check fail, and the rewrite; None where it is none."""
    rewrites = checker.prepare(plan, Fuel()).fuel.asked
    right, wrong = -1, len(rewrites)
    while wrong - right > 1:
        middle = (right + wrong) // 2
        right, wrong = (middle, wrong) if _holds(checker, plan, middle) else (right, middle)
    return (wrong, rewrites[wrong - 1]) if wrong > 0 else None


def _holds(checker: Checker, plan: Plan, amount: int) -> bool:
    """Whether the check holds with so many rewrites made; a run that breaks down does not."""
    try:
        return checker.compare(checker.prepare(plan, Fuel(amount))).ok
    except AutoplanError:
        return False
