"""What a device executes: kernels with their FLOPs, bytes and shapes, the unit every price is made of.

Comes in: numbers read off a graph. Goes out: frozen :class:`Kernel`, :class:`Operation` and
:class:`CollectiveCall` records, with no reference to the graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["gemm", "grouped_gemm", "attention", "memory", "collective", "free"]
Direction = Literal["forward", "backward"]
CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p", "ring"]

COLLECTIVE_KINDS: tuple[str, ...] = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "p2p",
    "ring",
)
CONTRACTION_KINDS: tuple[str, ...] = ("gemm", "grouped_gemm", "attention")


@dataclass(frozen=True)
class Kernel:
    """One launch: ``count`` products [m, k] x [k, n], or a pass over memory when ``flops`` is 0.

    ``flops`` counts multiply and add (2 count m n k for a product; half of it for causal attention,
    whose m and n are the query and key lengths and k the head size). ``bytes`` is everything read
    and written once. ``deferrable``: it makes the gradient of a weight that a split backward puts off.
    """

    kind: Kind
    dtype: str
    bytes: float
    flops: float = 0.0
    count: float = 1.0
    m: float = 0.0
    n: float = 0.0
    k: float = 0.0
    causal: bool = False
    launches: int = 1
    deferrable: bool = False


@dataclass(frozen=True)
class CollectiveCall:
    """One collective on ``bytes``: the full (gathered or unreduced) size of the tensor it works on.

    A ``ring`` passes every rank's piece of the tensor to all others. ``overlapped``: its operation computes
    meanwhile.
    """

    kind: str
    bytes: float
    axis: str = "tp"
    overlapped: bool = False


@dataclass(frozen=True)
class Operation:
    """One node of a region's graph: the kernels and collectives of its forward and of its backward.

    ``selective_keeps`` says whether selective recompute saves the node's output instead of running it
    again: contractions and collectives, but for gathers, or as ``kept`` says. ``regathers``: its gather runs
    again with the backward of the products that read it, recomputed or not.
    """

    name: str
    target: str
    kind: Kind
    forward: tuple[Kernel, ...] = ()
    backward: tuple[Kernel, ...] = ()
    forward_collectives: tuple[CollectiveCall, ...] = ()
    backward_collectives: tuple[CollectiveCall, ...] = ()
    regathers: bool = False
    kept: bool | None = None

    @property
    def selective_keeps(self) -> bool:
        if self.kept is not None:
            return self.kept
        gathers = any(call.kind == "all_gather" for call in self.forward_collectives)
        return self.kind in CONTRACTION_KINDS or (self.kind == "collective" and not gathers)

    @property
    def forward_flops(self) -> float:
        return sum(kernel.flops for kernel in self.forward)

    @property
    def backward_flops(self) -> float:
        return sum(kernel.flops for kernel in self.backward)

    @property
    def forward_bytes(self) -> float:
        return sum(kernel.bytes for kernel in self.forward)

    @property
    def backward_bytes(self) -> float:
        return sum(kernel.bytes for kernel in self.backward)
