"""Bytes a parameter costs while training: weight, gradient, master weight, optimizer moments.

Comes in: parameter counts, dtype policy, optimizer, ZeRO stage and how many replicas share one copy. Goes
out: named bytes on one device. ZeRO divides optimizer state (1), gradients (2) and weights (3) by that
number: Rajbhandari et al., "ZeRO", arXiv 1910.02054, section 3.1 and figure 1. Gradients are added up over
micro-batches in fp32, as the runtime does (and Megatron-LM's main gradients), and what the optimizer
updates is in fp32 too: mixed-precision Adam costs 2 + 4 + 4 + 4 + 4 bytes a parameter, of which ZeRO-3
needs no weight beside the fp32 one: 16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from autoplan.errors import BadInputError

Entry = TypeVar("Entry")


@dataclass(frozen=True)
class DtypePolicy:
    """Bytes per element of each kind of state; ``moment`` is per moment of the optimizer.

    ``gradient`` is that of one backward, ``accumulated`` that of the sum over micro-batches, in which
    gradients are reduced between replicas.
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
    """Bytes on one device.

    ``weights`` compute (under ZeRO-3: what is not trained), ``master`` is what the optimizer updates where
    that is another copy; ``updated_gradients`` are those that it reads.
    """

    weights: float
    gradients: float
    master: float
    moments: float
    updated_gradients: float

    def __add__(self, other: StateBytes) -> StateBytes:
        return StateBytes(
            self.weights + other.weights,
            self.gradients + other.gradients,
            self.master + other.master,
            self.moments + other.moments,
            self.updated_gradients + other.updated_gradients,
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
        return 2 * self.updated_gradients + 2 * self.master + 2 * self.moments + weights


def state_bytes(
    parameter_bytes: float,
    trainable_numel: float,
    *,
    dtype: str,
    optimizer: str,
    zero: int = 0,
    shards: int = 1,
) -> StateBytes:
    """State of parameters that take ``parameter_bytes`` (after tp), ``trainable_numel`` of them trained.

    zero: 0 nothing divided by ``shards``, 1 what the optimizer has, 2 gradients too, 3 weights too. (ZeRO-2
    keeps shards of everything and, for the step, gathered weights.) Raises BadInputError for an unknown
    dtype or optimizer, or a zero outside 0..3.
    """
    policy = _lookup(POLICIES, dtype, "--dtype")
    moments = _lookup(MOMENTS, optimizer, "--optimizer")
    if zero not in (0, 1, 2, 3):
        raise BadInputError(f"zero = {zero}: expected 0, 1, 2 or 3; type --pin zero=3 for full sharding.")
    own = trainable_numel / (shards if zero else 1)
    frozen = max(0.0, parameter_bytes - policy.weight * trainable_numel)
    weights = {2: parameter_bytes + frozen / shards, 3: frozen / shards}.get(zero, parameter_bytes)
    gradients = policy.accumulated * (own if zero >= 2 else trainable_numel)
    return StateBytes(
        weights=weights,
        gradients=gradients,
        master=(policy.master or (policy.weight if zero else 0)) * own,
        moments=moments * policy.moment * own,
        updated_gradients=policy.accumulated * own,
    )


def gradient_bytes(trainable_numel: float, dtype: str) -> float:
    """Bytes of whole gradients as they are added up and reduced."""
    return _lookup(POLICIES, dtype, "--dtype").accumulated * trainable_numel


def backward_gradient_bytes(trainable_numel: float, dtype: str) -> float:
    """Bytes of whole gradients as one backward makes them."""
    return _lookup(POLICIES, dtype, "--dtype").gradient * trainable_numel


def weight_bytes(numel: float, dtype: str) -> float:
    """Bytes of whole weights as they compute and are gathered."""
    return _lookup(POLICIES, dtype, "--dtype").weight * numel


def unit_gradient_bytes(trainable_numel: float, dtype: str) -> float:
    """Whole gradients of an FSDP2 unit: while one unit's come in, another's are on their way in the precision
    of the sum; on average over the two."""
    policy = _lookup(POLICIES, dtype, "--dtype")
    return (policy.gradient + policy.accumulated) / 2 * trainable_numel


def _lookup(table: dict[str, Entry], key: str, option: str) -> Entry:
    if key not in table:
        raise BadInputError(f"{option} {key}: expected one of {', '.join(table)}.")
    return table[key]
