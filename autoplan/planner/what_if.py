"""Other searches of the same model: a plan and its capture in, what other pins, chips or clusters give out.

The capture, the layouts and the measured work of regions are shared by all questions, so that an answer
takes the time of the stage search alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from autoplan.capture.program import Capture
from autoplan.errors import AutoplanError
from autoplan.hardware import CollectiveFit, HardwareProfile, Quantity
from autoplan.plan import Plan
from autoplan.planner.driver import Request, model_costs, search_capture
from autoplan.planner.space import parse_pins
from autoplan_cost_models import CostModel


@dataclass(frozen=True)
class Answer:
    """``plan`` is None where nothing fits or the question is against the rules; ``why`` says which."""

    plan: Plan | None
    why: str = ""

    @property
    def step_time_s(self) -> float | None:
        return self.plan.prediction.step_time_s if self.plan and self.plan.prediction else None


class WhatIf:
    """Asks the search again with something changed.

    ``capture`` must be of the plan's model in the plan's dtype. Answers are remembered.
    """

    def __init__(
        self, plan: Plan, capture: Capture, profile: HardwareProfile, say: Callable[[str], None]
    ) -> None:
        self.plan, self.capture, self.profile, self._say = plan, capture, profile, say
        self.costs = model_costs(capture, profile, plan.workload.target, say)
        # each with the profile that it is of: while that lives, its id is no other's
        self._answers: dict[object, tuple[HardwareProfile, Answer]] = {}

    def pinned(self, *pins: str) -> Answer:
        """The best plan under the plan's own pins, those of the same keys replaced by ``pins``."""
        keys = {pin.partition("=")[0] for pin in pins}
        own = [pin for pin in self.plan.workload.pins if pin.partition("=")[0] not in keys]
        return self._answer((*own, *pins), self.profile, self.plan.workload.devices)

    def on(self, profile: HardwareProfile) -> Answer:
        """The best plan on the same cluster of a chip with other numbers."""
        return self._answer(self.plan.workload.pins, profile, self.plan.workload.devices)

    def devices(self, count: int) -> Answer:
        """The best plan for the same global batch on another number of devices."""
        return self._answer(self.plan.workload.pins, self.profile, count)

    def _answer(self, pins: Sequence[str], profile: HardwareProfile, devices: int) -> Answer:
        key = (tuple(pins), id(profile), devices)
        if key not in self._answers:
            try:
                answer = Answer(self._search(pins, profile, devices))
            except AutoplanError as error:
                answer = Answer(None, str(error))
            self._answers[key] = profile, answer
        return self._answers[key][1]

    def _search(self, pins: Sequence[str], profile: HardwareProfile, devices: int) -> Plan:
        work = self.plan.workload
        request = Request(
            source=self.plan.model.source,
            hw=profile.name,
            devices=devices,
            global_batch=work.global_batch,
            dtype=work.dtype,
            optimizer=work.optimizer,
            sizes=work.sizes,
            pins=tuple(pins),
            opaque=work.opaque,
            target=work.target,
        )
        costs = self.costs
        if profile is not self.profile:
            costs = costs.repriced(CostModel(profile, self.capture.dtype))
        start = time.perf_counter()
        return search_capture(
            self.capture, profile, request, parse_pins(pins), [], start, self._say, costs=costs
        )


def with_memory(profile: HardwareProfile, more_bytes: float) -> HardwareProfile:
    """The chip with so much more (or less) memory for tensors."""
    whole = more_bytes / (1.0 - profile.fragmentation.value)
    return replace(profile, memory_bytes=_scaled(profile.memory_bytes, add=whole))


def with_faster_links(profile: HardwareProfile, factor: float) -> HardwareProfile:
    """The cluster with every link's bandwidth multiplied by ``factor``; latencies stay."""

    def faster(fit: CollectiveFit) -> CollectiveFit:
        return replace(fit, bytes_per_s=fit.bytes_per_s * factor)

    links: Mapping[str, Mapping[str, tuple[CollectiveFit, ...]]] = {
        reach: {kind: tuple(faster(fit) for fit in fits) for kind, fits in kinds.items()}
        for reach, kinds in profile.collectives.items()
    }
    return replace(profile, collectives=links)


def with_faster_memory(profile: HardwareProfile, factor: float) -> HardwareProfile:
    """The chip with its memory bandwidth multiplied by ``factor``."""
    return replace(profile, memory_bytes_per_s=_scaled(profile.memory_bytes_per_s, factor))


def with_faster_compute(profile: HardwareProfile, factor: float) -> HardwareProfile:
    """The chip with every matrix product and attention rate multiplied by ``factor``."""
    gemm = {
        dtype: replace(rates, by_m=replace(rates.by_m, y=tuple(rate * factor for rate in rates.by_m.y)))
        for dtype, rates in profile.gemm.items()
    }
    attention = tuple(
        replace(
            rates,
            by_sequence=replace(rates.by_sequence, y=tuple(rate * factor for rate in rates.by_sequence.y)),
        )
        for rates in profile.attention
    )
    peaks = {dtype: _scaled(peak, factor) for dtype, peak in profile.peak_flops.items()}
    return replace(profile, gemm=gemm, attention=attention, peak_flops=peaks)


def _scaled(quantity: Quantity, factor: float = 1.0, add: float = 0.0) -> Quantity:
    return replace(quantity, value=quantity.value * factor + add)
