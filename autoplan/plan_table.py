"""``str(plan)``: a plan in, a few lines and one table of its stages out, as plain text."""

from __future__ import annotations

from tabulate import tabulate

from autoplan.plan import Part, Plan, Stage
from autoplan.region_runs import fold_regions
from autoplan.units import count_text, seconds_text, share_text

_HEADERS = ("stage", "regions", "recompute", "forward", "backward", "memory")


def plan_table(plan: Plan) -> str:
    """What is trained, where, the forecast, then one row a run of regions."""
    lines = [heading(plan), *forecast(plan)]
    for part in plan.parts:
        rows = [row for number, stage in enumerate(part.stages) for row in _stage_rows(number, stage)]
        align = ("right", "left", "left", "right", "right", "right")
        table = tabulate(rows, _HEADERS, tablefmt="simple", colalign=align, disable_numparse=True)
        lines += ["", part_line(part), table]
    return "\n".join(lines)


def heading(plan: Plan) -> str:
    """``llama3_8b (8.03 B parameters) on 64 x kunlun-p800``."""
    parameters = count_text(plan.model.parameters)
    return f"{plan.model.name} ({parameters} parameters) on {plan.workload.devices} x {plan.hardware}"


def forecast(plan: Plan) -> tuple[str, ...]:
    """One line with the predicted step and one with the certificate, where the plan has them.

    ``~`` marks a forecast that rests on estimated numbers of the hardware profile.
    """
    lines: list[str] = []
    if plan.prediction is not None:
        tokens = count_text(plan.prediction.tokens_per_s)
        step = seconds_text(plan.prediction.step_time_s)
        about = estimate_mark(plan)
        lines.append(f"step {about}{step}, {about}{tokens} tokens/s, MFU {about}{plan.prediction.mfu:.1%}")
    if plan.certificate is not None:
        proof = plan.certificate
        lines.append(
            f"no plan in the space is faster than {seconds_text(proof.bound_s)}: this one is within "
            f"{proof.gap:.2%} ({proof.meshes_considered} meshes considered, {proof.meshes_solved} solved)"
        )
    return tuple(lines)


def estimate_mark(plan: Plan) -> str:
    """``~`` before numbers that rest on estimates of the hardware profile, else nothing."""
    return "~" if plan.prediction is not None and plan.prediction.estimated_inputs else ""


def schedule_text(schedule: str, vpp: int) -> str:
    """``1f1b``, or ``interleaved_1f1b of 2 stages a rank``."""
    return schedule if vpp == 1 else f"{schedule} of {vpp} stages a rank"


def part_text(part: Part) -> str:
    """``pp 2 x dp 4 x tp 8, micro-batch 1 x 64, 1f1b, ZeRO 0``."""
    batches = f"micro-batch {part.micro_batch} x {part.microbatches}"
    return f"{part.mesh}, {batches}, {schedule_text(part.schedule, part.vpp)}, {part.zero_text}"


def part_line(part: Part) -> str:
    """:func:`part_text` behind the part's name."""
    return f"{part.name}: {part_text(part)}"


def _stage_rows(number: int, stage: Stage) -> list[tuple[str, ...]]:
    """One row a run of regions; the stage's own numbers stand in its first row."""
    runs = fold_regions(stage.regions)
    told = stage.prediction
    numbers = ("", "", "")
    if told is not None:
        times = (seconds_text(told.forward_s), seconds_text(told.backward_s))
        numbers = (*times, share_text(told.memory_peak_bytes, told.memory_limit_bytes))
    return [
        (str(number), run.label, run.recompute, *numbers) if i == 0 else ("", run.label, run.recompute)
        for i, run in enumerate(runs)
    ]
