"""What every pipeline rank does when: a part with its forecast in, one track of work a rank out.

The schedule is run by the event simulation that priced the plan, so a track ends where the forecast does.
Replicas and tensor-parallel peers of a rank do the same at the same time: a track stands for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autoplan.plan import Part, Plan, StagePrediction
from autoplan_cost_models.schedule import Event, simulate

# What a rank does once a step: before its first micro-batch, and after its last.
ONCE = ("weight_gather", "gradient_sync", "tied_sync", "optimizer")


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
    late_s = _weights_arrive_s(known)
    events = [tuple(_later(event, late_s) for event in own) for own in run.events]
    step_s = plan.prediction.step_time_s
    tracks = tuple(_track(rank, part, own, step_s) for rank, own in enumerate(events))
    return Timeline(part, tracks, late_s + run.makespan_s, step_s)


def _weights_arrive_s(told: Sequence[StagePrediction]) -> float:
    """How much later the step runs for weights gathered at its start: a stage waits for its first
    micro-batch in any case."""
    waits, before_s = [0.0], 0.0
    for one in told:
        waits.append(one.weight_gather_s - before_s)
        before_s += one.forward_s
    return max(waits)


def _later(event: Event, late_s: float) -> Event:
    return replace(event, start_s=event.start_s + late_s, end_s=event.end_s + late_s)


def _track(rank: int, part: Part, events: tuple[Event, ...], step_s: float) -> Track:
    stages = tuple(range(rank, len(part.stages), part.mesh.pp))
    devices = part.mesh.stage_devices
    once = (*_before(part, events), *_after(part, stages, events[-1].end_s, step_s))
    return Track(rank, rank * devices, devices, stages, events, once)


def _before(part: Part, events: Sequence[Event]) -> Iterator[Once]:
    """New weights arrive just before a stage's first forward, as far as the rank has nothing else to do."""
    seen: set[int] = set()
    free_s = 0.0
    for event in events:
        told = part.stages[event.stage].prediction
        if event.stage not in seen and told is not None:
            seen.add(event.stage)
            begin_s = max(free_s, event.start_s - told.weight_gather_s)
            if told.weight_gather_s and begin_s < event.start_s:
                yield Once("weight_gather", begin_s, event.start_s)
        free_s = event.end_s


def _after(part: Part, stages: tuple[int, ...], ready_s: float, step_s: float) -> Iterator[Once]:
    """Gradients are reduced as soon as the rank is done, parameters shared with other stages when all are;
    the update ends the step on every rank at once (it waits for the global norm, which waits for the
    slowest)."""
    told = [one for s in stages if (one := part.stages[s].prediction) is not None]
    spent = {kind: sum(getattr(one, f"{kind}_s") for one in told) for kind in ONCE[1:]}
    longest_s = max(
        sum(one.optimizer_s for stage in part.stages[rank :: part.mesh.pp] if (one := stage.prediction))
        for rank in range(part.mesh.pp)
    )
    ends_s = ready_s + spent["gradient_sync"]
    update_s = max(ends_s + spent["tied_sync"], step_s - longest_s)
    begins = {
        "gradient_sync": ready_s,
        "tied_sync": update_s - spent["tied_sync"],
        "optimizer": update_s,
    }
    for kind, begin_s in begins.items():
        if spent[kind] > 0:
            yield Once(kind, begin_s, begin_s + spent[kind])
