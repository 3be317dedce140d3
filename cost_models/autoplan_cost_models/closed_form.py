"""Step times of many plans at once, in closed form.

Comes in: arrays of stage times, a row a plan, of plans with one schedule, number of stages and
micro-batches. Goes out: seconds a step, by the linear rows of
:func:`~autoplan_cost_models.schedule.bound_rows`: never above the event simulation, and equal to it where
stages are equal.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autoplan_cost_models.schedule import bound_rows

Floats = NDArray[np.float64]


def steps_s(
    schedule: str,
    forward_s: Floats,
    backward_s: Floats,
    microbatches: int,
    *,
    vpp: int = 1,
    hop_s: Floats | float = 0.0,
    once_s: Floats | float = 0.0,
) -> Floats:
    """Seconds a step of each plan; ``forward_s`` and ``backward_s`` are [plans, stages] of one micro-batch.

    ``hop_s`` is one hop between stages, ``once_s`` what a plan does once a step (gradients, update): a
    number, or one for each plan. For schedules that do not split the backward.
    """
    rows = bound_rows(schedule, forward_s.shape[1] // vpp, vpp, microbatches)
    bounds = forward_s @ rows.forward.T + backward_s @ rows.backward.T
    bounds += np.multiply.outer(np.broadcast_to(hop_s, len(forward_s)), rows.hops)
    return np.max(bounds, axis=1) + once_s
