"""Forecasts of published runs come in; tables for a terminal, or one JSON object, go out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoplan.units import seconds_text
from autoplan.validation.pricing import Forecast
from autoplan.validation.scores import Score, as_json, scores, skip_reasons, total, worst

COLUMNS = (
    ("points", "points", "{:d}"),
    ("step error", "step_time_median_error", "{:.1%}"),
    ("p90", "step_time_p90_error", "{:.1%}"),
    ("bias", "step_time_bias", "{:+.1%}"),
    ("memory error", "memory_median_error", "{:.1%}"),
    ("bias", "memory_bias", "{:+.1%}"),
    ("rank", "rank_correlation", "{:.2f}"),
    ("regret", "regret", "{:.1%}"),
)


def validation_json(forecasts: Sequence[Forecast]) -> dict[str, Any]:
    """``groups`` by source and chip, ``total``, what was skipped and why, and the worst points."""
    groups = scores(forecasts)
    return {
        "groups": [as_json(group) for group in groups],
        "total": total(groups),
        "skipped": skip_reasons(forecasts),
        "worst": [_worst_json(forecast) for forecast in worst(forecasts)],
    }


def _worst_json(forecast: Forecast) -> dict[str, Any]:
    point = forecast.point
    return {
        "id": point.name,
        "model": point.model,
        "chip": point.chip,
        "configuration": configuration(forecast),
        "measured_s": point.step_time_s,
        "predicted_s": forecast.step_s,
        "error": forecast.step_error,
        "breakdown_s": dict(forecast.breakdown_s or {}),
        "source": point.text.get("source", ""),
        "notes": point.text.get("notes", ""),
    }


def validation_report(forecasts: Sequence[Forecast]) -> RenderableType:
    """The table by source and chip, refusals, skipped points and the worst ten."""
    groups = scores(forecasts)
    told = total(groups)
    blocks: list[RenderableType] = [_table(groups, told)]
    blocks.append(Text(_refusals(told)))
    reasons = [f"  {count:4d}  {reason}" for reason, count in skip_reasons(forecasts).items()]
    if reasons:
        blocks.append(Text("\n".join(["", "not priced, and why", *reasons]), style="dim"))
    return Group(*blocks, _worst_table(worst(forecasts)))


def _table(groups: Sequence[Score], told: dict[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("source", overflow="fold")
    table.add_column("chip", overflow="fold")
    for header, _, _ in COLUMNS:
        table.add_column(header, justify="right")
    for group in groups:
        if group.points:
            table.add_row(group.source, group.chip, *_cells(as_json(group)))
    table.add_section()
    table.add_row("median of sources", "", *_cells(told), style="bold")
    return table


def _cells(values: dict[str, Any]) -> list[str]:
    return [form.format(values[name]) if values[name] is not None else "" for _, name, form in COLUMNS]


def _refusals(told: dict[str, Any]) -> str:
    return (
        f"of {told['oom']} configurations published as out of memory {told['oom_refused']} are refused, "
        f"of {told['running']} published as running {told['running_refused']}"
    )


def _worst_table(forecasts: Sequence[Forecast]) -> Table:
    table = Table(title="\nthe worst ten", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for header in ("point", "configuration", "measured -> predicted", "off", "most of the forecast"):
        table.add_column(header, overflow="fold")
    for forecast in forecasts:
        point = forecast.point
        table.add_row(
            f"{point.name} {point.model}",
            configuration(forecast),
            f"{seconds_text(point.step_time_s or 0.0)} -> {seconds_text(forecast.step_s)}",
            f"{forecast.step_error or 0.0:+.0%}",
            _largest(forecast),
        )
    return table


def configuration(forecast: Forecast) -> str:
    """``8 x A100-80G pp1 dp8 tp1 micro-batch 4 ZeRO 3 full``."""
    point = forecast.point
    axes = {"pp": point.pp, "dp": point.dp, "cp": point.cp, "ep": point.ep, "tp": point.tp, "vpp": point.vpp}
    shown = " ".join(f"{axis}{size}" for axis, size in axes.items() if size > 1)
    return (
        f"{point.devices} x {point.chip} {shown} {point.sequence} tokens micro-batch {point.micro_batch} "
        f"x {point.microbatches} ZeRO {point.zero} recompute {point.recompute} {point.precision}"
    )


def _largest(forecast: Forecast) -> str:
    parts = sorted((forecast.breakdown_s or {}).items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{name.replace('_', ' ')} {value / forecast.step_s:.0%}" for name, value in parts)
