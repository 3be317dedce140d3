"""The plans of ``--top``: what a search found in the error band in, the sturdiest as files and table out."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoplan.plan_table import part_text
from autoplan.units import seconds_text

if TYPE_CHECKING:
    from autoplan.hardware import HardwareProfile
    from autoplan.planner.top import Sturdy

UNKNOWN_BAND = 0.1  # where no published run of the chip is priced: that of the worst validated with several


def error_band(profile: HardwareProfile) -> tuple[float, str]:
    """How far a chip's predicted step times are off, and why so."""
    from autoplan.validation.worth import worth_of

    worth = worth_of(profile.name)
    if worth is None:
        return UNKNOWN_BAND, f"{profile.name} was never validated: {UNKNOWN_BAND:.0%} assumed"
    return worth.median_error, f"{profile.name}: {worth}"


def write_top(found: Sequence[Sturdy], output: Path) -> list[Path]:
    """Plan n goes to ``plan.top2.yaml`` and so on; the fastest is in ``output`` already."""
    paths: list[Path] = []
    for number, one in enumerate(found, 1):
        path = output if one.slower == 0 else output.with_suffix(f".top{number}{output.suffix}")
        if one.slower > 0:
            one.plan.save(path)
        paths.append(path)
    return paths


def top_json(found: Sequence[Sturdy], paths: Sequence[Path]) -> list[dict[str, Any]]:
    """One record a plan, in order."""
    return [
        {
            "plan": str(path),
            "mesh": asdict(one.plan.parts[0].mesh),
            "how": part_text(one.plan.parts[0]),
            "step_time_s": one.plan.prediction.step_time_s if one.plan.prediction else None,
            "slower": one.slower,
            "regret": one.regret,
            "memory_spare": one.spare,
        }
        for one, path in zip(found, paths)
    ]


def print_top(found: Sequence[Sturdy], paths: Sequence[Path], band: float, why: str, gap: float) -> None:
    """The table, and what it means."""
    from rich.table import Table

    from autoplan.report.terminal import console_for

    console = console_for(sys.stdout)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("plan", overflow="fold")
    for head in ("step", "slower", "regret", "memory left", "file"):
        table.add_column(head, justify="right", overflow="fold")
    for one, path in zip(found, paths):
        told = one.plan.prediction
        table.add_row(
            part_text(one.plan.parts[0]),
            seconds_text(told.step_time_s) if told else "",
            f"{one.slower:+.1%}" if one.slower else "fastest",
            f"{one.regret:.1%}",
            f"{one.spare:.1%}" + (" (tight)" if one.spare < band else ""),
            path.name,
        )
    console.print(f"\ninside the prices' error band of {band:.1%}, sturdiest first ({why})", style="bold")
    console.print(
        f"The proof is to {gap:.2%}, over prices that are good to {band:.1%}: these plans cannot be told "
        "apart by time. Regret is the most that a plan is behind the best of them when one cause of its step "
        "takes longer than predicted; tight ones run out of memory if that is off by the band."
    )
    console.print(table)
