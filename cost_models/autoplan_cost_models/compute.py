"""How long kernels take on one device.

Comes in: kernels (or a table of them) and a hardware profile. Goes out: seconds,
``max(FLOPs / rate(m, n, k, dtype), bytes / (bandwidth x efficiency(bytes))) + launches x launch time``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from statistics import NormalDist

import numpy as np

from autoplan.errors import BadProfileError
from autoplan.hardware import AttentionRates, Curve, GemmRates, HardwareProfile, Quantity
from autoplan_cost_models.execution import EAGER
from autoplan_cost_models.kernel_table import Floats, KernelGroup, KernelTable, kernel_table
from autoplan_cost_models.kernels import CONTRACTION_KINDS, Kernel, Operation

# Where a profile has no rates for a dtype: the next best, with the factor between their speeds.
# bf16 and fp16 share matrix units on every chip with both; fp64 at half of fp32 and fp32 at an eighth
# of bf16 are the usual ratios of vector units (A100: 19.5 and 312 TFLOP/s, NVIDIA data sheet).
DTYPE_FALLBACKS: dict[str, tuple[tuple[str, float], ...]] = {
    "bf16": (("fp16", 1.0), ("fp32", 1.0)),
    "fp16": (("bf16", 1.0), ("fp32", 1.0)),
    "fp8": (("bf16", 1.0), ("fp16", 1.0), ("fp32", 1.0)),
    "fp32": (("bf16", 0.125), ("fp16", 0.125), ("fp64", 1.0)),
    "fp64": (("fp32", 0.5), ("bf16", 0.0625), ("fp16", 0.0625)),
    "int": (("fp32", 1.0), ("bf16", 0.125), ("fp16", 0.125)),
}
# Flash attention slows down at small heads about as (head size)^0.25: head 64 against 128 reaches
# 0.87 (FlashAttention-2 on A100 and H100 forward) to 0.77 (FlashAttention-3): 0.5**0.25 = 0.84.
HEAD_SIZE_EXPONENT = 0.25
# Attention without a fused kernel reads and writes the score matrix about this often, forward.
SCORE_PASSES = 6.0


@dataclass(frozen=True)
class Speeds:
    """Rates of one device in a long run; every method is pure, curves are prepared once.

    ``attention`` is the fused kernel whose curves are used, where the profile has them.
    """

    profile: HardwareProfile
    attention: str = EAGER.attention
    _passes: dict[float, float] = field(
        default_factory=dict[float, float], init=False, repr=False, compare=False
    )

    def seconds(self, table: KernelTable) -> Floats:
        """Seconds of every kernel of the table."""
        moved = table.amount("bytes")
        busy = self._memory_seconds(moved)
        for group, rows in table.groups:
            if group.kind == "attention":
                busy[rows] = np.maximum(busy[rows], self._attention_seconds(group, table.amounts[:, rows]))
            elif group.kind in CONTRACTION_KINDS:
                busy[rows] = np.maximum(busy[rows], self._product_seconds(group, table.amounts[:, rows]))
        return busy + table.launches * self.profile.launch_s.value

    def slowest_of(self, devices: int) -> float:
        """How much longer the slowest of ``devices`` equal ones takes than the mean: 1 + variation x the
        expected largest of so many standard normal values (Blom's approximation)."""
        if devices <= 1:
            return 1.0
        return 1.0 + self.profile.variation.value * NormalDist().inv_cdf((devices - 0.375) / (devices + 0.25))

    def operation_seconds(self, operation: Operation, fraction: float = 1.0) -> float:
        """Forward plus backward seconds when one rank does ``fraction`` of the FLOPs and bytes."""
        table = kernel_table((operation,))
        full = self.seconds(table)
        launches = table.launches * self.profile.launch_s.value
        return float(np.sum((full - launches) * fraction + launches))

    def kernel_seconds(self, kernel: Kernel) -> float:
        return self.operation_seconds(Operation("", "", kernel.kind, forward=(kernel,)))

    def pass_seconds(self, moved_bytes: float) -> float:
        """One streaming pass that reads and writes ``moved_bytes`` together."""
        if moved_bytes not in self._passes:
            kernel = Kernel("memory", "int", moved_bytes)
            self._passes[moved_bytes] = self.kernel_seconds(kernel) if moved_bytes > 0 else 0.0
        return self._passes[moved_bytes]

    def estimated(self, table: KernelTable) -> frozenset[str]:
        """Names of the estimated quantities these kernels were priced with."""
        names = set(self._estimated_memory)
        for group, _ in table.groups:
            if group.kind in ("gemm", "grouped_gemm"):
                names.update(self._gemm_notes(group.dtype))
            elif group.kind == "attention" and self._fused_attention:
                names.update(self._attention_notes(group))
        return frozenset(names)

    @cached_property
    def _memory_curve(self) -> tuple[Floats, Floats]:
        sizes, efficiency = _log_points(self.profile.memory_efficiency)
        return sizes, sizes - np.log2(efficiency * self.profile.memory_bytes_per_s.value)

    def _memory_seconds(self, moved: Floats) -> Floats:
        """bytes / (bandwidth x efficiency), interpolated as time: between two points of the efficiency
        curve a larger pass must not be faster. Outside the curve the efficiency is flat."""
        size = np.log2(np.maximum(moved, 1e-9))
        points, seconds = self._memory_curve
        inside = np.clip(size, points[0], points[-1])
        return np.exp2(np.interp(inside, points, seconds) + size - inside)

    def _product_seconds(self, group: KernelGroup, amounts: Floats) -> Floats:
        """FLOPs over the achieved rate. Batched products fill the chip together (rows count x m);
        grouped ones pay for the rows of each group."""
        _, flops, count, m, n, k = amounts
        rows = m if group.kind == "grouped_gemm" else m * count
        return flops / self.product_rate(group.dtype, rows, n, k)

    def product_rate(self, dtype: str, m: Floats, n: Floats, k: Floats) -> Floats:
        """Achieved FLOP/s of [m, k] x [k, n], at most the dtype's peak where that is known."""
        source, factor = self._gemm_source(dtype)
        curves = self._gemm_curves[source]
        rate = factor * self._sustained(source).value * np.ones_like(m)
        for size, curve in zip((m, n, k), curves):
            rate = rate * np.interp(np.log2(np.maximum(size, 1.0)), *curve)
        peak = self.profile.peak_flops.get(dtype)
        return np.minimum(rate, peak.value) if peak is not None else rate

    def _sustained(self, dtype: str) -> Quantity:
        """The share of a dtype's short-run rates that long runs keep; the first one named where it is not."""
        shares = self.profile.sustained
        return shares[dtype] if dtype in shares else next(iter(shares.values()))

    @cached_property
    def _gemm_curves(self) -> dict[str, tuple[tuple[Floats, Floats], ...]]:
        return {
            dtype: (_log_points(rates.by_m), _log_points(rates.by_n), _log_points(rates.by_k))
            for dtype, rates in self.profile.gemm.items()
        }

    def _gemm_source(self, dtype: str) -> tuple[str, float]:
        """The dtype whose rates are used, and the factor on them (ratio of peaks where both are known)."""
        if dtype in self.profile.gemm:
            return dtype, 1.0
        for other, factor in DTYPE_FALLBACKS.get(dtype, ()):
            if other in self.profile.gemm:
                mine, theirs = self.profile.peak_flops.get(dtype), self.profile.peak_flops.get(other)
                return other, mine.value / theirs.value if mine and theirs else factor
        known = ", ".join(self.profile.gemm) or "none"
        raise BadProfileError(
            f"hardware profile {self.profile.name} has no matrix product rates for {dtype}: expected "
            f"gemm.{dtype} or a near dtype, found {known}; add gemm.{dtype} to its YAML."
        )

    def _gemm_notes(self, dtype: str) -> list[str]:
        source, _ = self._gemm_source(dtype)
        if source != dtype:
            return [f"{dtype} matrix product rate (from {source})"]
        rates: GemmRates = self.profile.gemm[source]
        tags = (rates.by_m.tag, rates.by_n.tag, rates.by_k.tag)
        sustained = self._sustained(source)
        if sustained.value < 1:
            tags = (*tags, sustained.tag)
        return [f"{dtype} matrix product rate"] if "estimated" in tags else []

    @property
    def _fused_attention(self) -> bool:
        return "flash_attention" in self.profile.kernels

    def _attention_seconds(self, group: KernelGroup, amounts: Floats) -> Floats:
        """By the profile's attention curves; as two products and passes over the scores without a kernel."""
        _, flops, count, rows, columns, head_dim = amounts
        curve = self._attention_curve(group)
        if not self._fused_attention or curve is None:
            rate = self.product_rate(group.dtype, rows * count, columns, head_dim)
            if self._fused_attention:
                return flops / rate
            element = 8.0 if group.dtype == "fp64" else 4.0 if group.dtype == "fp32" else 2.0
            passes = SCORE_PASSES * (2.0 if group.is_backward else 1.0)
            scores = passes * element * count * rows * columns
            whole = flops * (2.0 if group.causal else 1.0)
            return whole / rate + self._memory_seconds(scores)
        points, scale = curve
        return flops / (scale * np.interp(np.log2(np.maximum(columns, 1.0)), *points))

    def _attention_curve(self, group: KernelGroup) -> tuple[tuple[Floats, Floats], float] | None:
        nearest = self._nearest_attention(group)
        if nearest is None:
            return None
        scale = min(1.0, (max(group.head_dim, 1.0) / nearest.head_dim) ** HEAD_SIZE_EXPONENT)
        # The curves are for 16-bit inputs; others change with the speed of their products.
        if group.dtype in ("fp32", "fp64"):
            half = "bf16" if "bf16" in self.profile.gemm else "fp16"
            large = np.array([4096.0])
            own, base = (self.product_rate(d, large, large, large)[0] for d in (group.dtype, half))
            scale *= float(own / base)
        return _log_points(nearest.by_sequence), scale

    def _nearest_attention(self, group: KernelGroup) -> AttentionRates | None:
        """The same direction first, then the kernel, the masking and the nearest head size."""
        direction = "backward" if group.is_backward else "forward"

        def distance(rates: AttentionRates) -> tuple[bool, bool, bool, float]:
            size = abs(math.log2(rates.head_dim / max(group.head_dim, 1.0)))
            other_kernel = rates.kernel != self.attention
            return rates.direction != direction, other_kernel, rates.causal != group.causal, size

        return min(self.profile.attention, key=distance, default=None)

    def _attention_notes(self, group: KernelGroup) -> list[str]:
        nearest = self._nearest_attention(group)
        if nearest is None:
            return ["attention rate (from matrix products)"]
        return ["attention rate"] if nearest.by_sequence.tag == "estimated" else []

    @cached_property
    def _estimated_memory(self) -> tuple[str, ...]:
        used = (
            ("memory bandwidth", self.profile.memory_bytes_per_s.tag),
            ("memory efficiency", self.profile.memory_efficiency.tag),
            ("kernel launch time", self.profile.launch_s.tag),
        )
        return tuple(name for name, tag in used if tag == "estimated")


def _log_points(curve: Curve) -> tuple[Floats, Floats]:
    """Points of a curve in log2 x, for ``np.interp`` (flat outside, as ``Curve.at``)."""
    return np.log2(np.array(curve.x, dtype=np.float64)), np.array(curve.y, dtype=np.float64)
