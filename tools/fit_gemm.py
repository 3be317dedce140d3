"""Measured matrix products in, the three curves of a dtype out: rate by m, factors by n and by k.

The model is ``time = launch + flops / (by_m(m) * by_n(n) * by_k(k))``, fitted by median polish in logarithms
so that single slow shapes do not pull the curves; a quarter of the shapes is held out and only measured
against. Products over in under three launches say nothing about the rate and are left out of the fit, but
not out of the residuals.
"""

from __future__ import annotations

import statistics
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log

LARGE = 4096
ROUNDS = 20
LAUNCH_S = 3e-6


@dataclass(frozen=True)
class Product:
    """One measured product [m, k] x [k, n] and its TFLOP/s."""

    m: int
    n: int
    k: int
    tflops: float

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k

    @property
    def time_s(self) -> float:
        return self.flops / self.tflops / 1e12

    @property
    def net_tflops(self) -> float:
        """The rate once the launch is paid."""
        return self.flops / (self.time_s - LAUNCH_S) / 1e12


@dataclass(frozen=True)
class Residual:
    """Relative error of predicted times over some shapes: median and 90th percentile of |error|, bias."""

    shapes: int
    median: float
    p90: float
    bias: float

    def __str__(self) -> str:
        return (
            f"{self.shapes:4d} shapes  median {self.median:5.1%}  p90 {self.p90:5.1%}  bias {self.bias:+5.1%}"
        )


@dataclass(frozen=True)
class GemmFit:
    """The fitted curves as {size: value}, and how far they are off on the shapes fitted and held out."""

    by_m_tflops: Mapping[int, float]
    by_n: Mapping[int, float]
    by_k: Mapping[int, float]
    fitted: Residual
    held_out: Residual

    def time_s(self, product: Product) -> float:
        rate = _interpolate(self.by_m_tflops, product.m)
        rate *= _interpolate(self.by_n, product.n) * _interpolate(self.by_k, product.k)
        return LAUNCH_S + product.flops / rate / 1e12

    def scaled(self, factor: float) -> GemmFit:
        """The same shape at ``factor`` times the rate."""
        return replace(self, by_m_tflops={m: rate * factor for m, rate in self.by_m_tflops.items()})


def select_products(rows: Iterable[Mapping[str, str]], chip: str, dtype: str, method: str) -> list[Product]:
    """The dense products of one chip, dtype and measuring method (a substring of the method column)."""
    return [
        Product(int(row["m"]), int(row["n"]), int(row["k"]), float(row["tflops"]))
        for row in rows
        if row["chip"] == chip and row["dtype"] == dtype and row["kind"] == "gemm"
        if method in row["method"] and row["m"] and row["n"] and row["k"]
    ]


def fit_products(products: Sequence[Product]) -> GemmFit:
    """Fit on three quarters of the shapes (chosen by a hash of the shape), measure on the rest."""
    held_out = [p for p in products if zlib.crc32(f"{p.m},{p.n},{p.k}".encode()) % 4 == 0]
    fitted = [p for p in products if p not in set(held_out)]
    clear = [p for p in fitted if p.time_s > 3 * LAUNCH_S]
    by_n, by_k = _factors([p for p in clear if p.m >= LARGE // 2])
    by_m = _by_m(clear, by_n, by_k)
    draft = GemmFit(by_m, by_n, by_k, Residual(0, 0, 0, 0), Residual(0, 0, 0, 0))
    return GemmFit(by_m, by_n, by_k, residual(draft, fitted), residual(draft, held_out))


def residual(fit: GemmFit, products: Sequence[Product], smallest_m: int = 128) -> Residual:
    """How far ``fit`` is off on ``products`` of at least ``smallest_m`` rows (what training runs)."""
    errors = sorted(fit.time_s(p) / p.time_s - 1 for p in products if p.m >= smallest_m)
    sizes = sorted(abs(e) for e in errors)
    return Residual(
        len(errors), statistics.median(sizes), sizes[int(0.9 * (len(sizes) - 1))], statistics.median(errors)
    )


def _factors(products: Sequence[Product]) -> tuple[dict[int, float], dict[int, float]]:
    """Factors of n and k (1 at large sizes, never above) by median polish."""
    effects: dict[str, dict[int, float]] = {"m": defaultdict(float), "n": defaultdict(float)}
    effects["k"] = defaultdict(float)
    for _ in range(ROUNDS):
        for name in effects:
            others = [other for other in effects if other != name]
            rest: dict[int, list[float]] = defaultdict(list)
            for p in products:
                known = sum(effects[other][getattr(p, other)] for other in others)
                rest[getattr(p, name)].append(log(p.net_tflops) - known)
            effects[name] = defaultdict(float, {x: statistics.median(v) for x, v in rest.items()})
    return _normalise(effects["n"]), _normalise(effects["k"])


def _normalise(effect: Mapping[int, float]) -> dict[int, float]:
    top = statistics.median(value for size, value in effect.items() if size >= LARGE)
    return {size: min(1.0, exp(value - top)) for size, value in sorted(effect.items())}


def _by_m(
    products: Sequence[Product], by_n: Mapping[int, float], by_k: Mapping[int, float]
) -> dict[int, float]:
    rest: dict[int, list[float]] = defaultdict(list)
    for p in products:
        if min(p.n, p.k) >= LARGE // 2:
            rest[p.m].append(p.net_tflops / by_n[p.n] / by_k[p.k])
    return {m: statistics.median(values) for m, values in sorted(rest.items())}


def _interpolate(curve: Mapping[int, float], at: int) -> float:
    sizes = sorted(curve)
    if at <= sizes[0] or at >= sizes[-1]:
        return curve[sizes[0] if at <= sizes[0] else sizes[-1]]
    low = max(size for size in sizes if size <= at)
    high = min(size for size in sizes if size > at)
    weight = log(at / low) / log(high / low)
    return curve[low] * (1 - weight) + curve[high] * weight


def sustained_ratio(fit: GemmFit, products: Sequence[Product]) -> float:
    """Rate of ``products`` (long training runs) over the fitted one, at large sizes."""
    large = [p for p in products if min(p.m, p.n, p.k) >= LARGE // 2]
    return statistics.median(fit.time_s(p) / p.time_s for p in large)
