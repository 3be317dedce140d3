"""What every pipeline rank does when: a part with its forecast in, one track of work a rank out.

The schedule is run by the event simulation that priced the plan, so a track ends where the forecast does.
Replicas and tensor-parallel peers of a rank do the same at the same time: a track stands for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from autoplan.plan import Part, Plan, StagePrediction
from autoplan_cost_models.schedule import Event, simulate

ONCE = ("gradient_sync", "optimizer")  # what a rank does once a step, after its last micro-batch


@dataclass(frozen=True)
class Once:
    """Something a rank does once a step."""

    kind: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Track:
    """One rank of the pp axis, for all devices that share it: ``devices`` from global rank ``first`` on."""

    rank: int
    first: int
    devices: int
    stages: tuple[int, ...]
    events: tuple[Event, ...]
    once: tuple[Once, ...]

    @property
    def busy_s(self) -> float:
        return sum(event.end_s - event.start_s for event in self.events)

    @property
    def label(self) -> str:
        """``rank 0`` or ``ranks 0-31``: the global ranks that run this."""
        if self.devices == 1:
            return f"rank {self.first}"
        return f"ranks {self.first}-{self.first + self.devices - 1}"


@dataclass(frozen=True)
class Timeline:
    """``step_s`` is the end of the step; between a track's work lie its bubbles."""

    part: Part
    tracks: tuple[Track, ...]
    last_backward_s: float
    step_s: float

    @cached_property
    def told(self) -> tuple[StagePrediction, ...]:
        return tuple(stage.prediction for stage in self.part.stages if stage.prediction is not None)

    def parts_s(self, event: Event) -> Mapping[str, float]:
        """What an event's seconds go to, by cause; they sum to its length."""
        told = self.told[event.stage]
        if event.kind == "backward_weight":
            return {"compute": told.weight_s}
        if event.kind == "backward_input":
            computed_s = told.backward_parts_s.get("compute", told.backward_s) - told.weight_s
            return {**told.backward_parts_s, "compute": computed_s}
        return told.forward_parts_s if event.kind == "forward" else told.backward_parts_s

    def bubble_s(self, track: Track) -> float:
        """Seconds of the step in which the rank waits."""
        return self.step_s - track.busy_s - sum(one.end_s - one.start_s for one in track.once)

    def spent_s(self, track: Track) -> dict[str, float]:
        """Seconds of the step by cause, in the order of the first event that has it; sums to the step."""
        spent: dict[str, float] = {}
        for event in track.events:
            for cause, seconds in self.parts_s(event).items():
                spent[cause] = spent.get(cause, 0.0) + seconds
        for one in track.once:
            spent[one.kind] = spent.get(one.kind, 0.0) + one.end_s - one.start_s
        return {**spent, "bubble": self.bubble_s(track)}


def direction(event: Event) -> str:
    """``forward`` or ``backward``, of the inputs or whole; ``weight`` for weight gradients alone."""
    return {"backward_input": "backward", "backward_weight": "weight"}.get(event.kind, event.kind)


def timeline(plan: Plan, part: Part) -> Timeline | None:
    """The step as the forecast sees it; None where a stage has no forecast."""
    told = [stage.prediction for stage in part.stages]
    known = [one for one in told if one is not None]
    if len(known) < len(told) or plan.prediction is None:
        return None
    run = simulate(
        part.schedule,
        [one.forward_s for one in known],
        [one.backward_s for one in known],
        part.microbatches,
        [one.hop_s for one in known[:-1]],
        vpp=part.vpp,
        weight_s=[one.weight_s for one in known],
    )
    step_s = plan.prediction.step_time_s
    tracks = tuple(_track(rank, part, run.events, step_s) for rank in range(part.mesh.pp))
    return Timeline(part, tracks, run.makespan_s, step_s)


def _track(rank: int, part: Part, events: tuple[tuple[Event, ...], ...], step_s: float) -> Track:
    stages = tuple(range(rank, len(part.stages), part.mesh.pp))
    devices = part.mesh.stage_devices
    once = _once(part, stages, events[rank][-1].end_s, step_s)
    return Track(rank, rank * devices, devices, stages, events[rank], once)


def _once(part: Part, stages: tuple[int, ...], ready_s: float, step_s: float) -> tuple[Once, ...]:
    """Gradients are reduced as soon as the rank is done; the update ends the step on every rank at once
    (it waits for the global norm, which waits for the slowest)."""
    told = [one for s in stages if (one := part.stages[s].prediction) is not None]
    sync_s, update_s = sum(one.gradient_sync_s for one in told), sum(one.optimizer_s for one in told)
    begin_s = max(ready_s + sync_s, step_s - max(update_s, _longest_update_s(part)))
    found = (Once("gradient_sync", ready_s, ready_s + sync_s), Once("optimizer", begin_s, begin_s + update_s))
    return tuple(one for one in found if one.end_s > one.start_s)


def _longest_update_s(part: Part) -> float:
    return max((stage.prediction.optimizer_s for stage in part.stages if stage.prediction), default=0.0)
