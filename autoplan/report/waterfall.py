"""Where the step's time goes: a plan's forecast in, steps from the ideal time to the predicted one out.

The ideal is the model's own arithmetic at the chip's peak rate, on all devices at once: MFU x step. Compute
beyond it is inefficiency (kernels below peak, work that MFU does not count, the busiest stage's larger
share). The rest is the forecast's breakdown, which sums to the step.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoplan.plan import Plan, StagePrediction

# Entries of a breakdown in the order they are told; others follow as they come.
_SAID = {
    "recompute": ("recompute", "forward run again in backward, to keep less"),
    "tp_communication": ("communication inside layers", "collectives that compute does not hide"),
    "zero_gather": ("ZeRO traffic that shows", "gathers and reduce-scatters beyond what compute hides"),
    "pipeline_bubble": ("pipeline bubble", "the busiest rank waits for the others"),
    "p2p": ("stage to stage", "hops of activations and gradients that delay the schedule"),
    "gradient_sync": ("gradient sync", "between replicas, and of parameters that stages share, once a step"),
    "optimizer": ("optimizer", "one pass over the states, once a step"),
}
_ORDER = tuple(_SAID)
_AXES = {
    "tp": ("tensor-parallel communication", "collectives on the tp axis, inside layers"),
    "cp": ("context-parallel communication", "collectives on the cp axis, round attention"),
    "ep": ("expert-parallel communication", "all-to-alls of tokens to experts and back"),
}


@dataclass(frozen=True)
class Fall:
    """One step of the waterfall: ``seconds`` from ``from_s`` on."""

    key: str
    name: str
    why: str
    from_s: float
    seconds: float


def waterfall(plan: Plan) -> tuple[Fall, ...]:
    """From the ideal to the step; empty without a forecast. Steps of no time are left out."""
    told = plan.prediction
    if told is None or not told.breakdown_s:
        return ()
    ideal_s = told.mfu * told.step_time_s
    rest = dict(told.breakdown_s)
    beyond_s = rest.pop("compute", ideal_s) - ideal_s
    parts = [
        ("ideal", "ideal", "the model's arithmetic at peak rate on every device", ideal_s),
        (
            "inefficiency",
            "below peak",
            "kernels below peak rate, other ops, the busiest stage's share",
            beyond_s,
        ),
    ]
    ordered = sorted(rest, key=lambda key: _ORDER.index(key) if key in _ORDER else len(_ORDER))
    for key in ordered:
        parts += _split(key, rest[key], busiest(plan))
    falls: list[Fall] = []
    clock = 0.0
    for key, name, why, seconds in parts:
        if seconds:
            falls.append(Fall(key, name, why, clock, seconds))
            clock += seconds
    return tuple(falls)


def _split(key: str, seconds: float, stage: StagePrediction | None) -> list[tuple[str, str, str, float]]:
    """Communication inside layers by axis, in the shares of the busiest stage."""
    name, why = _SAID.get(key, (key.replace("_", " "), ""))
    if key != "tp_communication" or stage is None:
        return [(key, name, why, seconds)]
    shares = {axis: _axis_s(stage, axis) for axis in _AXES}
    total = sum(shares.values())
    if not total:
        return [(key, name, why, seconds)]
    return [(axis, *_AXES[axis], seconds * share / total) for axis, share in shares.items() if share]


def _axis_s(stage: StagePrediction, axis: str) -> float:
    return stage.forward_parts_s.get(axis, 0.0) + stage.backward_parts_s.get(axis, 0.0)


def busiest(plan: Plan) -> StagePrediction | None:
    """The stage whose time the forecast's breakdown tells."""
    told = [stage.prediction for part in plan.parts for stage in part.stages if stage.prediction is not None]
    return max(told, key=lambda one: one.forward_s + one.backward_s, default=None)
