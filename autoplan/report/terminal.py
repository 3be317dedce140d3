"""The plan for a person at a terminal: a :class:`Plan` in, tables and bars out, fitted to the width.

Colour follows the terminal and ``NO_COLOR``; a file or a pipe gets plain text 110 columns wide. ``~`` marks
numbers that rest on estimated inputs of the hardware profile.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autoplan.plan import Part, Plan, Stage, StagePrediction, zero_text
from autoplan.plan_table import estimate_mark, heading, schedule_text
from autoplan.region_runs import fold_regions
from autoplan.report.fusions import fusion_lines
from autoplan.report.palette import RECOMPUTE_STYLE, STAGE_STYLES
from autoplan.report.summary import fullest_stage
from autoplan.units import bytes_text, count_text, seconds_text, share_text
from autoplan.validation.worth import worth_text

_FILE_WIDTH = 110
_LEAST_WIDTH = 40  # below it every word would be broken
_NOUGHT = 1e-6  # a share that rounding alone can make
_NARROW = 66  # columns below which a stage's recompute stands beside its regions
_WITH_BARS = 76
_BAR = 12
_RUNNERS_UP = 3


def print_plan(plan: Plan, file: IO[str] | None = None, width: int | None = None) -> None:
    """Print the whole report to ``file`` (default: standard output)."""
    console = console_for(sys.stdout if file is None else file, width)
    console.print(report(plan, console.width, unicode="utf" in (console.encoding or "").lower()))


def console_for(out: IO[str], width: int | None = None) -> Console:
    """A console of the terminal's width, or of 110 columns where there is no terminal."""
    if width is None and not out.isatty() and not os.environ.get("COLUMNS", "").isdigit():
        width = _FILE_WIDTH
    console = Console(file=out, width=width, highlight=False, soft_wrap=False)
    console.width = max(console.width, _LEAST_WIDTH)
    return console


def report(plan: Plan, width: int, *, unicode: bool = True) -> RenderableType:
    """The report as one renderable; ``unicode=False`` keeps to ASCII."""
    look = _Look(width, unicode, estimate_mark(plan))
    blocks: list[RenderableType] = [_head(plan, look)]
    for part in plan.parts:
        blocks += [_part_head(part, plan), _stages(part, look)]
    blocks += [*_peak(plan, look), *_breakdown(plan, look), *_runners_up(plan, look)]
    blocks += [*_fused(plan), *_notes(plan)]
    return Group(*blocks)


@dataclass(frozen=True)
class _Look:
    """How wide, which characters, and the mark of a number that rests on an estimate."""

    width: int
    unicode: bool
    mark: str

    def bar(self, share: float, cells: int = _BAR) -> str:
        """A bar of ``share`` of ``cells``, clipped to 0..1."""
        full = round(min(max(share, 0.0), 1.0) * cells)
        done, left = ("█", "░") if self.unicode else ("#", ".")
        return done * full + left * (cells - full)

    def time(self, duration_s: float) -> str:
        """A predicted time, marked where it rests on an estimate."""
        return f"{self.mark}{seconds_text(duration_s)}" if duration_s else ""

    @property
    def box(self) -> box.Box:
        return box.SIMPLE_HEAD if self.unicode else box.ASCII2


def _head(plan: Plan, look: _Look) -> RenderableType:
    lines = [Text(heading(plan), style="bold")]
    if plan.prediction is not None:
        told = plan.prediction
        line = Text("step ").append(f"{look.mark}{seconds_text(told.step_time_s)}", style="bold green")
        line.append(f"   {look.mark}{count_text(told.tokens_per_s)} tokens/s")
        line.append(f"   MFU {look.mark}{told.mfu:.1%}")
        lines.append(line)
    if plan.certificate is not None:
        proof = plan.certificate
        lines.append(
            Text(
                f"certificate: no plan in the space beats {seconds_text(proof.bound_s)} "
                f"(gap {proof.gap:.2%}, {proof.meshes_considered} meshes considered, "
                f"{proof.meshes_solved} solved, {seconds_text(proof.wall_s)})"
            )
        )
        if proof.space:
            lines.append(Text(f"space: {proof.space}", style="dim"))
    return Group(*lines)


def _part_head(part: Part, plan: Plan) -> Text:
    work = plan.workload
    line = Text(f"\n{part.name}", style="bold")
    line.append(f"  mesh {part.mesh}", style="not bold cyan")
    rest = (
        f"  micro-batch {part.micro_batch} x {part.microbatches} (global batch {work.global_batch})"
        f"  schedule {schedule_text(part.schedule, part.vpp)}  {part.zero_text}"
        f"  {work.dtype} {work.optimizer}"
    )
    return line.append(rest, style="not bold")


# ---- stages -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Column:
    """One number of a stage, shown from a terminal ``from_width`` columns wide."""

    header: str
    from_width: int
    text: Callable[[StagePrediction, _Look], str]
    to_width: int = 10_000


_COLUMNS = (
    _Column("forward", 60, lambda told, look: look.time(told.forward_s)),
    _Column("backward", 70, lambda told, look: look.time(told.backward_s)),
    _Column("recompute", 104, lambda told, look: look.time(told.recompute_s)),
    _Column("in flight", 130, lambda told, look: str(told.in_flight)),
    _Column("sends", 120, lambda told, look: bytes_text(told.sends_bytes) if told.sends_bytes else ""),
    _Column("memory", 0, lambda told, _: bytes_text(told.memory_peak_bytes), _NARROW - 1),
    _Column("memory", _NARROW, lambda told, _: share_text(told.memory_peak_bytes, told.memory_limit_bytes)),
    _Column("used", 90, lambda told, look: look.bar(told.memory_peak_bytes / told.memory_limit_bytes)),
)


def _stages(part: Part, look: _Look) -> Table:
    columns = [column for column in _COLUMNS if column.from_width <= look.width <= column.to_width]
    narrow = look.width < _NARROW
    table = Table(box=look.box, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("stage", justify="right", no_wrap=True)
    names = [run.label for stage in part.stages for run in fold_regions(stage.regions)]
    whole = min(max(map(len, names), default=0), look.width // 4)  # a name in two is hard to read
    table.add_column("regions", overflow="fold", min_width=max(8, whole))
    if not narrow:
        table.add_column("recomputed", no_wrap=True)
    for column in columns:
        table.add_column(column.header, justify="right", no_wrap=True)
    for number, stage in enumerate(part.stages):
        colour = STAGE_STYLES[number % len(STAGE_STYLES)]
        told = stage.prediction
        numbers = [column.text(told, look) if told else "" for column in columns]
        for i, (label, recompute) in enumerate(_run_rows(stage)):
            first = (Text(str(number), style=colour), *numbers) if i == 0 else ("", *("" for _ in columns))
            style = RECOMPUTE_STYLE.get(recompute, "")
            regions, how = Text(label, style=colour), Text(recompute, style=style)
            if narrow and recompute != "none":
                regions = regions.append(f" recomputed: {recompute}", style=style)
            table.add_row(first[0], regions, *(() if narrow else (how,)), *first[1:])
    return table


def _run_rows(stage: Stage) -> Iterator[tuple[str, str]]:
    for run in fold_regions(stage.regions):
        count = f"  x{len(run.names)}" if len(run.names) > 1 else ""
        yield f"{run.label}{count}", run.recompute


# ---- memory, time, notes ----------------------------------------------------------------------------


def _peak(plan: Plan, look: _Look) -> Iterator[RenderableType]:
    stage = fullest_stage(plan)
    if stage is None or stage.prediction is None:
        return
    told = stage.prediction
    part = next(part for part in plan.parts if stage in part.stages)
    number = part.stages.index(stage)
    whose = f"stage {number}" if len(plan.parts) == 1 else f"stage {number} of {part.name}"
    share = share_text(told.memory_peak_bytes, told.memory_limit_bytes)
    yield Text(f"memory at the peak of {whose}: {share} a device", style="bold")
    yield _shares({item.name: item.bytes for item in told.memory_items}, look, bytes_text)


def _breakdown(plan: Plan, look: _Look) -> Iterator[RenderableType]:
    if plan.prediction is None or not plan.prediction.breakdown_s:
        return
    yield Text("where the step's time goes", style="bold")
    breakdown_s = {name.replace("_", " "): value for name, value in plan.prediction.breakdown_s.items()}
    yield _shares(breakdown_s, look, look.time)


def _runners_up(plan: Plan, look: _Look) -> Iterator[RenderableType]:
    """The plans that lost, in one line each where there is room."""
    if plan.prediction is None or not plan.runners_up:
        return
    yield Text("runners-up", style="bold")
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    narrow = look.width < _NARROW
    for _ in range(1 if narrow else 2):
        table.add_column(overflow="fold")
    for _ in range(2):
        table.add_column(justify="right", no_wrap=True)
    for one in plan.runners_up[:_RUNNERS_UP]:
        batches = f"micro-batch {one.micro_batch} x {one.microbatches}"
        schedule, zero = schedule_text(one.schedule, one.vpp), zero_text(one.zero, one.zero_shard)
        how = f"{batches}, {schedule}, {zero}"
        slower = one.step_time_s / plan.prediction.step_time_s - 1
        what = (f"{one.mesh}, {how}",) if narrow else (str(one.mesh), how)
        table.add_row(*what, look.time(one.step_time_s), f"{slower:+.1%}")
    yield Padding(table, (0, 0, 1, 2), expand=False)


def _shares(items: Mapping[str, float], look: _Look, text: Callable[[float], str]) -> RenderableType:
    """Rows name, value, share and bar, the largest first; what is under 1% together in one row."""
    total = sum(items.values()) or 1.0
    ordered = sorted(items.items(), key=lambda item: -item[1])
    small = {name: value for name, value in ordered if total * _NOUGHT < value < total / 100}
    large = {name: value for name, value in ordered if value >= total / 100}
    large |= small if len(small) < 3 else {f"{len(small)} more, each under 1%": sum(small.values())}
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(overflow="fold")
    for _ in range(2):
        table.add_column(justify="right", no_wrap=True)
    if look.width >= _WITH_BARS:
        table.add_column(no_wrap=True, style="cyan")
    for name, value in large.items():
        bar = [look.bar(value / total, 20)] if look.width >= _WITH_BARS else []
        table.add_row(name, text(value), f"{value / total:.1%}", *bar)
    return Padding(table, (0, 0, 1, 2), expand=False)


def _fused(plan: Plan) -> Iterator[RenderableType]:
    """What is fused in which regions, and what was left as it was written, with the reason."""
    lines = fusion_lines(plan)
    if lines:
        yield Text("fused kernels", style="bold")
        yield from (Padding(Text(line), (0, 0, 0, 2), expand=False) for line in lines)
        yield Text("")


def _notes(plan: Plan) -> Iterator[RenderableType]:
    if plan.assumptions:
        yield Text("assumed (and the option that changes it)", style="bold")
        yield from (Padding(Text(line), (0, 0, 0, 2), expand=False) for line in plan.assumptions)
    if plan.prediction is not None and plan.prediction.estimated_inputs:
        inputs = ", ".join(plan.prediction.estimated_inputs)
        yield Text(
            f"~ rests on numbers that {plan.hardware}'s profile marks as estimated: {inputs}", "yellow"
        )
    if plan.prediction is not None:
        yield Text(worth_text(plan.hardware))
    if plan.wall_s:
        spent = ", ".join(f"{name} {seconds_text(value)}" for name, value in plan.wall_s.items())
        yield Text(f"planned in {spent}", style="dim")
