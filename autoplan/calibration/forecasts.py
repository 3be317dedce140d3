"""What a run was set to do in (a plan or a launch script), its forecast on any profile out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from autoplan.errors import BadInputError
from autoplan.hardware import HardwareProfile
from autoplan.importing.model import model_of
from autoplan.importing.report import block_names, plan_pins, stage_layers_of
from autoplan.importing.rules import findings, replicas
from autoplan.importing.settings import Settings
from autoplan.plan import Plan
from autoplan.planner.chain import Cut
from autoplan.planner.pricer import Pricer
from autoplan_codegen.exports.blocks import decided, pins_of

Say = Callable[[str], None]


@dataclass(frozen=True)
class Forecast:
    """``step_s`` gives the seconds of a step on a profile; ``tokens`` are those of a step, on ``devices``."""

    step_s: Callable[[HardwareProfile], float]
    dtype: str
    devices: int
    tokens: float


def forecast_of_plan(plan: Plan, hw: str | None, model: str | Path | None, say: Say) -> Forecast:
    """The forecast of a plan as it is, not of the best one."""
    part, work = plan.parts[0], plan.workload
    if len(plan.parts) > 1:
        raise BadInputError(
            f"a log corrects the forecast of a plan of one part, this one has {len(plan.parts)}: search "
            "again without giving parts of the model a mesh of their own, or use --from-trace."
        )
    pricer = Pricer(
        model or plan.model.source,
        hw=hw or plan.hardware,
        devices=work.devices,
        global_batch=work.global_batch,
        dtype=work.dtype,
        optimizer=work.optimizer,
        sizes=work.sizes,
        opaque=work.opaque,
        say=say,
    )
    plan.require_model(pricer.capture.fingerprint, pricer.capture.name)
    pins = pins_of(decided(plan))
    ends: list[int] = []
    for stage in part.stages:
        ends.append((ends[-1] if ends else 0) + len(stage.regions))
    cut = Cut(tuple(ends), tuple(entry.recompute for stage in part.stages for entry in stage.regions))
    return Forecast(
        lambda profile: pricer.on(profile).price(pins, cut=cut).step_time_s,
        work.dtype,
        work.devices,
        pricer.capture.tokens_per_sample * work.global_batch,
    )


def forecast_of_settings(settings: Settings, hw: str | None, model: Path | None, say: Say) -> Forecast:
    """The forecast of a launch script's settings; BadInputError where they are illegal or say too little."""
    wrong = [one for one in findings(settings) if one.severity == "error"]
    dp = replicas(settings)
    if wrong:
        raise BadInputError(f"the settings do not start: {wrong[0].rule}: {wrong[0].text}")
    if settings.devices is None or settings.global_batch is None or dp is None:
        needed = "--devices N" if settings.devices is None else "--global-batch N"
        raise BadInputError(f"the launch script does not say it: give {needed}.")
    stated = model is None and not settings.gated and settings.model.get("experts", 0) < 2
    pricer = Pricer(
        model or model_of(settings),
        hw=hw,
        devices=settings.devices,
        global_batch=settings.global_batch,
        dtype=settings.dtype,
        sizes={} if stated or not settings.sequence else {"sequence": settings.sequence},
        say=say,
    )
    pins, layers = plan_pins(settings, dp, block_names(pricer)), stage_layers_of(settings)
    return Forecast(
        lambda profile: pricer.on(profile).price(pins, stage_layers=layers).step_time_s,
        settings.dtype,
        settings.devices,
        pricer.capture.tokens_per_sample * settings.global_batch,
    )
