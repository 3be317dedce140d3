"""The search from a model file to a plan: capture, price, enumerate, solve best-first, certify.

Comes in: a model source, a chip, a workload and pins. Goes out: a :class:`~autoplan.plan.Plan` with its
forecast, certificate and every assumption that was made for the user.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from autoplan.capture import capture_model
from autoplan.capture.capturing import own_dtype
from autoplan.capture.module_source import module_source
from autoplan.capture.program import Capture
from autoplan.capture.source import ModelSource
from autoplan.errors import BadInputError, InfeasibleError
from autoplan.hardware import HardwareProfile, load_profile
from autoplan.plan import Certificate, Plan, Workload
from autoplan.planner.chain import NEVER
from autoplan.planner.context_space import context_options
from autoplan.planner.expert_space import with_experts
from autoplan.planner.fusion_space import fused_kernels, with_fusions
from autoplan.planner.infeasible import infeasible_message, without_idle
from autoplan.planner.measuring import measure_all
from autoplan.planner.model_costs import ModelCosts
from autoplan.planner.pricing import Priced, Pricing
from autoplan.planner.runners_up import runners_up
from autoplan.planner.solve import Outcome, fits_anywhere, solve
from autoplan.planner.space import (
    MICRO_BATCHES,
    Candidate,
    Pins,
    candidates,
    parse_pins,
    require_counts,
    require_pinned_regions,
)
from autoplan.planner.targets import runnable_on, space_text, target_pins
from autoplan.planner.top import inside_band
from autoplan.planner.trained_model import batch_statistics, identity, require_trainable
from autoplan.targets import target_named
from autoplan_cost_models import CostModel

MOST_NODES = 4096
DEFAULT_BATCH_PER_DEVICE = 4


@dataclass(frozen=True)
class Request:
    """What the user asked for, before any default is filled in."""

    source: str
    hw: str | None = None
    devices: int | None = None
    global_batch: int | None = None
    dtype: str | None = None
    optimizer: str | None = None
    sizes: Mapping[str, int] | None = None
    pins: Sequence[str] = ()
    opaque: Sequence[str] = ()
    target: str = "autoplan"
    time_limit_s: float | None = None


def search(
    model: nn.Module,
    inputs: Mapping[str, Any] | tuple[Any, ...],
    *,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    **options: Any,
) -> Plan:
    """The best plan for a module already in memory, with ``inputs`` of any batch size.

    ``options`` are those of :func:`search_plan` (``hw``, ``devices``, ``global_batch``, ``pins``, ...); the
    model's own dtype is kept unless ``dtype`` says otherwise. The module is not changed.
    """
    source = module_source(model, inputs, loss_fn=loss_fn)
    options.setdefault("dtype", own_dtype(model))
    return search_plan(source, **options)


def search_plan(
    source: str | Path | ModelSource,
    *,
    hw: str | None = None,
    devices: int | None = None,
    global_batch: int | None = None,
    dtype: str | None = None,
    optimizer: str | None = None,
    sizes: Mapping[str, int] | None = None,
    pins: Sequence[str] = (),
    opaque: Sequence[str] = (),
    target: str = "autoplan",
    time_limit_s: float | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Plan:
    """The best plan for ``source`` (a model.py or config.json) that ``target`` can run; what is left out is
    filled in and stated. After ``time_limit_s`` in all the best plan so far is taken, with its true gap; the
    first that fits is always waited for.

    Raises BadInputError for input that cannot be used and InfeasibleError when nothing fits.
    """
    where = source.path if isinstance(source, ModelSource) else str(source)
    given = (where, hw, devices, global_batch, dtype, optimizer, sizes, tuple(pins), tuple(opaque), target)
    request = Request(*given, time_limit_s)
    return search_request(source, request, say)[0]


def search_request(
    source: str | Path | ModelSource,
    request: Request,
    say: Callable[[str], None] = lambda _: None,
    *,
    band: float = 0.0,
) -> tuple[Plan, ...]:
    """The best plan first; with a ``band`` those found that are slower by that share at most, too.

    Raises what :func:`search_plan` raises.
    """
    start = time.perf_counter()
    target_named(request.target)
    require_counts(devices=request.devices, global_batch=request.global_batch)
    profile = load_profile(request.hw)
    parsed = parse_pins(request.pins)
    assumptions: list[str] = []
    dtype = request.dtype or _default_dtype(profile, assumptions)
    say(f"tracing {request.source}")
    capture = capture_model(source, dtype=dtype, sizes=request.sizes or {}, opaque=request.opaque)
    return search_captured(capture, profile, request, parsed, assumptions, start, say, band=band)


def search_capture(
    capture: Capture,
    profile: HardwareProfile,
    request: Request,
    pins: Pins,
    assumptions: list[str],
    start: float,
    say: Callable[[str], None],
    costs: ModelCosts | None = None,
) -> Plan:
    """The best plan for a captured model; ``costs`` are those of an earlier search of it, if any."""
    return search_captured(capture, profile, request, pins, assumptions, start, say, costs)[0]


def search_captured(
    capture: Capture,
    profile: HardwareProfile,
    request: Request,
    pins: Pins,
    assumptions: list[str],
    start: float,
    say: Callable[[str], None],
    costs: ModelCosts | None = None,
    *,
    band: float = 0.0,
) -> tuple[Plan, ...]:
    """As :func:`search_request`, of a captured model."""
    require_trainable(capture)
    capture_s = 0.0 if costs else capture.capture_s
    costs = costs or model_costs(capture, profile, request.target, say)
    spent_before_s = costs.spent_s
    require_pinned_regions(pins, [region.name for region in costs.regions])
    if request.optimizer is None:
        assumptions.append("optimizer adamw (--optimizer)")
    if not request.sizes:
        assumptions.append(f"{capture.tokens_per_sample} tokens a sample, from example_inputs (--sequence)")
    finder = Finder(capture, profile, costs, request, pins, say)
    devices, batch = finder.devices_and_batch(assumptions)
    if not capture.coupled_at:
        devices = without_idle(finder, devices, batch, assumptions)
    else:
        assumptions.append(f"dp=1 and micro_batch={batch}, the global batch: its samples share one loss")
    began = time.perf_counter()
    until_s = NEVER if request.time_limit_s is None else start + request.time_limit_s
    pricing, outcome = finder.solve(devices, batch, band, until_s)
    if not outcome.finished:
        assumptions.append(f"the best plan after {request.time_limit_s:g} s (--time-limit)")
    if outcome.best is None:
        raise InfeasibleError(infeasible_message(pricing, finder, devices, batch))
    best = outcome.best
    ended = time.perf_counter()
    certificate = Certificate(
        objective_s=best.prediction.step_time_s,
        bound_s=min(outcome.bound_s, best.prediction.step_time_s),
        gap=_gap(outcome, best),
        meshes_considered=outcome.considered,
        meshes_solved=outcome.solved,
        wall_s=ended - began,
        space=space_text(finder.target),
    )
    spent_s = costs.spent_s - spent_before_s
    walls = {"capture": capture_s, "cost": spent_s}
    walls["search"] = ended - start - sum(walls.values())
    plan = Plan(
        model=identity(capture),
        hardware=profile.name,
        hardware_fingerprint=profile.fingerprint,
        workload=pricing.workload,
        parts=(best.part,),
        layouts=costs.layouts(best.candidate.inside, best.part.micro_batch),
        prediction=best.prediction,
        certificate=certificate,
        assumptions=(*assumptions, *batch_statistics(capture), *capture.warnings),
        wall_s={**walls, "total": ended - start},
        runners_up=runners_up(outcome.tried, best),
    )

    def other(priced: Priced) -> Plan:
        step_s = priced.prediction.step_time_s
        proof = replace(certificate, objective_s=step_s, gap=_gap(outcome, priced))
        return replace(
            plan,
            parts=(priced.part,),
            layouts=costs.layouts(priced.candidate.inside, priced.part.micro_batch),
            prediction=priced.prediction,
            certificate=proof,
            runners_up=(),
        )

    near = inside_band(outcome.tried, best, band) if band else [best]
    return (plan, *(other(priced) for priced in near[1:]))


def _gap(outcome: Outcome, priced: Priced) -> float:
    """How much faster than a plan anything could be."""
    return max(0.0, 1 - outcome.bound_s / priced.prediction.step_time_s)


def model_costs(
    capture: Capture, profile: HardwareProfile, target: str, say: Callable[[str], None]
) -> ModelCosts:
    """The costs of a captured model in layouts that the target runs; our fused kernels are ours alone."""
    chosen = target_named(target)
    kernels = fused_kernels(profile) if chosen.is_ours else ()
    return ModelCosts(capture, CostModel(profile, capture.dtype), say, kernels, vocabulary=chosen.vocabulary)


class Finder:
    """Fills in devices and batch, and solves for given ones; the capture and costs are shared."""

    def __init__(
        self,
        capture: Capture,
        profile: HardwareProfile,
        costs: ModelCosts,
        request: Request,
        pins: Pins,
        say: Callable[[str], None],
    ) -> None:
        self.capture, self.profile, self.costs = capture, profile, costs
        self.request, self.pins, self.say = request, pins, say
        self.target = target_named(request.target)

    def devices_and_batch(self, assumptions: list[str]) -> tuple[int, int]:
        """The user's, or one node or the smallest number of nodes that fits, and a stated batch."""
        if self.request.devices is not None:
            return self.request.devices, self._batch(self.request.devices, assumptions)
        devices = self.smallest_devices(self.profile.devices_per_node - 1)
        if devices is None:
            devices = self.profile.devices_per_node
        nodes = devices // self.profile.devices_per_node
        why = "one node" if nodes == 1 else f"{nodes} nodes, the smallest number that fits"
        assumptions.append(f"{devices} devices: {why} (--devices)")
        return devices, self._batch(devices, assumptions)

    def smallest_devices(self, above: int) -> int | None:
        """The smallest count above ``above`` on which something fits: inside one node any, then whole nodes.

        Nodes are doubled until they hold the model, then halved towards the last count that did not.
        """
        node = self.profile.devices_per_node
        for devices in range(above + 1, node + 1):
            if self.holds(devices):
                return devices
        low = max(1, above // node)
        high = low + 1
        while not self.holds(high * node):
            low, high = high, high * 2
            if high > MOST_NODES:
                return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.holds(middle * node) else (middle, high)
        return high * node

    def holds(self, devices: int, batch: int | None = None, pins: Pins | None = None) -> bool:
        """Whether something legal fits on ``devices`` (``pins`` None: under the user's)."""
        self.say(f"trying whether {devices} devices hold the model")
        batch = batch or self.request.global_batch or self._default_batch(devices)
        try:
            return fits_anywhere(self.pricing(devices, batch, self.pins if pins is None else pins))
        except BadInputError:
            return False

    def pricing(self, devices: int, batch: int, pins: Pins) -> Pricing:
        workload = Workload(
            devices=devices,
            global_batch=batch,
            dtype=self.capture.dtype,
            optimizer=self.request.optimizer or "adamw",
            sizes=dict(self.capture.sizes),
            tokens_per_sample=self.capture.tokens_per_sample,
            pins=tuple(self.request.pins),
            opaque=tuple(self.request.opaque),
            target=self.target.name,
        )
        return Pricing(self.costs, self.profile, workload, pins, self.candidates(devices, batch, pins))

    def candidates(self, devices: int, batch: int, pins: Pins) -> list[Candidate]:
        pins = target_pins(self.target, pins, self.profile, [region.name for region in self.costs.regions])
        most = min(devices, self.profile.devices_per_node)
        degrees = self.costs.tp_degrees(most)
        if pins.tp and pins.tp not in degrees:
            raise BadInputError(_tp_message(pins.tp, self.costs, degrees, most))
        sharing = [tp for tp in degrees if tp > 1 and pins.sp != 0 and self.costs.cuts_tokens(tp)]
        pins, sizes = runnable(self.capture, pins, batch)
        contexts = context_options(self.costs, devices, batch, degrees, pins)
        try:
            found = candidates(
                devices,
                batch,
                degrees,
                len(self.costs.regions),
                pins,
                micro_batches=sizes,
                sp_degrees=sharing,
                contexts=contexts,
                node=self.profile.devices_per_node,
            )
            found = with_experts(found, self.costs.expert_degrees, pins, self.profile.devices_per_node)
            found = runnable_on(self.target, found, pins, experts=len(self.costs.expert_degrees) > 1)
            return with_fusions(found, self.costs.fused_kernels, pins)
        except BadInputError as error:
            if not self.capture.coupled_at:
                raise
            where = self.capture.coupled_at
            raise BadInputError(
                f"{where}: the loss pairs the samples of a batch, so dp=1: {error}"
            ) from error

    def solve(
        self, devices: int, batch: int, band: float = 0.0, until_s: float = NEVER
    ) -> tuple[Pricing, Outcome]:
        """``until_s`` is a reading of ``time.perf_counter``."""
        pricing = self.pricing(devices, batch, self.pins)
        measure_all(self.costs, (candidate.inside for candidate in pricing.candidates))
        return pricing, solve(pricing, self.say, band=band, until_s=until_s)

    def _batch(self, devices: int, assumptions: list[str]) -> int:
        if self.request.global_batch is not None:
            return self.request.global_batch
        batch = self._default_batch(devices)
        assumptions.append(
            f"global batch {batch}: {DEFAULT_BATCH_PER_DEVICE} samples a device (--global-batch)"
        )
        return batch

    def _default_batch(self, devices: int) -> int:
        return DEFAULT_BATCH_PER_DEVICE * devices


def runnable(capture: Capture, pins: Pins, global_batch: int) -> tuple[Pins, Sequence[int]]:
    """The pins with what the model itself fixes, and the micro-batches it can run.

    Raises BadInputError for a pin against them.
    """
    if capture.coupled_at:
        for name, value in (("dp", 1), ("micro_batch", global_batch)):
            if getattr(pins, name) not in (None, value):
                raise BadInputError(
                    f"--pin {name}={getattr(pins, name)}: at {capture.coupled_at} the loss pairs the samples "
                    "of a batch, so only the whole global batch on dp=1 gives it. "
                    f"Leave the pin out, or pin {name}={value}."
                )
        return replace(pins, dp=1, micro_batch=global_batch), (global_batch,)
    if not capture.batch_form.known:
        return pins, (capture.batch,)
    if pins.micro_batch and pins.micro_batch < capture.least_batch:
        raise BadInputError(
            f"--pin micro_batch={pins.micro_batch}: the model cannot be traced on fewer than "
            f"{capture.least_batch} samples. Type --pin micro_batch={capture.least_batch}."
        )
    return pins, [size for size in MICRO_BATCHES if size >= capture.least_batch]


def _default_dtype(profile: HardwareProfile, assumptions: list[str]) -> str:
    dtype = "bf16" if profile.software.device_type != "cpu" else "fp32"
    masters = " with fp32 master weights" if dtype == "bf16" else ""
    assumptions.append(f"dtype {dtype}{masters} (--dtype)")
    return dtype


def _tp_message(tp: int, costs: ModelCosts, degrees: Sequence[int], most: int) -> str:
    heads = sorted({(q, kv) for _, q, kv in costs.heads()})
    shown = " and ".join(f"{q} heads" + (f" with {kv} key-value heads" if kv != q else "") for q, kv in heads)
    if tp > most:
        return f"--pin tp={tp}: tp stays inside a node, here {most} devices; valid degrees: {_list(degrees)}."
    return f"--pin tp={tp} does not divide the model's attention ({shown}); valid degrees: {_list(degrees)}."


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(str(n) for n in numbers)
