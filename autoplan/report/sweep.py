"""The points of a sweep in, a table for people, an object for programs and an SVG plot out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from rich.console import Console
from rich.table import Table

from autoplan.plan import Part
from autoplan.planner.sweep import Point
from autoplan.report.explain import shape
from autoplan.units import GIB, count_text, seconds_text

WIDTH, HEIGHT, MARGIN = 720, 420, 64
# Okabe and Ito's palette, which colour-blind readers can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def sweep_json(points: Sequence[Point]) -> dict[str, Any]:
    """``points``: every setting with its forecast, or ``why`` there is none."""
    return {"points": [_point_json(point) for point in points]}


def _point_json(point: Point) -> dict[str, Any]:
    told: dict[str, Any] = {"hardware": point.hardware, **point.values, "why": point.why}
    if point.plan is None or point.plan.prediction is None:
        return told | {"step_time_s": None}
    part = point.plan.parts[0]
    peaks = [stage.prediction.memory_peak_bytes for stage in part.stages if stage.prediction]
    return told | {
        "devices": point.devices,
        "global_batch": point.plan.workload.global_batch,
        "step_time_s": point.step_time_s,
        "tokens_per_s": point.tokens_per_s,
        "mfu": point.plan.prediction.mfu,
        "scaling_efficiency": point.efficiency,
        "cost_per_step": point.cost_per_step,
        "memory_peak_gib": max(peaks) / GIB,
        "plan": shape(point.plan),
        "gap": point.plan.certificate.gap if point.plan.certificate else None,
    }


def print_sweep(points: Sequence[Point]) -> None:
    """One row a point."""
    names = list(dict.fromkeys(name for point in points for name in point.values if name != "devices"))
    priced = any(point.cost_per_step is not None for point in points)
    table = Table(box=None, header_style="bold", pad_edge=False)
    numbers = ["devices", *names, "step", "tokens/s", "MFU", "scaling", *(["cost/step"] if priced else [])]
    table.add_column("chip")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True, overflow="ellipsis")
    table.add_column("plan", overflow="fold", min_width=24)
    for point in points:
        table.add_row(*_row(point, names, priced))
    Console().print(table)


def _row(point: Point, names: Sequence[str], priced: bool) -> list[str]:
    head = [point.hardware, f"{point.devices:,}", *(f"{point.values.get(name, 0):,}" for name in names)]
    if point.plan is None or point.plan.prediction is None:
        return [*head, *("-" for _ in range(4 + priced)), point.why.splitlines()[0]]
    part = point.plan.parts[0]
    cost = [f"{point.cost_per_step:.4g}" if point.cost_per_step is not None else "-"] if priced else []
    return [
        *head,
        seconds_text(point.step_time_s),
        count_text(point.tokens_per_s),
        f"{point.plan.prediction.mfu:.1%}",
        f"{point.efficiency:.0%}" if point.efficiency is not None else "-",
        *cost,
        _short(part),
    ]


def _short(part: Part) -> str:
    """``dp64 mb2x8 zero3``: the degrees above 1."""
    sizes = [
        f"{axis}{size}" for axis in ("pp", "dp", "cp", "ep", "tp") if (size := getattr(part.mesh, axis)) > 1
    ]
    return " ".join([*sizes, f"mb{part.micro_batch}x{part.microbatches}", f"zero{part.zero}"])


def sweep_svg(points: Sequence[Point]) -> str:
    """Tokens per second over devices, both logarithmic, one line per chip and sizes; ideal scaling dashed."""
    series: dict[str, list[Point]] = {}
    for point in points:
        if point.plan is not None:
            sizes = [f"{name} {value:,}" for name, value in point.values.items() if name != "devices"]
            series.setdefault(", ".join([point.hardware, *sizes]), []).append(point)
    found = [point for line in series.values() for point in line]
    if not found:
        return _frame("nothing fits", [])
    xs = [math.log2(point.devices) for point in found]
    ys = [math.log10(point.tokens_per_s) for point in found]
    low, high = (min(xs), min(ys)), (max(max(xs), min(xs) + 1), max(max(ys), min(ys) + 0.1))

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log2(x) - low[0]) / (high[0] - low[0])
        up = (math.log10(y) - low[1]) / (high[1] - low[1])
        return MARGIN + across * (WIDTH - 2 * MARGIN), HEIGHT - MARGIN - up * (HEIGHT - 2 * MARGIN)

    parts = [_tick(*place(x, 10 ** low[1]), f"{x:,}") for x in sorted({point.devices for point in found})]
    for number, (name, line) in enumerate(series.items()):
        parts += _line(
            name, sorted(line, key=lambda p: p.devices), COLOURS[number % len(COLOURS)], number, place
        )
    return _frame("tokens per second by devices", parts)


def _tick(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y + 20:.1f}" text-anchor="middle">{text}</text>'


def _line(name: str, line: Sequence[Point], colour: str, number: int, place: Any) -> list[str]:
    places = [place(point.devices, point.tokens_per_s) for point in line]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    first, last = line[0], line[-1]
    ideal = place(last.devices, first.tokens_per_s * last.devices / first.devices)
    start = places[0]
    parts = [
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>',
        f'<line x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{ideal[0]:.1f}" y2="{ideal[1]:.1f}" '
        f'stroke="{colour}" stroke-dasharray="4 4"/>',
        f'<text x="{MARGIN + 12}" y="{MARGIN + 16 * number}" fill="{colour}">{escape(name)}</text>',
    ]
    for (x, y), point in zip(places, line):
        told = f"{point.devices:,} devices: {count_text(point.tokens_per_s)} tokens/s"
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"><title>{told}</title></circle>'
        )
    return parts


def _frame(title: str, parts: Sequence[str]) -> str:
    bottom, right = HEIGHT - MARGIN, WIDTH - MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            f'font-family="sans-serif" font-size="12"><title>{escape(title)}</title>',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
            f'<text x="{WIDTH / 2}" y="24" text-anchor="middle" font-size="15">{escape(title)}</text>',
            f'<path d="M{MARGIN},{MARGIN} V{bottom} H{right}" fill="none" stroke="#444"/>',
            f'<text x="{right}" y="{HEIGHT - 16}" text-anchor="end">devices (dashed: ideal scaling)</text>',
            *parts,
            "</svg>",
        ]
    )
