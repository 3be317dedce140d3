"""Measurements and the profile they start from in, the YAML of this machine's own profile out.

What was not measured (memory size, links between nodes, peaks) stays as the starting profile has it, with
its own tags and sources.
"""

from __future__ import annotations

import datetime
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from autoplan.calibration.correction import Correction
from autoplan.calibration.kernels import (
    SIZES,
    AttentionCurve,
    Memory,
    Products,
    Say,
    measure_attention,
    measure_launch,
    measure_memory,
    measure_products,
    usable_dtypes,
)
from autoplan.calibration.links import QUICK_BYTES, SIZES_BYTES, LinkFit, measure_links
from autoplan.calibration.observed import Observed
from autoplan.calibration.timing import Clock
from autoplan.hardware import HardwareProfile


@dataclass(frozen=True)
class Calibration:
    """What was measured on this machine."""

    launch_s: float
    memory: Memory
    products: Mapping[str, Products]
    attention: Sequence[AttentionCurve]
    links: Sequence[LinkFit] = field(default=())

    @property
    def residuals(self) -> dict[str, float]:
        """Median relative error on shapes held out, by dtype; root mean square of each collective's fit."""
        found = {f"{dtype} products": fit.residual for dtype, fit in self.products.items()}
        return found | {f"{link.kind} on {link.ranks} ranks": link.residual for link in self.links}


def calibrate(device: torch.device, say: Say, *, quick: bool = False, links: bool = False) -> Calibration:
    """Measure everything; with ``links`` also the collectives of the running process group (*collective*)."""
    sizes = SIZES["quick" if quick else "cpu" if device.type == "cpu" else "accelerator"]
    clock = Clock(device, batch_s=0.002 if quick else 0.02, batches=3 if quick else 5)
    launch_s = measure_launch(clock)
    memory = measure_memory(clock, sizes, launch_s, say)
    dtypes = usable_dtypes(device)
    products = {dtype: measure_products(clock, dtype, sizes, launch_s, say) for dtype in dtypes}
    attention = measure_attention(clock, dtypes[0], sizes, launch_s, say)
    found = measure_links(clock, QUICK_BYTES if quick else SIZES_BYTES, say) if links else []
    return Calibration(launch_s, memory, products, attention, found)


def calibrated_yaml(base: Path, name: str, found: Calibration) -> str:
    """The starting profile's file with the measured numbers in place."""
    data: dict[str, Any] = yaml.safe_load(base.read_text(encoding="utf-8"))
    source = _source(found)
    tag = {"tag": "measured", "source": source}
    data |= {"name": name, "title": f"this machine, from {data['name']}", "aliases": []}
    data["memory"]["bandwidth_gb_per_s"] = {"value": _short(found.memory.bytes_per_s / 1e9), **tag}
    data["launch_us"] = {"value": _short(found.launch_s * 1e6), **tag}
    data["memory_efficiency"] = {
        "mib": [float(mib) for mib in found.memory.efficiency],
        "fraction": [_short(share) for share in found.memory.efficiency.values()],
        **tag,
    }
    data["gemm"] |= {dtype: _gemm(fit, tag) for dtype, fit in found.products.items()}
    for dtype, fit in found.products.items():
        best = max(fit.by_m.values()) / 1e12
        peak = data["peak_tflops"].get(dtype)
        if peak is None or peak["value"] < best:
            data["peak_tflops"][dtype] = {"value": _short(best), **tag}
    data["attention"] = [_attention(curve, tag) for curve in found.attention]
    for link in found.links:
        _set_link(data["collectives"]["intra"], link, tag)
    if found.links:
        ranks = max(link.ranks for link in found.links)
        node = data["node"]["devices_per_node"]
        data["node"]["devices_per_node"] = {**node, "value": max(ranks, node["value"])}
    head = f"# Measured by `autoplan hw calibrate`; what was not measured is {base.stem}'s.\n"
    worst = ", ".join(f"{what} {error:.1%}" for what, error in found.residuals.items())
    return f"{head}# Errors of the fits: {worst}.\n" + yaml.safe_dump(data, sort_keys=False, width=110)


def corrected_yaml(base: Path, name: str, found: Correction, log: str) -> str:
    """The starting profile's file with the sustained share that a run showed."""
    times = found.times
    source = (
        f"{log}: {times.steps} steps of {times.median_s:.4g} s (+-{times.spread:.1%}) where "
        f"{found.forecast_s:.4g} s were forecast with {found.before:.3g}; {_today()}"
    )
    data = _renamed(base, name)
    data["sustained"] |= {found.dtype: {"value": _short(found.after), "tag": "measured", "source": source}}
    head = f"# Corrected by `autoplan hw calibrate --from-log`; all else is {base.stem}'s.\n"
    return head + yaml.safe_dump(data, sort_keys=False, width=110)


def observed_yaml(base: Path, profile: HardwareProfile, name: str, found: Observed, trace: str) -> str:
    """The starting profile's file with the numbers that a trace showed."""
    tag = {"tag": "measured", "source": f"{trace}, a trace of the PyTorch profiler; {_today()}"}
    data = _renamed(base, name)
    for dtype, curve in found.by_m.items():
        tflops = [_short(rate / 1e12) for rate in curve.values()]
        rates = profile.gemm[dtype]
        kept = {
            f"by_{axis}": {
                axis: [float(x) for x in one.x],
                "factor": list(one.y),
                "tag": one.tag,
                "source": one.source,
            }
            for axis, one in (("n", rates.by_n), ("k", rates.by_k))
        }
        data["gemm"][dtype] = {"by_m": {"m": list(curve), "tflops": tflops, **tag}, **kept}
    if found.memory_bytes_per_s is not None:
        data["memory"]["bandwidth_gb_per_s"] = {"value": _short(found.memory_bytes_per_s / 1e9), **tag}
    for link in found.links:
        _set_link(data["collectives"]["intra"], link, tag)
    head = f"# Moved by `autoplan hw calibrate --from-trace`; all else is {base.stem}'s.\n"
    return head + yaml.safe_dump(data, sort_keys=False, width=110)


def _renamed(base: Path, name: str) -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load(base.read_text(encoding="utf-8"))
    title = f"{data['title']}, as it ran" if "as it ran" not in data["title"] else data["title"]
    return data | {"name": name, "title": title, "aliases": []}


def _today() -> datetime.date:
    return datetime.datetime.now(tz=datetime.timezone.utc).date()


def _source(found: Calibration) -> str:
    machine = platform.processor() or platform.machine()
    return f"autoplan hw calibrate on {machine}, torch {torch.__version__}, {_today()}"


def _gemm(fit: Products, tag: Mapping[str, str]) -> dict[str, Any]:
    tflops = [_short(rate / 1e12) for rate in fit.by_m.values()]
    curves: dict[str, Any] = {"by_m": {"m": list(fit.by_m), "tflops": tflops, **tag}}
    for axis, curve in (("n", fit.by_n), ("k", fit.by_k)):
        curves[f"by_{axis}"] = {axis: list(curve), "factor": [_short(f) for f in curve.values()], **tag}
    return curves


def _attention(curve: AttentionCurve, tag: Mapping[str, str]) -> dict[str, Any]:
    return {
        "direction": curve.direction,
        "causal": curve.causal,
        "head_dim": curve.head_dim,
        "sequence": list(curve.by_sequence),
        "tflops": [_short(rate / 1e12) for rate in curve.by_sequence.values()],
        **tag,
    }


def _set_link(intra: dict[str, Any], link: LinkFit, tag: Mapping[str, str]) -> None:
    """Replace the fit for as many ranks, or add it."""
    fit = {
        "ranks": link.ranks,
        "alpha_us": _short(link.alpha_s * 1e6),
        "gb_per_s": _short(link.bytes_per_s / 1e9),
        "ramp_us": 0,
        "ramp_mib": 1,
        **tag,
    }
    others = [one for one in intra.get(link.kind, []) if one["ranks"] != link.ranks]
    intra[link.kind] = sorted([*others, fit], key=lambda one: one["ranks"])


def _short(value: float) -> float:
    return float(f"{value:.4g}")
