"""A plan's forecast walked down to its sources: a name in, the number with its formula and inputs out.

``step_time``, ``compute``, ``compute/REGION``, ``compute/REGION/OP`` and so on: each level's inputs are the
next level's names, and what stands at the end is a count of the graph or a value of the chip's profile with
its tag and source. Nothing is computed here in another way than the forecast was: functions of the cost
models give every value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from autoplan.errors import BadInputError
from autoplan.hardware import HardwareProfile, Quantity
from autoplan.plan import Plan, Prediction, RegionPlan
from autoplan.planner.model_costs import ModelCosts
from autoplan.planner.space import Inside
from autoplan.units import bytes_text
from autoplan_codegen.exports.blocks import context_kind, is_sequence_parallel
from autoplan_cost_models.kernel_table import AMOUNTS, Floats, KernelGroup, KernelTable
from autoplan_cost_models.kernels import CONTRACTION_KINDS
from autoplan_cost_models.region_cost import CollectiveCost, RegionCost
from autoplan_cost_models.stage_time import state_passes_s
from autoplan_cost_models.step import peak_flops_per_s
from autoplan_cost_models.zero import part_groups

SUM = "the sum of its inputs"


@dataclass(frozen=True)
class Number:
    """One number. ``name`` is its path; ``formula`` says how ``inputs`` make it; a leaf has a ``source``."""

    name: str
    value: float
    unit: str
    formula: str = ""
    inputs: tuple[Number, ...] = ()
    source: str = ""


class Numbers:
    """The numbers of one plan; ``costs`` are those of its model on its chip."""

    def __init__(self, plan: Plan, costs: ModelCosts) -> None:
        self.plan, self.part, self.costs = plan, plan.parts[0], costs
        self.model, self.profile = costs.cost_model, costs.cost_model.profile
        self.inside = inside_of(plan)
        self.classes = {name: class_id for class_id, name in costs.names.items()}
        self.roots: dict[str, Callable[[], Number]] = {
            "step_time": self.step_time,
            "tokens_per_s": self.tokens_per_s,
            "mfu": self.mfu,
            "memory": self.memory,
            **{name: (lambda name=name: self.cause(name)) for name in self.forecast.breakdown_s},
        }

    @property
    def forecast(self) -> Prediction:
        if self.plan.prediction is None:
            raise BadInputError("the plan carries no forecast; search again: autoplan search MODEL.py")
        return self.plan.prediction

    def find(self, path: str) -> Number:
        """The number of a path; BadInputError lists what is known at the level that fails."""
        first, *rest = path.split("/")
        if first not in self.roots:
            raise BadInputError(f"--number {path}: expected one of {', '.join(self.roots)}.")
        found = self.roots[first]()
        for name in rest:
            inputs = {one.name.rpartition("/")[2]: one for one in found.inputs}
            if name not in inputs:
                known = ", ".join(inputs) or f"nothing: {found.name} is where the walk ends"
                raise BadInputError(f"--number {path}: {found.name} has {known}.")
            found = inputs[name]
        return found

    # ---- roots ---------------------------------------------------------------------------------------

    def step_time(self) -> Number:
        causes = tuple(replace(self.cause(name), inputs=()) for name in self.forecast.breakdown_s)
        return Number("step_time", self.forecast.step_time_s, "s", SUM, causes)

    def tokens_per_s(self) -> Number:
        work, path = self.plan.workload, "tokens_per_s"
        inputs = (
            Number(f"{path}/global_batch", work.global_batch, "samples", source="asked for"),
            Number(f"{path}/tokens_per_sample", work.tokens_per_sample, "tokens", source="the inputs"),
            Number(f"{path}/step_time", self.forecast.step_time_s, "s", "see step_time"),
        )
        formula = "global_batch x tokens_per_sample / step_time"
        return Number(path, self.forecast.tokens_per_s, "tokens/s", formula, inputs)

    def mfu(self) -> Number:
        dtype = self.plan.workload.dtype
        peak = peak_flops_per_s(self.profile, dtype)
        quantity = self.profile.peak_flops.get(dtype.split("-")[0])
        said = _said(quantity) if quantity else "the nearest dtype's"
        products = "3 x forward products of the whole model"
        inputs = (
            Number("mfu/model_flops", self.forecast.model_flops, "FLOP", products),
            Number("mfu/devices", self.part.mesh.devices, "devices", source="asked for"),
            Number("mfu/step_time", self.forecast.step_time_s, "s", "see step_time"),
            Number("mfu/peak_flops", peak, "FLOP/s", source=said),
        )
        formula = "model_flops / (devices x step_time x peak_flops)"
        return Number("mfu", self.forecast.mfu, "", formula, inputs)

    def memory(self) -> Number:
        """The fullest stage's peak: what is alive there."""
        told = [stage.prediction for stage in self.part.stages]
        stage, full = max(
            ((index, one) for index, one in enumerate(told) if one),
            key=lambda pair: pair[1].memory_peak_bytes,
        )
        inputs = tuple(
            Number(f"memory/{item.name}", item.bytes, "bytes", f"alive on stage {stage} at its peak")
            for item in full.memory_items
        )
        return Number(
            "memory", full.memory_peak_bytes, "bytes", f"{SUM} (stage {stage}, the fullest)", inputs
        )

    # ---- the parts of a step -------------------------------------------------------------------------

    def cause(self, name: str) -> Number:
        """One part of the step."""
        spent_s = self.forecast.breakdown_s[name]
        makers: dict[str, Callable[[], Number]] = {
            "compute": self._compute,
            "recompute": self._recompute,
            "tp_communication": self._collectives,
        }
        if name in makers and spent_s > 0:
            return makers[name]()
        formula = FORMULAS[name] if name in FORMULAS and spent_s else "nothing of it in this plan"
        return Number(name, spent_s, "s", formula, self._schedule_inputs(name))

    def _schedule_inputs(self, name: str) -> tuple[Number, ...]:
        """What the schedule's simulation starts from, per stage and micro-batch."""
        if name not in FORMULAS:
            return ()
        found: list[Number] = [self._microbatches(name)]
        for index, stage in enumerate(self.part.stages):
            told = stage.prediction
            if told is None:
                continue
            values = {
                "pipeline_bubble": ("forward and backward", told.forward_s + told.backward_s),
                "p2p": ("hop to the next stage", told.hop_s),
                "gradient_sync": ("gradient sync", told.gradient_sync_s),
                "optimizer": ("optimizer", told.optimizer_s),
            }
            if name in values:
                what, seconds = values[name]
                found.append(Number(f"{name}/stage {index}", seconds, "s", f"{what} of stage {index}"))
        return tuple(found)

    def _microbatches(self, path: str) -> Number:
        return Number(f"{path}/microbatches", self.part.microbatches, "", source="the plan")

    def _slowest(self, path: str) -> Number:
        devices = self.part.mesh.devices
        value, variation = self.model.speeds.slowest_of(devices), self.profile.variation
        formula = f"1 + variation x expected largest of {devices} normal values"
        return Number(f"{path}/slowest_device", value, "", formula, source=_said(variation))

    def _compute(self) -> Number:
        groups, dtype = part_groups(self.part), self.plan.workload.dtype
        regions: list[Number] = []
        for name, count in self._busiest().items():
            cost = self.cost(name)
            passes = state_passes_s(cost, self.model, groups, dtype)
            path = f"compute/{name}"
            each_s = cost.forward_s + cost.backward_s + sum(passes)
            kernels = self._operations(path, name)
            moved = Number(
                f"{path}/weight and gradient passes", sum(passes), "s", "streaming passes per micro-batch"
            )
            formula = f"{count} regions of this kind x (its operations + weight and gradient passes)"
            regions.append(Number(path, count * each_s, "s", formula, (*kernels, moved)))
        formula = "microbatches x slowest_device x regions of the busiest pipeline rank"
        inputs = (self._microbatches("compute"), self._slowest("compute"), *regions)
        return Number("compute", self.forecast.breakdown_s["compute"], "s", formula, inputs)

    def _recompute(self) -> Number:
        inputs: list[Number] = [self._microbatches("recompute"), self._slowest("recompute")]
        for (name, kind), count in self._busiest_kinds().items():
            if kind != "none":
                again_s = self.cost(name).recompute_s[kind]
                formula = f"{count} regions x {again_s:.6g} s run again in backward ({kind})"
                inputs.append(Number(f"recompute/{name} {kind}", count * again_s, "s", formula))
        formula = "microbatches x slowest_device x regions of the busiest pipeline rank"
        return Number("recompute", self.forecast.breakdown_s["recompute"], "s", formula, tuple(inputs))

    def _collectives(self) -> Number:
        inputs: list[Number] = [self._microbatches("tp_communication")]
        for name, count in self._busiest().items():
            path = f"tp_communication/{name}"
            sent = self.cost(name).collectives
            each = tuple(self._collective(f"{path}/{index}", one) for index, one in enumerate(sent))
            total = sum(one.value for one in each)
            if total:
                formula = f"{count} regions of this kind x its collectives"
                inputs.append(Number(path, count * total, "s", formula, each))
        formula = "microbatches x regions of the busiest pipeline rank"
        spent_s = self.forecast.breakdown_s["tp_communication"]
        return Number("tp_communication", spent_s, "s", formula, tuple(inputs))

    def _collective(self, path: str, cost: CollectiveCost) -> Number:
        """All collectives of one kind and size in a region, forward and backward."""
        sent = f"{bytes_text(cost.forward_bytes + cost.backward_bytes)} sent by a device"
        formula = f"{cost.kind} on {cost.axis}, {sent}: alpha + bytes x F / bandwidth + ramp, each"
        name = f"{path} {cost.kind} {cost.axis}"
        spent_s = cost.forward_s + cost.backward_s
        return Number(name, spent_s, "s", formula, self._fit(name, cost.kind, cost.axis))

    def _fit(self, path: str, kind: str, axis: str) -> tuple[Number, ...]:
        """The profile's fits that a collective inside a node reads."""
        span = self.inside.spans[axis]
        inside = span.ranks_within(self.profile.devices_per_node)
        tier = "intra" if inside == span.size else "inter"
        fits = self.profile.collectives.get(tier, {}).get("p2p" if kind == "ring" else kind, ())
        if not fits:
            return ()
        fit = min(fits, key=lambda one: abs(one.ranks - span.size))
        source = f"{fit.tag}: {fit.source}"
        return (
            Number(f"{path}/alpha", fit.alpha_s, "s", source=source),
            Number(f"{path}/bandwidth", fit.bytes_per_s, "bytes/s", source=source),
        )

    # ---- regions and operations ----------------------------------------------------------------------

    def cost(self, layout: str) -> RegionCost:
        return self.costs.cost(self.classes[layout], self.inside, self.part.micro_batch)

    def _busiest_regions(self) -> list[RegionPlan]:
        """The regions of the pipeline rank that takes longest."""
        stages, ranks = self.part.stages, self.part.mesh.pp

        def busy(rank: int) -> float:
            told = [stage.prediction for stage in stages[rank::ranks]]
            return sum(one.forward_s + one.backward_s for one in told if one)

        rank = max(range(ranks), key=busy)
        return [region for stage in stages[rank::ranks] for region in stage.regions]

    def _busiest(self) -> Counter[str]:
        return Counter(region.layout for region in self._busiest_regions())

    def _busiest_kinds(self) -> Counter[tuple[str, str]]:
        return Counter((region.layout, region.recompute) for region in self._busiest_regions())

    def _operations(self, path: str, layout: str) -> tuple[Number, ...]:
        """Every operation of a region, the dearest first."""
        work = self.costs.measured(self.classes[layout], self.inside).work
        table = work.kernels(self.part.micro_batch)
        seconds = self.model.speeds.seconds(table)
        found: list[Number] = []
        for index, operation in enumerate(work.operations):
            rows = np.flatnonzero(table.operation == index)
            if len(rows):
                name = f"{path}/{operation.name}"
                kernels = tuple(self._kernel(name, table, seconds, int(row), i) for i, row in enumerate(rows))
                total = float(np.sum(seconds[rows]))
                called = operation.name if operation.target.startswith("<") else operation.target
                found.append(Number(name, total, "s", f"{called}: {SUM}", kernels))
        return tuple(sorted(found, key=lambda one: -one.value))

    def _kernel(self, path: str, table: KernelTable, seconds: Floats, row: int, index: int) -> Number:
        """One launch: what it moves and computes, and the rates it was priced with."""
        group = next(group for group, rows in table.groups if row in rows)
        amounts = {name: float(table.amount(name)[row]) for name in AMOUNTS}
        name = f"{path}/kernel {index}{' backward' if group.is_backward else ''}"
        launch, bandwidth = self.profile.launch_s, self.profile.memory_bytes_per_s
        counted = "counted in the graph"
        inputs = [
            Number(f"{name}/bytes", amounts["bytes"], "bytes", source=counted),
            Number(f"{name}/bandwidth", bandwidth.value, "bytes/s", source=_said(bandwidth)),
            Number(f"{name}/launch", launch.value, "s", source=_said(launch)),
        ]
        shape, busy = "", "bytes / (bandwidth x efficiency)"
        if group.kind in CONTRACTION_KINDS:
            inputs.insert(0, Number(f"{name}/flops", amounts["flops"], "FLOP", source=counted))
            busy_s = float(seconds[row] - table.launches[row] * launch.value)
            inputs.append(self._rate(name, group, amounts, busy_s))
            m, n, k, count = (f"{amounts[letter]:g}" for letter in ("m", "n", "k", "count"))
            shape, busy = f", {count} x [{m}, {k}] x [{k}, {n}]", f"max(flops / rate, {busy})"
        formula = f"{group.kind} in {group.dtype}{shape}: {busy} + launches x launch"
        return Number(name, float(seconds[row]), "s", formula, tuple(inputs))

    def _rate(self, path: str, group: KernelGroup, amounts: dict[str, float], busy_s: float) -> Number:
        if group.kind == "attention":
            said = sorted(
                {f"{one.by_sequence.tag}: {one.by_sequence.source}" for one in self.profile.attention}
            )
            reached = amounts["flops"] / busy_s
            formula = "the attention curve at this length, or what memory allows"
            return Number(f"{path}/rate", reached, "FLOP/s", formula, source="; ".join(said))
        m = amounts["m"] * (amounts["count"] if group.kind == "gemm" else 1.0)
        sizes = (np.array([size]) for size in (m, amounts["n"], amounts["k"]))
        rate = float(self.model.speeds.product_rate(group.dtype, *sizes)[0])
        formula = "by_m(m) x by_n(n) x by_k(k) x sustained, at most the peak"
        return Number(f"{path}/rate", rate, "FLOP/s", formula, source=_gemm_said(self.profile, group.dtype))


FORMULAS = {
    "pipeline_bubble": "makespan of the schedule's event simulation without hops - busiest rank's own time",
    "p2p": "makespan with hops - makespan without",
    "gradient_sync": "last stage to have its gradients reduced, beside its last backward - last backward",
    "optimizer": "one pass over gradients, master weights and moments, the slowest rank's",
    "zero_gather": "what traffic of ZeRO-2, 3 adds beside compute x microbatches, and new weights of ZeRO-1 "
    "and 2 to the first forward",
}


def inside_of(plan: Plan) -> Inside:
    """How the plan's regions are cut."""
    mesh = plan.parts[0].mesh
    kind = context_kind(plan) if mesh.cp > 1 else ""
    return Inside(
        mesh.tp, mesh.cp, mesh.ep, mesh.tp > 1 and is_sequence_parallel(plan), kind, plan.parts[0].fuse
    )


def _said(quantity: Quantity) -> str:
    return f"{quantity.tag}: {quantity.source}"


def _gemm_said(profile: HardwareProfile, dtype: str) -> str:
    rates = profile.gemm.get(dtype)
    return f"{rates.by_m.tag}: {rates.by_m.source}" if rates else "the nearest dtype's rates"
