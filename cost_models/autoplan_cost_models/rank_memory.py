"""Peak memory of one pipeline rank over the order of its schedule, with every contributor by name.

Comes in: the rank's stages with their regions, costs and recompute, and the moments of its schedule
(:func:`autoplan.schedules.rank_moments`). Goes out: the peak in bytes and its
:class:`~autoplan.plan.MemoryItem` list, largest first, which sums to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from autoplan.plan import MemoryItem
from autoplan.schedules import Moment
from autoplan_cost_models.stage_memory import (
    PlacedRegion,
    StageSetting,
    gathered_items,
    state_items,
)


@dataclass(frozen=True)
class StageLoad:
    """One stage of a rank: its regions, the bytes of the tensors that it receives and sends on, and of the
    gradients that each region's backward leaves behind (empty: all are there all the time)."""

    regions: tuple[PlacedRegion, ...]
    received_bytes: float = 0.0
    sent_bytes: float = 0.0
    gradients: tuple[float, ...] = ()

    @cached_property
    def saved_bytes(self) -> float:
        """What one micro-batch in flight keeps, side inputs once."""
        return sum(_saved(region) for region in self.regions) + sum(self.side.values())

    @cached_property
    def deferred_bytes(self) -> float:
        """What a split backward of one micro-batch keeps."""
        return sum(map(_deferred, self.regions))

    @cached_property
    def side(self) -> dict[str, float]:
        """Masks and tables that every block reads: once a stage and micro-batch."""
        return {item.name: item.bytes for region in self.regions for item in region.cost.side_items}

    @cached_property
    def worst(self) -> int:
        """The region in whose backward most is alive: those before it keep what they saved, those after it
        are freed already."""
        return self._worst(split=False)

    @cached_property
    def worst_of_split(self) -> int:
        """The same where regions after it keep what their weight gradients need."""
        return self._worst(split=True)

    def running_bytes(self, kind: str) -> float:
        """What a task adds to its micro-batch's saved bytes at its worst region (less than nothing is
        possible where much is freed by then)."""
        if kind == "backward_weight":
            return 0.0
        worst = self.worst_of_split if kind == "backward_input" else self.worst
        freed = sum(_saved(region) for region in self.regions[worst + 1 :])
        kept = sum(map(_deferred, self.regions[worst:])) if kind == "backward_input" else 0.0
        region = self.regions[worst]
        return region.cost.transient_bytes[region.recompute] + kept - freed + self.made_bytes(worst)

    def made_bytes(self, region: int) -> float:
        """Gradients there while the region runs backward: those of the regions after it."""
        return sum(self.gradients[region + 1 :])

    def _worst(self, *, split: bool) -> int:
        alive, kept = 0.0, sum(map(_deferred, self.regions)) if split else 0.0
        peaks: list[float] = []
        for region in self.regions:
            alive += _saved(region)
            made = self.made_bytes(len(peaks)) if self.gradients else 0.0
            peaks.append(alive + region.cost.transient_bytes[region.recompute] + kept + made)
            kept -= _deferred(region) if split else 0.0
        return max(range(len(peaks)), key=lambda index: peaks[index])


def rank_memory(
    stages: Sequence[StageLoad], setting: StageSetting, moments: Sequence[Moment]
) -> tuple[float, tuple[MemoryItem, ...]]:
    """Peak bytes of a rank and named items: the states of all its stages, and the fullest moment."""
    regions = [region for stage in stages for region in stage.regions]
    fullest = max(moments, key=lambda moment: moment_bytes(stages, moment))
    items = [
        *state_items(regions, setting),
        *gathered_items(regions, setting),
        *moment_items(stages, fullest),
    ]
    named = tuple(sorted((item for item in items if item.bytes > 0), key=lambda item: -item.bytes))
    return sum(item.bytes for item in named), named


def moment_bytes(stages: Sequence[StageLoad], moment: Moment) -> float:
    """What the schedule holds at one moment, beyond states."""
    total = stages[moment.chunk].running_bytes(moment.kind)
    for chunk, stage in enumerate(stages):
        total += moment.alive[chunk] * stage.saved_bytes + moment.deferred[chunk] * stage.deferred_bytes
        total += moment.waits_to_send(chunk) * stage.sent_bytes
        total += moment.waits_to_receive(chunk) * stage.received_bytes
    return total


def moment_items(stages: Sequence[StageLoad], moment: Moment) -> list[MemoryItem]:
    """The same by name."""
    items: list[MemoryItem] = []
    between = 0.0
    for chunk, stage in enumerate(stages):
        running = moment.kind if chunk == moment.chunk else "backward_weight"
        worst = stage.worst_of_split if running == "backward_input" else stage.worst
        keeps = len(stage.regions) if running == "backward_weight" else worst + 1
        items += _saved_items(stage, moment.alive[chunk], keeps)
        items += [] if running == "backward_weight" else _transient_items(stage.regions[worst])
        items.append(MemoryItem("gradients made by then", stage.made_bytes(worst)))
        own = stage.regions[worst:] if running == "backward_input" else ()
        waiting = moment.deferred[chunk] * stage.deferred_bytes + sum(map(_deferred, own))
        items.append(MemoryItem(f"kept for weight gradients of {stage.regions[0].name}..", waiting))
        between += moment.waits_to_send(chunk) * stage.sent_bytes
        between += moment.waits_to_receive(chunk) * stage.received_bytes
    return [*items, MemoryItem("tensors on their way between stages", between)]


def micro_batch_bytes(stage: StageLoad) -> tuple[float, float]:
    """(kept by a micro-batch in flight, taken at the peak by the one that runs backward) of a stage."""
    return stage.saved_bytes, stage.saved_bytes + stage.running_bytes("backward")


def _saved_items(stage: StageLoad, alive: int, keeps: int) -> list[MemoryItem]:
    """Saved activations of ``alive`` micro-batches, grouped by layout and recompute; a single region's
    largest tensors by name. One of them has those of the first ``keeps`` regions alone."""
    groups: dict[tuple[str, str], list[int]] = {}
    for index, region in enumerate(stage.regions):
        groups.setdefault((region.layout, region.recompute), []).append(index)
    items: list[MemoryItem] = []
    for (_, recompute), members in groups.items():
        count = alive * len(members) - sum(1 for index in members if index >= keeps)
        first = stage.regions[members[0]]
        if len(members) == 1:
            items.extend(_named_tensors(first, count))
        else:
            label = f"saved activations of {len(members)} x {first.name}.. ({_word(recompute)}"
            items.append(MemoryItem(f"{label}, {alive} in flight)", count * _saved(first)))
    return items + [MemoryItem(f"side input {name}", alive * size) for name, size in stage.side.items()]


def _named_tensors(region: PlacedRegion, alive: int) -> list[MemoryItem]:
    items = region.cost.saved_items[region.recompute]
    large = [item for item in items if item.bytes >= 0.1 * _saved(region)]
    rest = _saved(region) - sum(item.bytes for item in large)
    named = [MemoryItem(f"{item.name} saved by {region.name}", alive * item.bytes) for item in large]
    return [*named, MemoryItem(f"other saved activations of {region.name}", alive * rest)]


def _transient_items(region: PlacedRegion) -> list[MemoryItem]:
    items = region.cost.transient_items[region.recompute]
    return [MemoryItem(f"{item.name} of {region.name}", item.bytes) for item in items]


def _saved(region: PlacedRegion) -> float:
    return region.cost.saved_bytes[region.recompute]


def _deferred(region: PlacedRegion) -> float:
    return sum(item.bytes for item in region.cost.deferred_items)


def _word(recompute: str) -> str:
    return {"none": "no recompute", "selective": "selective recompute", "full": "full recompute"}[recompute]
