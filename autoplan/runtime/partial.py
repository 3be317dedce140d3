"""Gradients that each tp rank has of its own tokens in, their sums out, once a step.

A parameter stored R* is used on pieces of activations (a norm under sequence parallelism), so its gradient on
one rank is that of those pieces; one stored S(0)x2 is used for some of its query heads. Gradients of earlier
steps are sums already: they are kept apart meanwhile.
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
    """The parameters of one rank that are stored R*, or as neighbours have them too, from step to step."""

    def __init__(self, owned: Iterable[Owned], ranks: Ranks) -> None:
        size = ranks.places["tp"][1]
        lies = {o.parameter: o.placement.on("tp") for o in owned}
        # In how many pieces the ranks of tp hold each.
        self._pieces = {
            parameter: state.ways(size)
            for parameter, state in lies.items()
            if state == REPLICATE_PARTIAL_GRADIENT or state.copies > 1
        }
        self._parameters = list(self._pieces)
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
            places = [self._laid_out(parameter) for parameter in bucket]
            flat = torch.cat([place.flatten() for place in places])
            dist.all_reduce(flat, group=self._ranks.group("tp"))
            for parameter, piece in zip(bucket, flat.split([place.numel() for place in places])):
                gradient, own = self._own(parameter)
                gradient.copy_(piece.view(self._pieces[parameter], -1)[own].view_as(gradient))
        for parameter, kept in zip(self._parameters, self._kept):
            if kept is not None:
                parameter.grad = kept if parameter.grad is None else parameter.grad + kept
        self._kept = []

    def _own(self, parameter: nn.Parameter) -> tuple[torch.Tensor, int]:
        """What this rank holds of a gradient, and which of its pieces that is."""
        assert parameter.grad is not None
        rank, size = self._ranks.places["tp"]
        return local_of(parameter.grad), rank * self._pieces[parameter] // size

    def _laid_out(self, parameter: nn.Parameter) -> torch.Tensor:
        """The pieces of a gradient side by side, zeros where other ranks have theirs."""
        gradient, own = self._own(parameter)
        if self._pieces[parameter] == 1:
            return gradient
        place = gradient.new_zeros(self._pieces[parameter], gradient.numel())
        place[own] = gradient.flatten()
        return place


def _buckets(parameters: Iterable[nn.Parameter]) -> Iterable[list[nn.Parameter]]:
    """Parameters with gradients, those of one dtype together."""
    filling: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is None:
            continue
        bucket = filling.setdefault(parameter.grad.dtype, [])
        bucket.append(parameter)
        if sum(other.numel() for other in bucket) >= BUCKET_ELEMENTS:
            yield filling.pop(parameter.grad.dtype)
    yield from filling.values()
