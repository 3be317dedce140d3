"""How the program that runs a plan executes it, where that changes what is priced.

Comes in: nothing; each record is a choice. Goes out: :class:`Execution`, whose defaults are this
project's own runtime (eager PyTorch); the validation prices published runs with those of other frameworks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Execution:
    """What a framework does its own way.

    ``attention`` is the fused kernel whose curves are used (``autoplan.hardware.ATTENTION_KERNELS``).
    ``linear_dtype`` is the dtype in which linear layers multiply, but for the output layer; empty: theirs.
    ``fuses_pointwise``: chains of pointwise ops run as one kernel. ``passes`` gives, for an op by name, the
    bytes moved per element of its first input, forward and backward. ``gradient_bytes_per_parameter`` are
    moved each micro-batch to add a gradient up, beyond what the product writes; None: this runtime's.
    ``gathered_copies`` are moved per byte of a ZeRO-3 weight on each gather, to take it out of its buffer.
    ``selective_reruns_products`` is the share of matrix products that selective recompute does not keep.
    ``reduced_bytes_per_parameter`` is the width in which gradients are reduced; None: as they are kept.
    ``overlaps_gradients``: the reduction runs beside the last micro-batch's backward, and the new weights
    (ZeRO 1 and 2) are gathered beside the first forward. ``overlaps_tp``: tensor-parallel collectives run
    in tp pieces beside the products they feed. ``optimizer_passes`` multiplies the traffic of one fused
    update.
    """

    attention: str = "flash2"
    fuses_pointwise: bool = False
    linear_dtype: str = ""
    passes: Mapping[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    gradient_bytes_per_parameter: float | None = None
    gathered_copies: float = 2.0
    selective_reruns_products: float = 0.0
    reduced_bytes_per_parameter: float | None = None
    overlaps_gradients: bool = True
    overlaps_tp: bool = False
    optimizer_passes: float = 1.0


EAGER = Execution()
