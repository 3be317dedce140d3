"""One device in, its matrix product, attention, memory and launch numbers out, with what the fit leaves.

Everything is measured with torch's own operators. The model of a product is that of the profiles:
``time = launch + 2 m n k / (by_m(m) by_n(n) by_k(k))``.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from autoplan.calibration.timing import Clock
from autoplan.hardware import Curve, GemmRates

Say = Callable[[str], None]
MIB = 2**20
# Small copies come from cache; tensors of a training run seldom do, so profiles stop here.
MOST_FROM_CACHE = 1.5


@dataclass(frozen=True)
class Sizes:
    """What is measured; large sizes are those at which factors are 1."""

    large: int
    m: tuple[int, ...]
    narrow: tuple[int, ...]
    held_out: tuple[tuple[int, int, int], ...]
    sequence: tuple[int, ...]
    head_dims: tuple[int, ...]
    copy_mib: tuple[float, ...]


SIZES = {
    "quick": Sizes(128, (1, 16, 128), (16, 64, 128), ((48, 96, 96),), (64, 128), (32,), (0.0625, 1, 4)),
    "cpu": Sizes(
        1024,
        (1, 4, 16, 64, 256, 1024, 4096),
        (16, 64, 256, 1024),
        ((128, 384, 384), (512, 256, 768), (96, 1536, 512), (2048, 192, 640)),
        (128, 512, 1024, 2048),
        (64,),
        (0.0625, 0.25, 1, 4, 16, 64, 256),
    ),
    "accelerator": Sizes(
        8192,
        (1, 16, 64, 256, 1024, 4096, 16384),
        (128, 256, 512, 1024, 2048, 4096, 8192),
        ((512, 1536, 1536), (3072, 6144, 5120), (2048, 11008, 4096), (6000, 4096, 14336)),
        (512, 1024, 2048, 4096, 8192),
        (64, 128),
        (0.0625, 0.25, 1, 4, 16, 64, 256, 1024),
    ),
}
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Products:
    """Curves of one dtype: FLOP/s by m, factors by n and k; relative errors on the shapes held out."""

    by_m: Mapping[int, float]
    by_n: Mapping[int, float]
    by_k: Mapping[int, float]
    residuals: tuple[float, ...]

    @property
    def residual(self) -> float:
        """Median of |predicted / measured - 1| over the shapes held out."""
        return statistics.median(abs(error) for error in self.residuals)


@dataclass(frozen=True)
class AttentionCurve:
    """FLOP/s of fused attention by length; causal work counts as half."""

    direction: str
    causal: bool
    head_dim: int
    by_sequence: Mapping[int, float]


@dataclass(frozen=True)
class Memory:
    """Bytes/s of a large copy, and the share of it that copies of so many bytes reach."""

    bytes_per_s: float
    efficiency: Mapping[float, float]


def measure_launch(clock: Clock) -> float:
    """Seconds that an operator takes before it computes: one on a few elements."""
    x = torch.zeros(8, device=clock.device)
    return clock.seconds(lambda: torch.add(x, 1.0))


def measure_memory(clock: Clock, sizes: Sizes, launch_s: float, say: Say) -> Memory:
    """Copies of every size; each reads and writes its bytes."""
    rates: dict[float, float] = {}
    for mib in sizes.copy_mib:
        say(f"copying {mib:g} MiB")
        source = torch.zeros(int(mib * MIB) // 4, device=clock.device)
        target = torch.empty_like(source)
        spent_s = clock.seconds(lambda source=source, target=target: target.copy_(source))
        # The sizes of a profile are the bytes moved: read and written.
        rates[2 * mib] = 2 * mib * MIB / max(spent_s - launch_s, 0.2 * spent_s)
    best = rates[max(rates)]
    return Memory(best, {mib: min(MOST_FROM_CACHE, rate / best) for mib, rate in rates.items()})


def measure_products(clock: Clock, dtype: str, sizes: Sizes, launch_s: float, say: Say) -> Products:
    """One curve by m at large n and k, factors of narrow n and k, and errors on shapes held out."""
    rates: dict[tuple[int, int, int], float] = {}

    def rate(m: int, n: int, k: int) -> float:
        if (m, n, k) not in rates:
            say(f"multiplying {dtype} [{m}, {k}] x [{k}, {n}]")
            rates[m, n, k] = _product_rate(clock, DTYPES[dtype], (m, n, k), launch_s)
        return rates[m, n, k]

    large = sizes.large
    by_m = {m: rate(m, large, large) for m in sizes.m}
    whole = rate(large, large, large)
    by_n = {n: min(1.0, rate(large, n, large) / whole) for n in (*sizes.narrow, large)}
    by_k = {k: min(1.0, rate(large, large, k) / whole) for k in (*sizes.narrow, large)}
    fitted = GemmRates(curve_of(by_m), curve_of(by_n), curve_of(by_k))
    residuals = tuple(rate(*shape) / fitted.at(*shape) - 1 for shape in sizes.held_out)
    return Products(by_m, by_n, by_k, residuals)


def _product_rate(clock: Clock, dtype: torch.dtype, shape: tuple[int, int, int], launch_s: float) -> float:
    m, n, k = shape
    x = torch.randn(m, k, device=clock.device).to(dtype)
    weight = torch.randn(n, k, device=clock.device).to(dtype)
    spent_s = clock.seconds(lambda: F.linear(x, weight))
    return 2.0 * m * n * k / max(spent_s - launch_s, 0.2 * spent_s)


def curve_of(points: Mapping[int, float]) -> Curve:
    """Measured points as the curve that a profile will hold."""
    sizes = sorted(points)
    return Curve(tuple(map(float, sizes)), tuple(points[size] for size in sizes), "measured", "")


def measure_attention(
    clock: Clock, dtype: str, sizes: Sizes, launch_s: float, say: Say
) -> list[AttentionCurve]:
    """Forward and backward, causal and not, by head size and length."""
    curves: list[AttentionCurve] = []
    for head_dim in sizes.head_dims:
        for causal in (True, False):
            forward: dict[int, float] = {}
            backward: dict[int, float] = {}
            for sequence in sizes.sequence:
                say(f"attending {sequence} tokens, heads of {head_dim}{', causal' if causal else ''}")
                there_s, back_s = _attention_seconds(clock, DTYPES[dtype], sequence, head_dim, causal)
                flops = 4.0 * HEADS * sequence * sequence * head_dim * (0.5 if causal else 1.0)
                forward[sequence] = flops / max(there_s - launch_s, 0.2 * there_s)
                backward[sequence] = 2.5 * flops / max(back_s - launch_s, 0.2 * back_s)
            curves.append(AttentionCurve("forward", causal, head_dim, forward))
            curves.append(AttentionCurve("backward", causal, head_dim, backward))
    return curves


HEADS = 8


def _attention_seconds(
    clock: Clock, dtype: torch.dtype, sequence: int, head_dim: int, causal: bool
) -> tuple[float, float]:
    shape = (1, HEADS, sequence, head_dim)
    q, k, v = (torch.randn(shape, device=clock.device).to(dtype).requires_grad_() for _ in range(3))

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    there_s = clock.seconds(forward)
    gradient = torch.ones(shape, device=clock.device, dtype=dtype)
    both_s = clock.seconds(lambda: torch.autograd.grad(forward(), (q, k, v), gradient))
    return there_s, max(both_s - there_s, 0.2 * both_s)


def usable_dtypes(device: torch.device) -> Sequence[str]:
    """What is measured: on a CPU what it computes natively fast."""
    return ("fp32", "fp64") if device.type == "cpu" else ("bf16", "fp16", "fp32")
