"""Rules, on the axes after ``ep``, of the functions that take rows to their experts and back.

Rows move as they are, so that every dim of them but the first may be cut and partial sums pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from autoplan_passes.calls import Call
from autoplan_passes.dims import ADDEND, NONLINEAR, Form
from autoplan_passes.patterns import form_from_names
from autoplan_passes.rows import Choice, Row
from autoplan_passes.states import PARTIAL, REPLICATE, State


def _moved_rows(call: Call) -> Form:
    """``rows, splits, order``."""
    rows = ["rows!", *(f"d{i}" for i in range(1, len(call.output)))]
    return form_from_names(call, [rows, ["way!", "rank!"], ["arrived!"]], rows, ADDEND + NONLINEAR * 2)


def _counted_rows(_call: Call, cuts: Sequence[frozenset[State]]) -> Iterable[Choice]:
    """``ends, rows``: the rows are only counted, so that they may be in any state that keeps them all."""
    states = [PARTIAL, *sorted(state for state in cuts[1] if state.dim > 0)]
    return [Choice((REPLICATE, state), REPLICATE) for state in states]


ROWS: Mapping[str, Row] = {
    "route": Row(None, factory=_counted_rows),
    "own_experts": Row(None, replicated=True),
    "dispatch": Row(_moved_rows),
    "combine": Row(_moved_rows),
}
