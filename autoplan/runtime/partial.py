"""Gradients that each tp rank has of its own tokens in, their sums out, once a step.

A parameter stored R* is used on pieces of activations (a norm under sequence parallelism), so its gradient on
one rank is that of those pieces. Gradients of earlier steps are sums already: they are kept apart meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from autoplan.runtime.gradients import Owned
from autoplan.runtime.ranks import Ranks
from autoplan.runtime.weights import local_of
from autoplan_passes.states import REPLICATE_PARTIAL_GRADIENT

BUCKET_ELEMENTS = 40_000_000


class PartialGradients:
    """The parameters of one rank that are stored R*, from step to step."""

    def __init__(self, owned: Iterable[Owned], ranks: Ranks) -> None:
        partial = [o.parameter for o in owned if o.placement.on("tp") == REPLICATE_PARTIAL_GRADIENT]
        self._parameters = list(dict.fromkeys(partial))
        self._ranks = ranks
        self._kept: list[torch.Tensor | None] = []

    def begin(self) -> None:
        """Before the first micro-batch of a step: put aside what is summed already."""
        self._kept = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None

    def finish(self) -> None:
        """After the replicas' mean: sum the new gradients over tp, and add what was put aside."""
        for bucket in _buckets(self._parameters):
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            dist.all_reduce(flat, group=self._ranks.group("tp"))
            for gradient, piece in zip(bucket, flat.split([gradient.numel() for gradient in bucket])):
                gradient.copy_(piece.view_as(gradient))
        for parameter, kept in zip(self._parameters, self._kept):
            if kept is not None:
                parameter.grad = kept if parameter.grad is None else parameter.grad + kept
        self._kept = []


def _buckets(parameters: Iterable[nn.Parameter]) -> Iterable[list[torch.Tensor]]:
    """What this rank holds of the gradients, those of one dtype together."""
    filling: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is None:
            continue
        gradient = local_of(parameter.grad)
        bucket = filling.setdefault(gradient.dtype, [])
        bucket.append(gradient)
        if sum(other.numel() for other in bucket) >= BUCKET_ELEMENTS:
            yield filling.pop(gradient.dtype)
    yield from filling.values()
