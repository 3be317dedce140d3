"""One candidate mesh as a chain for the stage search, and a chosen cut as a priced part of a plan.

Comes in: costs per region class, the workload and pins. Goes out: :class:`~autoplan.planner.chain.Chain`
for a candidate, and :class:`Priced`, whose forecast comes from the cost models alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from autoplan.hardware import HardwareProfile
from autoplan.plan import (
    RECOMPUTE,
    Part,
    Prediction,
    RegionPlan,
    Stage,
    StagePrediction,
    Workload,
)
from autoplan.planner.chain import NEVER, Chain, ChainItem, Cut, OnceAStep
from autoplan.planner.model_costs import ModelCosts
from autoplan.planner.space import Candidate, Inside, Pins
from autoplan.planner.targets import first_blocks, recompute_kinds
from autoplan.regions import Region
from autoplan.targets import target_named
from autoplan_cost_models.collectives import Span
from autoplan_cost_models.region_cost import RegionCost
from autoplan_cost_models.region_work import ParameterUse
from autoplan_cost_models.stage_memory import arriving_bytes, memory_limit_bytes, unit_bytes
from autoplan_cost_models.stage_time import reduced_bytes, state_passes_s, weight_s, zero_exposed_s
from autoplan_cost_models.step import price_plan
from autoplan_cost_models.training_state import StateBytes, weight_bytes
from autoplan_cost_models.zero import Held, held_bytes, held_trained, step_gather_s, step_reduce_s

# Where recompute is hidden entirely behind ZeRO-3 traffic it costs nothing; keep the tensors all the same.
RECOMPUTE_LAST_S = 1e-9
ENDLESS_S = 1e4  # a backward that hides all it can


@dataclass(frozen=True)
class Priced:
    """A complete part with its forecast."""

    part: Part
    prediction: Prediction
    candidate: Candidate

    @property
    def fits(self) -> bool:
        return all(
            stage.prediction is not None
            and stage.prediction.memory_peak_bytes <= stage.prediction.memory_limit_bytes
            for stage in self.part.stages
        )

    @property
    def stages(self) -> tuple[StagePrediction, ...]:
        return tuple(stage.prediction for stage in self.part.stages if stage.prediction is not None)


class Pricing:
    """Everything about one workload that turns candidates into chains and cuts into forecasts."""

    def __init__(
        self,
        costs: ModelCosts,
        profile: HardwareProfile,
        workload: Workload,
        pins: Pins,
        options: Sequence[Candidate],
    ) -> None:
        self.costs, self.profile, self.workload, self.pins = costs, profile, workload, pins
        self.target = target_named(workload.target)
        self._first = first_blocks(self.target, [region.name for region in costs.regions])
        self.candidates = list(options)
        self.limit_bytes = memory_limit_bytes(profile)
        self._chains: dict[Candidate, Chain] = {}
        self._held: dict[Inside, dict[str, list[ParameterUse]]] = {}
        self._trained_by: dict[Inside, dict[str, Held]] = {}
        self._whole_by: dict[Inside, Held] = {}
        self._shared_pairs = _shared_pairs(costs.regions)
        self._count = Counter(region.class_id for region in costs.regions)
        held = Counter((region.class_id, name) for region in costs.regions for name in region.parameters)
        self._blocks_share = max(held.values(), default=0) > 1

    def chain(self, candidate: Candidate, *, limit_bytes: float | None = None) -> Chain:
        """The model's regions priced for one candidate; those that differ in their schedule share them."""
        plain = replace(candidate, schedule="1f1b", vpp=1)
        if plain not in self._chains:
            self._chains[plain] = self._chain(plain)
        return replace(
            self._chains[plain],
            limit_bytes=self.limit_bytes if limit_bytes is None else limit_bytes,
            stages=candidate.mesh.pp * candidate.vpp,
            schedule=candidate.schedule,
            vpp=candidate.vpp,
        )

    def _chain(self, candidate: Candidate) -> Chain:
        kinds = {
            (class_id, kinds): self._item(class_id, kinds, candidate)
            for class_id, kinds in {self._kind(region) for region in self.costs.regions}
        }
        cut_after = dict.fromkeys(region.class_id for region in self.costs.regions[:-1])
        trained = self._trained(candidate)
        span = Span(2, candidate.mesh.stage_devices)
        least = min((self._cost(name, candidate).output_bytes for name in cut_after), default=0.0)
        items = tuple(kinds[self._kind(region)] for region in self.costs.regions)
        return Chain(
            items=items,
            limit_bytes=self.limit_bytes,
            microbatches=candidate.microbatches,
            stages=candidate.mesh.pp,
            shared=self._shared(candidate),
            arriving_bytes=arriving_bytes(
                self._trained_whole(candidate).total,
                self.workload.dtype,
                candidate.groups,
            ),
            once_whole_s=self._once_whole_s(items, trained, candidate),
            hop_s=self.costs.cost_model.collective_s("p2p", least, span) if candidate.mesh.pp > 1 else 0.0,
            first=self._first,
        )

    def could_fit(self, candidate: Candidate) -> bool:
        """False where even an equal share of all states is more than a device has."""
        if self._blocks_share:
            return True
        states = sum(
            self._states(uses, candidate).total * self._count[class_id]
            for class_id, uses in self._held_first(candidate).items()
        )
        return states / candidate.mesh.pp <= self.limit_bytes

    def priced(self, candidate: Candidate, cut: Cut) -> Priced:
        """The part a cut makes, priced from scratch."""
        stages: list[Stage] = []
        first = 0
        for end in cut.ends:
            regions = self.costs.regions[first:end]
            plans = tuple(
                RegionPlan(region.name, self.costs.names[region.class_id], recompute)
                for region, recompute in zip(regions, cut.recompute[first:end])
            )
            stages.append(Stage(plans))
            first = end
        part = Part(
            name="model",
            mesh=candidate.mesh,
            micro_batch=candidate.micro_batch,
            microbatches=candidate.microbatches,
            schedule=candidate.schedule,
            zero=candidate.zero,
            stages=tuple(stages),
            vpp=candidate.vpp,
            zero_shard=candidate.zero_shard,
            fuse=candidate.fuse,
        )
        by_layout = {
            self.costs.names[class_id]: self._cost(class_id, candidate) for class_id in self.costs.classes
        }
        prediction, predictions = price_plan(part, by_layout, self.costs.cost_model, self.workload)
        told = tuple(Stage(stage.regions, p) for stage, p in zip(part.stages, predictions))
        return Priced(replace(part, stages=told), prediction, candidate)

    def _kind(self, region: Region) -> tuple[str, tuple[str, ...]]:
        return region.class_id, recompute_kinds(self.target, region.name, self.pins)

    def _cost(self, class_id: str, candidate: Candidate) -> RegionCost:
        return self.costs.cost(class_id, candidate.inside, candidate.micro_batch)

    def _item(self, class_id: str, kinds: tuple[str, ...], candidate: Candidate) -> ChainItem:
        cost, groups = self._cost(class_id, candidate), candidate.groups
        model, dtype = self.costs.cost_model, self.workload.dtype
        waits = [zero_exposed_s(cost, kind, model, groups, dtype) for kind in RECOMPUTE]
        passes = state_passes_s(cost, model, groups, dtype)
        slowest = model.speeds.slowest_of(candidate.mesh.devices)
        backward_s = slowest * (cost.backward_s + passes[1]) + cost.tp_backward_s + waits[0][1]
        extra = tuple(
            max(0.0, slowest * cost.recompute_s[kind] + waits[i][1] - waits[0][1])
            + (RECOMPUTE_LAST_S if i else 0.0)
            if kind in kinds
            else NEVER
            for i, kind in enumerate(RECOMPUTE)
        )
        return ChainItem(
            key=f"{class_id}/{' '.join(kinds)}",
            forward_s=slowest * (cost.forward_s + passes[0]) + cost.tp_forward_s + waits[0][0],
            backward_s=backward_s,
            extra_s=(extra[0], extra[1], extra[2]),
            saved_bytes=_three(cost.saved_bytes),
            transient_bytes=_three(cost.transient_bytes),
            static_bytes=self._states(cost.parameters, candidate).total + cost.buffer_bytes,
            gathered_bytes=unit_bytes(cost, dtype, groups),
            output_bytes=cost.output_bytes,
            side=tuple((item.name, item.bytes) for item in cost.side_items),
            once=self._once_a_step(class_id, candidate),
            weight_s=slowest * weight_s(cost, passes),
            deferred_bytes=sum(item.bytes for item in cost.deferred_items),
        )

    def _states(self, uses: Sequence[ParameterUse], candidate: Candidate) -> StateBytes:
        """What a rank keeps of parameters."""
        dtype, optimizer = self.workload.dtype, self.workload.optimizer
        return candidate.groups.states(held_bytes(uses), held_trained(uses), dtype=dtype, optimizer=optimizer)

    def _update_bytes(self, numel: Held, candidate: Candidate) -> float:
        """What updating trained parameters moves, at least."""
        dtype, optimizer = self.workload.dtype, self.workload.optimizer
        return candidate.groups.states(Held(), numel, dtype=dtype, optimizer=optimizer).optimizer_traffic

    def _once_a_step(self, class_id: str, candidate: Candidate) -> OnceAStep:
        """What a region adds, at least, to what its stage does once a step.

        All times are concave in bytes (latency, then bandwidth), so the time of the whole model's bytes,
        shared out by bytes, is at most the time of a stage's bytes.
        """
        model, groups, dtype = self.costs.cost_model, candidate.groups, self.workload.dtype
        trained = self._trained(candidate)
        whole, own = self._trained_whole(candidate), trained[class_id]
        if own.total == 0:
            return OnceAStep()

        def reduce_s(numel: Held) -> float:
            return groups.reduce_s(model, numel * reduced_bytes(model, dtype))

        def gather_s(numel: Held) -> float:
            return groups.gather_s(model, numel * weight_bytes(1, dtype)) if groups.gathers_once else 0.0

        def shared(seconds: Callable[[Held], float]) -> float:
            parts = [(own.dense, Held(whole.dense)), (own.experts, Held(0.0, whole.experts))]
            return sum(seconds(kind) * amount / kind.total for amount, kind in parts if amount)

        update = self._update_bytes(own, candidate), self._update_bytes(whole, candidate)
        return OnceAStep(
            reduce_s=shared(reduce_s),
            reduce_alone_s=reduce_s(own),
            gather_s=shared(gather_s),
            gather_alone_s=gather_s(own),
            update_s=model.speeds.pass_seconds(update[1]) * update[0] / update[1],
        )

    def _once_whole_s(
        self, items: Sequence[ChainItem], trained: Mapping[str, Held], candidate: Candidate
    ) -> tuple[float, float]:
        """What replicas' traffic adds to a stage of all regions: see :class:`Chain`."""
        model, groups, dtype = self.costs.cost_model, candidate.groups, self.workload.dtype
        if candidate.mesh.pp > 1 or candidate.mesh.replicas == 1:
            return 0.0, 0.0
        numel = [trained[region.class_id] for region in self.costs.regions]

        def reduce_s(backward_s: Sequence[float]) -> float:
            return step_reduce_s(groups, model, backward_s, numel[::-1], reduced_bytes(model, dtype))

        width = weight_bytes(1, dtype)
        forward_s = [item.forward_s for item in items]
        gathered_s = step_gather_s(groups, model, forward_s, [one * width for one in numel], width)
        shortest = [item.backward_s + min(item.extra_s) for item in reversed(items)]
        return gathered_s + reduce_s(shortest), gathered_s + reduce_s([ENDLESS_S] * len(items))

    def _trained(self, candidate: Candidate) -> dict[str, Held]:
        """Trainable elements of a region of each class."""
        inside = candidate.inside
        if inside not in self._trained_by:
            held = self._held_first(candidate)
            self._trained_by[inside] = {name: held_trained(uses) for name, uses in held.items()}
        return self._trained_by[inside]

    def _trained_whole(self, candidate: Candidate) -> Held:
        """Trainable elements of all regions."""
        inside = candidate.inside
        if inside not in self._whole_by:
            trained = self._trained(candidate)
            self._whole_by[inside] = sum((trained[r.class_id] for r in self.costs.regions), Held())
        return self._whole_by[inside]

    def _held_first(self, candidate: Candidate) -> dict[str, list[ParameterUse]]:
        """Parameters of a region of each class; those that several classes share count in the first."""
        if candidate.inside in self._held:
            return self._held[candidate.inside]
        seen: set[str] = set()
        held: dict[str, list[ParameterUse]] = {}
        for class_id in self.costs.classes:
            uses = self._cost(class_id, candidate).parameters
            held[class_id] = [use for use in uses if use.source not in seen]
            seen.update(use.source for use in uses)
        self._held[candidate.inside] = held
        return held

    def _shared(self, candidate: Candidate) -> tuple[tuple[int, int, float], ...]:
        """Parameters that regions of different classes read: counted once where both are on one stage."""
        shared: list[tuple[int, int, float]] = []
        for name, indices in self._shared_pairs:
            region = self.costs.regions[indices[0]]
            uses = self._cost(region.class_id, candidate).parameters
            use = next((use for use in uses if use.source == name), None)
            if use is not None:
                size = self._states([use], candidate).total
                shared += [(indices[0], other, size) for other in indices[1:]]
        return tuple(shared)


def _shared_pairs(regions: Sequence[Region]) -> list[tuple[str, list[int]]]:
    """Parameters that several regions read, with where those are."""
    homes: dict[str, list[int]] = {}
    for index, region in enumerate(regions):
        for name in region.parameters:
            homes.setdefault(name, []).append(index)
    return [(name, indices) for name, indices in homes.items() if len(indices) > 1]


def _three(by_kind: Mapping[str, float]) -> tuple[float, float, float]:
    none, selective, full = (by_kind[kind] for kind in RECOMPUTE)
    return none, selective, full
