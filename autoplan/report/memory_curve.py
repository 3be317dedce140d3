"""Memory of every pipeline rank over the step: a simulated timeline in, bytes over time out.

A micro-batch in flight keeps its saved tensors from its forward to its backward; while it runs backward it
takes what the peak counts for one. Everything else (weights, states, buffers) is there all the time. The
curve's maximum is the predicted peak.
"""

from __future__ import annotations

from dataclasses import dataclass

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


def memory_curve(line: Timeline, track: Track) -> Curve:
    """Steps up with every forward, over the backward's own peak and down with every backward; what weight
    gradients wait for goes with them."""
    held, points = 0.0, [(0.0, 0.0)]
    for event in track.events:
        one = line.told[event.stage]
        points.append((event.start_s, held))
        if event.kind == "forward":
            held += one.saved_bytes
        elif event.kind == "backward_weight":
            held -= one.deferred_bytes
        else:
            points.append(((event.start_s + event.end_s) / 2, held - one.saved_bytes + one.backward_bytes))
            held -= one.saved_bytes - (one.deferred_bytes if event.kind == "backward_input" else 0.0)
        points.append((event.end_s, held))
    points.append((line.step_s, held))
    mine = [line.told[stage] for stage in track.stages]  # each tells the memory of the whole device
    peak, limit = mine[0].memory_peak_bytes, mine[0].memory_limit_bytes
    floor = max(0.0, peak - max(amount for _, amount in points))
    return Curve(track, tuple((time_s, floor + amount) for time_s, amount in points), floor, peak, limit)
