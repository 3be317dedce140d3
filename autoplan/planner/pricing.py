"""One candidate mesh as a chain for the stage search, and a chosen cut as a priced part of a plan.

Comes in: costs per region class, the workload and pins. Goes out: :class:`~autoplan.planner.chain.Chain`
for a candidate, and :class:`Priced`, whose forecast comes from the cost models alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from autoplan.planner.chain import NEVER, Chain, ChainItem, Cut
from autoplan.planner.model_costs import ModelCosts
from autoplan.planner.space import Candidate, Pins
from autoplan.regions import Region
from autoplan_cost_models.collectives import Span
from autoplan_cost_models.region_cost import RegionCost
from autoplan_cost_models.stage_memory import memory_limit_bytes
from autoplan_cost_models.stage_time import dp_span, expert_span, state_passes_s, weight_s, zero_exposed_s
from autoplan_cost_models.step import price_plan
from autoplan_cost_models.training_state import StateBytes, gradient_bytes, state_bytes

# Where recompute is hidden entirely behind ZeRO-3 traffic it costs nothing; keep the tensors all the same.
RECOMPUTE_LAST_S = 1e-9


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
        self.candidates = list(options)
        self.limit_bytes = memory_limit_bytes(profile)

    def chain(self, candidate: Candidate, *, limit_bytes: float | None = None) -> Chain:
        """The model's regions priced for one candidate."""
        kinds = {
            (class_id, pinned): self._item(class_id, pinned, candidate)
            for class_id, pinned in {self._kind(region) for region in self.costs.regions}
        }
        costs = [self._cost(region.class_id, candidate) for region in self.costs.regions]
        span = Span(2, candidate.mesh.stage_devices)
        least = min(cost.output_bytes for cost in costs)
        return Chain(
            items=tuple(kinds[self._kind(region)] for region in self.costs.regions),
            limit_bytes=self.limit_bytes if limit_bytes is None else limit_bytes,
            microbatches=candidate.microbatches,
            stages=candidate.mesh.pp * candidate.vpp,
            shared=self._shared(candidate),
            hop_s=self.costs.cost_model.collective_s("p2p", least, span) if candidate.mesh.pp > 1 else 0.0,
            schedule=candidate.schedule,
            vpp=candidate.vpp,
        )

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
        )
        by_layout = {
            self.costs.names[class_id]: self._cost(class_id, candidate) for class_id in self.costs.classes
        }
        prediction, predictions = price_plan(part, by_layout, self.costs.cost_model, self.workload)
        told = tuple(Stage(stage.regions, p) for stage, p in zip(part.stages, predictions))
        return Priced(replace(part, stages=told), prediction, candidate)

    def _kind(self, region: Region) -> tuple[str, str | None]:
        return region.class_id, self.pins.recompute_of(region.name)

    def _cost(self, class_id: str, candidate: Candidate) -> RegionCost:
        return self.costs.cost(class_id, candidate.inside, candidate.micro_batch)

    def _item(self, class_id: str, pinned: str | None, candidate: Candidate) -> ChainItem:
        cost, mesh = self._cost(class_id, candidate), candidate.mesh
        model, dtype = self.costs.cost_model, self.workload.dtype
        waits = [
            zero_exposed_s(cost, kind, model, mesh, dtype) if candidate.zero == 3 else (0.0, 0.0)
            for kind in RECOMPUTE
        ]
        passes = state_passes_s(cost, model, mesh, candidate.zero, dtype)
        slowest = model.speeds.slowest_of(mesh.devices)
        backward_s = slowest * (cost.backward_s + passes[1]) + cost.tp_backward_s + waits[0][1]
        extra = tuple(
            max(0.0, slowest * cost.recompute_s[kind] + waits[i][1] - waits[0][1])
            + (RECOMPUTE_LAST_S if i else 0.0)
            if pinned in (None, kind)
            else NEVER
            for i, kind in enumerate(RECOMPUTE)
        )
        gathers = candidate.zero == 3 and mesh.replicas > 1
        whole_gradients = gradient_bytes(cost.trainable_numel, dtype, candidate.zero)
        sync_s, update_s = self._once_a_step(cost, candidate)
        return ChainItem(
            key=f"{class_id}/{pinned or 'any'}",
            forward_s=slowest * (cost.forward_s + passes[0]) + cost.tp_forward_s + waits[0][0],
            backward_s=backward_s,
            extra_s=(extra[0], extra[1], extra[2]),
            saved_bytes=_three(cost.saved_bytes),
            transient_bytes=_three(cost.transient_bytes),
            static_bytes=self._region_states(cost, candidate).total + cost.buffer_bytes,
            gathered_bytes=cost.parameter_bytes + whole_gradients if gathers else 0.0,
            output_bytes=cost.output_bytes,
            side=tuple((item.name, item.bytes) for item in cost.side_items),
            sync_s=sync_s,
            update_s=update_s,
            weight_s=slowest * weight_s(cost, passes),
            deferred_bytes=sum(item.bytes for item in cost.deferred_items),
        )

    def _region_states(self, cost: RegionCost, candidate: Candidate) -> StateBytes:
        """States of a region: of what all replicas have, and of its experts."""
        dense = self._states(*cost.held(by_expert=False), candidate, candidate.mesh.replicas)
        copies = candidate.mesh.replicas // candidate.mesh.ep
        return dense + self._states(*cost.held(by_expert=True), candidate, copies)

    def _states(
        self, parameter_bytes: float, trainable_numel: float, candidate: Candidate, copies: int
    ) -> StateBytes:
        return state_bytes(
            parameter_bytes,
            trainable_numel,
            dtype=self.workload.dtype,
            optimizer=self.workload.optimizer,
            zero=candidate.zero,
            dp=copies,
        )

    def _once_a_step(self, cost: RegionCost, candidate: Candidate) -> tuple[float, float]:
        """This region's least share of a stage's gradient sync and update.

        Both times are concave in bytes (latency, then bandwidth), so the time of the whole model's bytes,
        shared out by bytes, is at most the time of a stage's bytes.
        """
        model, mesh = self.costs.cost_model, candidate.mesh
        costs = [self._cost(region.class_id, candidate) for region in self.costs.regions]
        if cost.trainable_numel == 0:
            return 0.0, 0.0
        sync_s = 0.0
        for by_expert, span in ((False, dp_span(mesh)), (True, expert_span(mesh))):
            own, whole = cost.held(by_expert=by_expert)[1], sum(c.held(by_expert=by_expert)[1] for c in costs)
            if candidate.zero == 0 and own:
                moved = gradient_bytes(whole, self.workload.dtype, candidate.zero)
                sync_s += model.collective_s("all_reduce", moved, span) * own / whole
        traffic = self._update_bytes(cost, candidate)
        whole = sum(self._update_bytes(one, candidate) for one in costs)
        return sync_s, model.speeds.pass_seconds(whole) * traffic / whole

    def _update_bytes(self, cost: RegionCost, candidate: Candidate) -> float:
        """What updating a region's trained parameters moves."""
        copies = candidate.mesh.replicas // candidate.mesh.ep
        dense = self._states(0.0, cost.held(by_expert=False)[1], candidate, candidate.mesh.replicas)
        experts = self._states(0.0, cost.held(by_expert=True)[1], candidate, copies)
        return (dense + experts).optimizer_traffic

    def _shared(self, candidate: Candidate) -> tuple[tuple[int, int, float], ...]:
        """Parameters that regions of different classes read: counted once where both are on one stage."""
        homes: dict[str, list[int]] = {}
        for index, region in enumerate(self.costs.regions):
            for name in region.parameters:
                homes.setdefault(name, []).append(index)
        shared: list[tuple[int, int, float]] = []
        for name, indices in homes.items():
            if len(indices) < 2:
                continue
            region = self.costs.regions[indices[0]]
            uses = self._cost(region.class_id, candidate).parameters
            use = next((use for use in uses if use.source == name), None)
            if use is not None:
                trained = use.numel if use.trainable else 0.0
                size = self._states(use.bytes, trained, candidate, candidate.mesh.replicas).total
                shared += [(indices[0], other, size) for other in indices[1:]]
        return tuple(shared)


def _three(by_kind: Mapping[str, float]) -> tuple[float, float, float]:
    none, selective, full = (by_kind[kind] for kind in RECOMPUTE)
    return none, selective, full
