"""A chip and its cluster as data: every number with its tag and source, read from one YAML file.

Comes in: the name, alias or path of a profile. Goes out: a frozen :class:`HardwareProfile`.
Units are in the field names; curves interpolate linearly in log x and are flat outside their range.
"""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Literal, cast

from autoplan.profile_files import find_profile
from autoplan.profile_files import find_profile_files as find_profile_files
from autoplan.profile_files import profile_names as profile_names

Tag = Literal["datasheet", "measured", "estimated"]
DTYPES = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8")
SPANS = ("intra", "inter")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p")
# Fused ops that autoplan's passes make (``autoplan_passes.fusions``): Triton kernels serve all of them.
FUSED_KERNELS = (
    *("linear_cross_entropy", "layer_norm", "rms_norm", "add_rms_norm", "add_layer_norm", "swiglu"),
    *("geglu", "rotary"),
)
KERNELS = ("flash_attention", "grouped_gemm", "triton", *FUSED_KERNELS)
# torch's names of accelerators (torch.device takes no other word).
DEVICE_TYPES = (
    *("cpu", "cuda", "xpu", "npu", "hpu", "mlu", "musa", "maia", "mps", "mtia", "xla", "ipu", "ppu"),
    "privateuseone",
)
ATTENTION_KERNELS = ("flash", "flash2", "flash3", "cudnn", "triton")


@dataclass(frozen=True)
class Quantity:
    """One number with where it is from."""

    value: float
    tag: Tag
    source: str


@dataclass(frozen=True)
class Curve:
    """Points (x, y), x ascending; ``at`` interpolates linearly in log2 x, flat outside."""

    x: tuple[float, ...]
    y: tuple[float, ...]
    tag: Tag
    source: str

    def at(self, x: float) -> float:
        if x <= self.x[0]:
            return self.y[0]
        if x >= self.x[-1]:
            return self.y[-1]
        i = bisect.bisect_right(self.x, x)
        low, high = math.log2(self.x[i - 1]), math.log2(self.x[i])
        weight = (math.log2(x) - low) / (high - low)
        return self.y[i - 1] * (1 - weight) + self.y[i] * weight


@dataclass(frozen=True)
class GemmRates:
    """Achieved FLOP/s of a matrix product [m, k] x [k, n]: ``by_m(m) * by_n(n) * by_k(k)``.

    ``by_m`` is absolute FLOP/s at large n and k; ``by_n`` and ``by_k`` are factors, 1 at large sizes.
    """

    by_m: Curve
    by_n: Curve
    by_k: Curve

    def at(self, m: float, n: float, k: float) -> float:
        return self.by_m.at(m) * self.by_n.at(n) * self.by_k.at(k)

    @property
    def best_flops_per_s(self) -> float:
        """The fastest this product ever runs, over all sizes."""
        return max(self.by_m.y) * max(self.by_n.y) * max(self.by_k.y)


@dataclass(frozen=True)
class AttentionRates:
    """Achieved FLOP/s of one fused attention kernel by sequence length (causal work counted as half)."""

    direction: Literal["forward", "backward"]
    causal: bool
    head_dim: int
    by_sequence: Curve
    kernel: str = "flash"


@dataclass(frozen=True)
class CollectiveFit:
    """``t(s) = alpha_s + s*F/bytes_per_s + ramp_s * s/(s + ramp_bytes)`` for s message bytes.

    F = 2(n-1)/n for all_reduce, (n-1)/n for all_gather, reduce_scatter and all_to_all (s = the full,
    gathered size), 1 for p2p. ``ranks`` is the group size the fit was made for.
    """

    ranks: int
    alpha_s: float
    bytes_per_s: float
    ramp_s: float
    ramp_bytes: float
    tag: Tag
    source: str


@dataclass(frozen=True)
class Software:
    """What the chip's software needs: how torch names it and what to set in the environment."""

    device_type: str
    collective_backend: str
    visible_devices_variables: tuple[str, ...]
    environment: Mapping[str, str]
    torch_version: str
    source: str

    @property
    def release(self) -> tuple[int, int]:
        """The torch release, ``(2, 5)`` of ``2.5.1``."""
        major, minor = self.torch_version.split(".")[:2]
        return int(major), int(re.match(r"\d+", minor)[0])  # pyright: ignore[reportOptionalSubscript] - the reader has checked it


@dataclass(frozen=True)
class HardwareProfile:
    """One chip and the cluster round it.

    ``fast_domain`` is the number of devices that reach each other at full intra-node speed (4 on the
    P800: quads; 8 on an NVSwitch node). ``collectives`` maps ``"intra"`` (inside a node) and
    ``"inter"`` (across nodes) to kind (``all_reduce all_gather reduce_scatter all_to_all p2p``) to
    fits by ascending group size. ``sustained`` is by dtype the share of the ``gemm`` rates (of short runs)
    that a long run at the power limit keeps, where a dtype that is not named takes the first one's;
    ``variation`` is the standard deviation of equal devices' speed over its mean. ``gemm`` and
    ``peak_flops`` are keyed by dtype name (``fp64 fp32 tf32 fp16 bf16 fp8``; every dtype of ``gemm`` has a
    peak). ``kernels`` are the fused kernels the chip has (:data:`KERNELS`; ``triton`` stands for all of
    :data:`FUSED_KERNELS`), ``forbidden`` what it lacks.

    A group that crosses the border of a fast domain inside a node takes the ``intra`` fits of more than
    ``fast_domain`` ranks, whatever its own size. ``inter`` fits are for ONE rank in each of ``ranks``
    nodes, so ``bytes_per_s`` is one device's share of its node's NICs. With g ranks a node all_reduce,
    all_gather and reduce_scatter run over g shares (``g * bytes_per_s``, ``g * ramp_bytes``, at most the
    intra rate); all_to_all and p2p do not, since each rank's own bytes leave through its own share.
    """

    name: str
    title: str
    vendor: str
    aliases: tuple[str, ...]
    devices_per_node: int
    fast_domain: int
    memory_bytes: Quantity
    reserve_bytes: Quantity
    fragmentation: Quantity
    memory_bytes_per_s: Quantity
    memory_efficiency: Curve
    launch_s: Quantity
    sustained: Mapping[str, Quantity]
    variation: Quantity
    peak_flops: Mapping[str, Quantity]
    gemm: Mapping[str, GemmRates]
    attention: tuple[AttentionRates, ...]
    collectives: Mapping[str, Mapping[str, tuple[CollectiveFit, ...]]]
    host_bytes_per_s: Quantity
    nic_bytes_per_s: Quantity
    software: Software
    kernels: tuple[str, ...]
    notes: tuple[str, ...]
    fingerprint: str
    node: Mapping[str, Quantity] = field(default_factory=dict[str, Quantity])
    forbidden: tuple[str, ...] = ()
    file: str = ""

    def sourced(self) -> Iterator[tuple[str, Quantity | Curve | CollectiveFit]]:
        """Every number of the profile with its tag and source, by path (``gemm.bf16.by_m``)."""
        yield from _sourced("", self)


def _sourced(path: str, value: object) -> Iterator[tuple[str, Quantity | Curve | CollectiveFit]]:
    if isinstance(value, CollectiveFit):
        yield f"{path}.{value.ranks}", value
    elif isinstance(value, (Quantity, Curve)):
        yield path, value
    elif isinstance(value, AttentionRates):
        causal = "causal" if value.causal else "full"
        yield f"{path}.{value.kernel}.{value.direction}.{causal}.{value.head_dim}", value.by_sequence
    elif isinstance(value, Mapping):
        for name, item in cast(Mapping[str, object], value).items():
            yield from _sourced(f"{path}.{name}", item)
    elif isinstance(value, tuple):
        for item in cast(tuple[object, ...], value):
            yield from _sourced(path, item)
    elif is_dataclass(value):
        for part in fields(value):
            yield from _sourced(f"{path}.{part.name}" if path else part.name, getattr(value, part.name))


def load_profile(name_or_path: str | None = None) -> HardwareProfile:
    """The profile of a name (``kunlun-p800``), an alias (``kunlun``) or a path to a YAML file.

    ``None`` reads the environment variable ``AUTOPLAN_HW``. Raises :class:`BadInputError` when nothing
    is named or the name is unknown, :class:`BadProfileError` when the file is wrong.
    """
    from autoplan.hardware_file import read_profile

    return read_profile(find_profile(name_or_path))
