"""Memory of every pipeline rank over the step: a simulated timeline in, bytes over time out.

A micro-batch in flight keeps its saved tensors from its forward to its backward; while it runs backward it
takes what the peak counts for one. Everything else (weights, states, buffers) is there all the time. The
curve's maximum is the stage's predicted peak where the schedule reaches the in-flight count it was priced at.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoplan.plan import StagePrediction
from autoplan.report.timeline import Timeline, Track


@dataclass(frozen=True)
class Curve:
    """``points`` are (seconds, bytes), joined by straight lines; ``always_bytes`` is the floor."""

    track: Track
    points: tuple[tuple[float, float], ...]
    always_bytes: float
    peak_bytes: float
    limit_bytes: float

    @property
    def highest_bytes(self) -> float:
        return max(amount for _, amount in self.points)


def always_bytes(told: StagePrediction) -> float:
    """What is held whether or not a micro-batch is in flight."""
    moving = max(told.in_flight - 1, 0) * told.saved_bytes + told.backward_bytes
    return max(0.0, told.memory_peak_bytes - moving)


def memory_curve(line: Timeline, track: Track) -> Curve:
    """Steps up with every forward, over the backward's own peak and down with every backward."""
    told = {stage: line.told[stage] for stage in track.stages}
    floor = sum(always_bytes(one) for one in told.values())
    held = floor
    points = [(0.0, held)]
    for event in track.events:
        one = told[event.stage]
        points.append((event.start_s, held))
        if event.kind == "forward":
            held += one.saved_bytes
        elif event.kind == "backward":
            points.append(((event.start_s + event.end_s) / 2, held - one.saved_bytes + one.backward_bytes))
            held -= one.saved_bytes
        points.append((event.end_s, held))
    points.append((line.step_s, held))
    peak = sum(one.memory_peak_bytes for one in told.values())
    limit = min(one.memory_limit_bytes for one in told.values())
    return Curve(track, tuple(points), floor, peak, limit)
