"""The times of a trace and a profile in, the profile's curves moved to what was seen out, with residuals.

A product's rate is moved where its number of rows lies: the curve ``by_m`` times what was seen over what was
forecast, between the shapes seen; ``by_n`` and ``by_k`` stay. Copies move the memory bandwidth, collectives
inside a node their fit. A collective's kernel also waits for the other ranks: its quickest runs count.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoplan.calibration.kernels import curve_of
from autoplan.calibration.links import LinkFit, fit_link
from autoplan.calibration.trace import TraceTimes
from autoplan.hardware import HardwareProfile
from autoplan_cost_models.collectives import traffic_factor

LARGE_BYTES = 8 * 2**20  # smaller copies tell of launches and caches, not of the bandwidth
LEAST_FLOPS = 1e7
QUICKEST = 0.25  # the quantile of a collective's times that counts


@dataclass(frozen=True)
class Fitted:
    """What a part of the profile was off by, before and after: median |forecast / seen - 1| of ``shapes``."""

    what: str
    shapes: int
    before: float
    after: float


@dataclass(frozen=True)
class Observed:
    """New numbers: FLOP/s by m of each dtype, the share of the memory bandwidth, fits of collectives.

    ``left_out`` names what was seen and not used.
    """

    by_m: Mapping[str, Mapping[int, float]]
    memory_bytes_per_s: float | None
    links: Sequence[LinkFit]
    fitted: Sequence[Fitted]
    left_out: Sequence[str]


def observe(times: TraceTimes, profile: HardwareProfile) -> Observed:
    """Move the profile to the trace."""
    fitted: list[Fitted] = []
    by_m: dict[str, Mapping[int, float]] = {}
    left_out: list[str] = []
    for dtype in sorted({key[0] for key in times.products}):
        if dtype not in profile.gemm:
            left_out.append(f"products in {dtype}, of which {profile.name} has no curve")
            continue
        curve, fit = _products(times, profile, dtype)
        if fit.shapes:
            by_m[dtype] = curve
            fitted.append(fit)
    memory = _memory(times, profile)
    if memory is not None:
        fitted.append(memory[1])
    links, link_fits, unused = _links(times, profile)
    return Observed(by_m, memory[0] if memory else None, links, [*fitted, *link_fits], [*left_out, *unused])


def _products(times: TraceTimes, profile: HardwareProfile, dtype: str) -> tuple[Mapping[int, float], Fitted]:
    rates, launch_s = profile.gemm[dtype], profile.launch_s.value
    seen: list[tuple[int, float, float, float]] = []  # rows, seen over forecast rate, both seconds
    for (kind, batch, m, n, k), all_s in times.products.items():
        flops = 2.0 * batch * m * n * k
        if kind != dtype or flops < LEAST_FLOPS:
            continue
        seconds = statistics.median(all_s)
        forecast_s = launch_s + flops / rates.at(m, n, k)
        running_s = max(seconds - launch_s, 0.2 * seconds)
        seen.append((m, flops / rates.at(m, n, k) / running_s, seconds, forecast_s))
    if not seen:
        return {}, Fitted(f"{dtype} products", 0, 0.0, 0.0)
    factors: dict[int, list[float]] = defaultdict(list)
    for m, factor, *_ in seen:
        factors[m].append(factor)
    factor_at = curve_of({m: statistics.geometric_mean(found) for m, found in sorted(factors.items())})
    peak = profile.peak_flops[dtype].value if dtype in profile.peak_flops else float("inf")
    rows = sorted({*map(int, rates.by_m.x), *factors})
    largest = max(rates.by_n.y) * max(rates.by_k.y)
    curve = {m: min(rates.by_m.at(m) * factor_at.at(m), 0.999 * peak / largest) for m in rows}
    moved = curve_of(curve)
    before = [forecast_s / seconds - 1 for *_, seconds, forecast_s in seen]
    after = [
        (launch_s + (forecast_s - launch_s) * rates.by_m.at(m) / moved.at(m)) / seconds - 1
        for m, _, seconds, forecast_s in seen
    ]
    return curve, Fitted(f"{dtype} products", len(seen), _middle(before), _middle(after))


def _memory(times: TraceTimes, profile: HardwareProfile) -> tuple[float, Fitted] | None:
    launch_s, now = profile.launch_s.value, profile.memory_bytes_per_s.value
    large = {size: statistics.median(s) for size, s in times.moves.items() if size >= LARGE_BYTES}
    if not large:
        return None
    shares = {size: profile.memory_efficiency.at(size / 2**20) for size in large}
    forecast = {size: launch_s + size / (now * shares[size]) for size in large}
    rates = [size / shares[size] / max(s - launch_s, 0.2 * s) for size, s in large.items()]
    found = statistics.median(rates)
    before = [forecast[size] / s - 1 for size, s in large.items()]
    after = [(launch_s + (forecast[size] - launch_s) * now / found) / s - 1 for size, s in large.items()]
    return found, Fitted("memory bandwidth", len(large), _middle(before), _middle(after))


def _links(times: TraceTimes, profile: HardwareProfile) -> tuple[list[LinkFit], list[Fitted], list[str]]:
    groups: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)
    for (kind, ranks, size), all_s in times.collectives.items():
        groups[kind, ranks][size] = sorted(all_s)[int(QUICKEST * (len(all_s) - 1))]
    links: list[LinkFit] = []
    fitted: list[Fitted] = []
    unused: list[str] = []
    for (kind, ranks), sizes in sorted(groups.items()):
        if ranks > profile.devices_per_node:
            unused.append(f"{kind} over {ranks} ranks, more than a node holds: a trace does not name nodes")
            continue
        fits = profile.collectives["intra"][kind]
        near = min(fits, key=lambda one: abs(one.ranks - ranks))
        factor = traffic_factor(kind, ranks)
        before = [(near.alpha_s + size * factor / near.bytes_per_s) / s - 1 for size, s in sizes.items()]
        if max(sizes) >= 8 * min(sizes):
            fit = fit_link(kind, ranks, dict(sorted(sizes.items())))
        else:  # sizes too close to tell latency from bandwidth: the latency stays
            rates = [size * factor / max(s - near.alpha_s, 0.2 * s) for size, s in sizes.items()]
            fit = LinkFit(kind, ranks, near.alpha_s, statistics.median(rates), 0.0)
        after = [(fit.alpha_s + size * factor / fit.bytes_per_s) / s - 1 for size, s in sizes.items()]
        links.append(fit)
        fitted.append(Fitted(f"{kind} on {ranks} ranks", len(sizes), _middle(before), _middle(after)))
    return links, fitted, unused


def _middle(errors: Sequence[float]) -> float:
    return statistics.median(abs(error) for error in errors)
