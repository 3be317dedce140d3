"""Bytes a parameter costs while training: weight, gradient, master weight, optimizer moments.

Comes in: parameter counts, dtype policy, optimizer, ZeRO stage and data-parallel degree. Goes out: named
bytes on one device. Mixed-precision Adam costs 2 + 2 + 4 + 4 + 4 = 16 bytes a parameter, and ZeRO
divides optimizer state (1), gradients (2) and weights (3) by the degree: Rajbhandari et al., "ZeRO",
arXiv 1910.02054, section 3.1 and figure 1. Whole gradients (ZeRO 0 and 1) are added up over micro-batches in
fp32, as the runtime does (and Megatron-LM's main gradients): 2 bytes more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from autoplan.errors import BadInputError

Entry = TypeVar("Entry")


@dataclass(frozen=True)
class DtypePolicy:
    """Bytes per element of each kind of state; ``moment`` is per moment of the optimizer.

    ``gradient`` is that of a sharded gradient (FSDP2 keeps the weight's dtype), ``accumulated`` that of a
    whole one, which is added up over micro-batches.
    """

    weight: int
    gradient: int
    accumulated: int
    master: int
    moment: int


# bf16: model.to(bf16) with fp32 master weights and moments. bf16-pure: everything in bf16.
POLICIES: dict[str, DtypePolicy] = {
    "fp64": DtypePolicy(8, 8, 8, 0, 8),
    "fp32": DtypePolicy(4, 4, 4, 0, 4),
    "bf16": DtypePolicy(2, 2, 4, 4, 4),
    "fp16": DtypePolicy(2, 2, 4, 4, 4),
    "bf16-pure": DtypePolicy(2, 2, 2, 0, 2),
}
MOMENTS: dict[str, int] = {"adamw": 2, "adam": 2, "sgd": 0, "sgd-momentum": 1, "lion": 1, "adagrad": 1}


@dataclass(frozen=True)
class StateBytes:
    """Bytes on one device."""

    weights: float
    gradients: float
    master: float
    moments: float

    def __add__(self, other: StateBytes) -> StateBytes:
        return StateBytes(
            self.weights + other.weights,
            self.gradients + other.gradients,
            self.master + other.master,
            self.moments + other.moments,
        )

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.master + self.moments

    @property
    def optimizer_traffic(self) -> float:
        """Bytes an update moves: read gradients, read and write master and moments, write weights.

        One fused pass, as ``torch.optim.AdamW(fused=True)`` makes, and one more read of the gradients
        for the global norm. Without master weights the weights are read as well.
        """
        weights = self.weights if self.master else 2 * self.weights
        return 2 * self.gradients + 2 * self.master + 2 * self.moments + weights


def state_bytes(
    parameter_bytes: float,
    trainable_numel: float,
    *,
    dtype: str,
    optimizer: str,
    zero: int = 0,
    dp: int = 1,
) -> StateBytes:
    """State of parameters that take ``parameter_bytes`` (after tp), ``trainable_numel`` of them trained.

    zero: 0 nothing divided by dp, 1 master weights and moments, 2 gradients too, 3 weights too.
    Raises BadInputError for an unknown dtype or optimizer, or a zero outside 0..3.
    """
    policy = _lookup(POLICIES, dtype, "--dtype")
    moments = _lookup(MOMENTS, optimizer, "--optimizer")
    if zero not in (0, 1, 2, 3):
        raise BadInputError(f"zero = {zero}: expected 0, 1, 2 or 3; type --pin zero=3 for full sharding.")
    return StateBytes(
        weights=parameter_bytes / (dp if zero >= 3 else 1),
        gradients=gradient_bytes(trainable_numel, dtype, zero) / (dp if zero >= 2 else 1),
        master=policy.master * trainable_numel / (dp if zero >= 1 else 1),
        moments=moments * policy.moment * trainable_numel / (dp if zero >= 1 else 1),
    )


def gradient_bytes(trainable_numel: float, dtype: str, zero: int) -> float:
    """Bytes of the gradients of ``trainable_numel`` parameters before any sharding, as they are reduced."""
    policy = _lookup(POLICIES, dtype, "--dtype")
    return (policy.gradient if zero >= 2 else policy.accumulated) * trainable_numel


def _lookup(table: dict[str, Entry], key: str, option: str) -> Entry:
    if key not in table:
        raise BadInputError(f"{option} {key}: expected one of {', '.join(table)}.")
    return table[key]
