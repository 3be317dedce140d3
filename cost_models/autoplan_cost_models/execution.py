"""How the program that runs a plan executes it, where that changes what is priced.

Comes in: nothing; each record is a choice. Goes out: :class:`Execution`, whose defaults are this
project's own runtime (eager PyTorch); the validation prices published runs with those of other frameworks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Selective = Literal["products", "every second product", "all but core attention"]


@dataclass(frozen=True)
class Keeping:
    """What a framework keeps in memory its own way; the defaults are this project's own runtime.

    ``selective`` is what selective recompute does not run again: the outputs of products, attention and
    collectives; the same with every second product; or all but what is inside attention (scores, softmax,
    dropout: arXiv 2205.05198, section 5). ``only_read``: of these, only what the backward reads (a compiler
    sees both; eager selective checkpoints keep the others too). ``chains``: values inside a chain of
    pointwise ops are made again from what enters it. ``loss_bytes``: per logit, what the loss saves and what
    its backward holds beside that; None: as measured. ``eight_bit_inputs``: 8-bit linear layers save their
    inputs in 8 bits. ``gradient_bytes`` is the width in which gradients are added up; None: the dtype
    policy's. ``frees_gradients``: they are let go after each update: the first backward makes them anew.
    """

    selective: Selective = "products"
    only_read: bool = False
    chains: bool = False
    loss_bytes: tuple[float, float] | None = None
    eight_bit_inputs: bool = False
    gradient_bytes: int | None = None
    frees_gradients: bool = False


EAGER_KEEPING = Keeping()


# A kernel after each chunk's product: written and read in 16 bits; written, read and written as a gradient,
# read by two products.
FUSED_LOGIT_BYTES = (4.0, 10.0)
# The same in single precision op by op: a cast, the largest, a difference, its exponential and their sum;
# then a difference, its exponential, two products with numbers and a cast.
PLAIN_LOGIT_BYTES = (34.0, 44.0)


@dataclass(frozen=True)
class Execution:
    """What a framework does its own way.

    ``attention`` is the fused kernel whose curves are used (``autoplan.hardware.ATTENTION_KERNELS``).
    ``linear_dtype`` is the dtype in which linear layers multiply, but for the output layer; empty: theirs.
    ``fuses_pointwise``: chains of pointwise ops run as one kernel. ``passes`` gives, for an op by name, the
    bytes moved per element of its first input, forward and backward. ``gradient_bytes_per_parameter`` are
    moved each micro-batch to add a gradient up, beyond what the product writes; None: this runtime's.
    ``gathered_copies`` are moved per byte of a ZeRO-3 weight on each gather, to take it out of its buffer.
    ``reduced_bytes_per_parameter`` is the width in which gradients are reduced; None: as they are kept.
    ``overlaps_gradients``: the reduction runs beside the last micro-batch's backward, and the new weights
    (ZeRO 1 and 2) are gathered beside the first forward. ``overlaps_tp``: tensor-parallel collectives run
    in tp pieces beside the products they feed. ``optimizer_passes`` multiplies the traffic of one fused
    update. ``keeping``: what stays in memory. ``logit_bytes`` move for a logit, forward and backward, of an
    output layer that is fused with its loss.
    """

    attention: str = "flash2"
    fuses_pointwise: bool = False
    linear_dtype: str = ""
    passes: Mapping[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    gradient_bytes_per_parameter: float | None = None
    gathered_copies: float = 2.0
    reduced_bytes_per_parameter: float | None = None
    overlaps_gradients: bool = True
    overlaps_tp: bool = False
    optimizer_passes: float = 1.0
    keeping: Keeping = EAGER_KEEPING
    logit_bytes: tuple[float, float] = FUSED_LOGIT_BYTES


EAGER = Execution()
