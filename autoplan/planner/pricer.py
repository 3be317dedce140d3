"""Prices of plans made by hand: a captured model and pins in, seconds, bytes and whether it fits out.

The model is captured and its regions measured once; a fully pinned plan is then priced in milliseconds.
What pins leave open is filled in by the fastest choice whose stages are balanced, without the proof that
``search`` gives.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autoplan.capture import capture_model
from autoplan.capture.source import ModelSource
from autoplan.errors import BadInputError
from autoplan.hardware import HardwareProfile, load_profile
from autoplan.plan import Mesh, Part
from autoplan.planner.chain import Cut
from autoplan.planner.driver import Finder, Request, model_costs
from autoplan.planner.pricing import Priced, Pricing
from autoplan.planner.solve import first_cuts
from autoplan.planner.space import Candidate, Pins, parse_pins, require_counts, require_pinned_regions
from autoplan.region_runs import container_of
from autoplan_cost_models import CostModel

ENOUGH_BYTES = 2.0**60


@dataclass(frozen=True)
class Quote:
    """The price of one plan. Memory is that of the fullest stage's devices; ``fits`` compares the two.

    ``choices`` counts the plans that the pins left open; 1 is a plan pinned whole.
    """

    step_time_s: float
    tokens_per_s: float
    mfu: float
    memory_peak_bytes: float
    memory_limit_bytes: float
    memory_items: Mapping[str, float]
    breakdown_s: Mapping[str, float]
    mesh: Mesh
    part: Part
    choices: int

    @property
    def fits(self) -> bool:
        return self.memory_peak_bytes <= self.memory_limit_bytes


class Pricer:
    """Answers many questions about one model on one chip."""

    def __init__(
        self,
        source: str | Path | ModelSource,
        *,
        hw: str | None = None,
        devices: int | None = None,
        global_batch: int | None = None,
        dtype: str = "bf16",
        optimizer: str = "adamw",
        sizes: Mapping[str, int] | None = None,
        opaque: Sequence[str] = (),
        target: str = "autoplan",
        layouts: str = "",
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """``layouts`` names the target whose layouts and kernels are priced, where that is not ``target``."""
        require_counts(devices=devices, global_batch=global_batch)
        self.profile = load_profile(hw)
        where = source.path if isinstance(source, ModelSource) else str(source)
        self.request = Request(
            where, hw, devices, global_batch, dtype, optimizer, sizes, (), tuple(opaque), target
        )
        say(f"tracing {where}")
        self.capture = capture_model(source, dtype=dtype, sizes=sizes or {}, opaque=opaque)
        self.costs = model_costs(self.capture, self.profile, layouts or target, say)
        self._say = say

    def price(
        self,
        pins: Sequence[str] = (),
        *,
        devices: int | None = None,
        global_batch: int | None = None,
        stage_layers: Sequence[int] = (),
        cut: Cut | None = None,
    ) -> Quote:
        """The price under ``pins``; BadInputError for pins that are against the rules.

        ``stage_layers`` fixes how many blocks each stage holds; the pins then say what they recompute.
        ``cut`` fixes stages and recompute region by region.
        """
        require_counts(devices=devices, global_batch=global_batch)
        parsed = parse_pins(pins)
        require_pinned_regions(parsed, [region.name for region in self.costs.regions])
        finder = Finder(self.capture, self.profile, self.costs, self.request, parsed, self._say)
        count = devices or self.request.devices
        batch = global_batch or self.request.global_batch
        if count is None or batch is None:
            raise BadInputError("a price needs --devices N and --global-batch N.")
        pricing = finder.pricing(count, batch, parsed)
        if stage_layers:
            cut = self._cut(stage_layers, parsed)
        if cut is not None:
            stages = len(cut.ends)
            fitting = [c for c in pricing.candidates if c.mesh.pp * c.vpp == stages]
            if not fitting:
                raise BadInputError(f"layers for {stages} stages: no plan under the pins has so many.")
            priced = [pricing.priced(candidate, cut) for candidate in fitting]
        else:
            priced = [self._balanced(pricing, candidate) for candidate in pricing.candidates]
        return _quote(min(priced, key=_preference), len(priced))

    def on(self, profile: HardwareProfile) -> Pricer:
        """The same model, traced and measured once, on a chip with other numbers."""
        other = copy.copy(self)
        other.profile = profile
        other.costs = self.costs.repriced(CostModel(profile, self.capture.dtype))
        return other

    def _cut(self, stage_layers: Sequence[int], pins: Pins) -> Cut:
        """Stages of so many blocks each, with what comes before the first block and after the last."""
        names = [region.name for region in self.costs.regions]
        blocks = [i for i, name in enumerate(names) if container_of(name)]
        if sum(stage_layers) != len(blocks):
            raise BadInputError(
                f"stage layers {', '.join(map(str, stage_layers))}: expected {len(blocks)} in all, "
                f"the model's blocks; got {sum(stage_layers)}."
            )
        ends = [blocks[sum(stage_layers[: s + 1]) - 1] + 1 for s in range(len(stage_layers) - 1)]
        recompute = [pins.recompute_of(name) or "none" for name in names]
        return Cut((*ends, len(names)), tuple(recompute))

    def _balanced(self, pricing: Pricing, candidate: Candidate) -> Priced:
        """Balanced stages inside the memory limit; where nothing fits, with no limit at all."""
        for limit_bytes in (None, ENOUGH_BYTES):
            cuts, _ = first_cuts(pricing.chain(candidate, limit_bytes=limit_bytes))
            if cuts:
                return min((pricing.priced(candidate, cut) for cut in cuts), key=_preference)
        raise AssertionError("no stages can be balanced without a memory limit")


def _preference(priced: Priced) -> tuple[bool, float]:
    return not priced.fits, priced.prediction.step_time_s


def _quote(priced: Priced, choices: int) -> Quote:
    told = priced.prediction
    fullest = max(priced.stages, key=lambda stage: stage.memory_peak_bytes)
    return Quote(
        step_time_s=told.step_time_s,
        tokens_per_s=told.tokens_per_s,
        mfu=told.mfu,
        memory_peak_bytes=fullest.memory_peak_bytes,
        memory_limit_bytes=fullest.memory_limit_bytes,
        memory_items={item.name: item.bytes for item in fullest.memory_items},
        breakdown_s=told.breakdown_s,
        mesh=priced.part.mesh,
        part=priced.part,
        choices=choices,
    )
