"""The gradients of one rank, averaged over its replicas, in; gradients every rank agrees on out.

Two things are left to do then: the sum over the places where a tied parameter lives, and one norm for the
whole model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from autoplan.runtime.prepare import Home
from autoplan.runtime.ranks import Ranks
from autoplan.runtime.replication import Replicas
from autoplan.runtime.weights import local_of
from autoplan_passes.placements import Placement, parse_placement


@dataclass(frozen=True)
class Owned:
    """A parameter as the optimizer updates it on this rank, the home it has here, and its replicas."""

    home: Home
    parameter: nn.Parameter
    replicas: Replicas

    @property
    def placement(self) -> Placement:
        return parse_placement(self.home.placement)


@dataclass(frozen=True)
class TiedParameter:
    """A parameter with several homes: all of them, the storages here (one where they are placed alike and not
    sharded), and the group of the pipeline ranks that have one (None: this rank alone)."""

    homes: tuple[Home, ...]
    owned: tuple[Owned, ...]
    group: dist.ProcessGroup | None
    kept: list[torch.Tensor | None] = field(default_factory=list[torch.Tensor | None])

    @property
    def placed_alike(self) -> bool:
        return len({home.placement for home in self.homes}) == 1


def set_aside(tied: Iterable[TiedParameter]) -> None:
    """Before a step: put gradients of tied parameters aside, so that only new ones are summed over homes."""
    for parameter in tied:
        parameter.kept[:] = [owned.parameter.grad for owned in parameter.owned]
        for owned in parameter.owned:
            owned.parameter.grad = None


def sum_over_homes(tied: Iterable[TiedParameter], ranks: Ranks) -> None:
    """After a step: every home of a tied parameter gets the sum of all homes' gradients."""
    for parameter in tied:
        if parameter.owned:
            (_sum_alike if parameter.placed_alike else _sum_whole)(parameter, ranks)
            for owned, kept in zip(parameter.owned, parameter.kept):
                if kept is not None and owned.parameter.grad is not None:
                    owned.parameter.grad += kept
        parameter.kept.clear()


def _sum_alike(tied: TiedParameter, ranks: Ranks) -> None:
    places = [local_of(_gradient(owned.parameter)) for owned in tied.owned]
    total = places[0] if len(places) == 1 else torch.stack(places).sum(0)
    if tied.group is not None:
        dist.all_reduce(total, group=tied.group)
    for place in places:
        if place is not total:
            place.copy_(total)


def _sum_whole(tied: TiedParameter, ranks: Ranks) -> None:
    total = sum(whole_tensor(_gradient(owned.parameter), owned.placement, ranks) for owned in tied.owned)
    assert isinstance(total, torch.Tensor)
    if tied.group is not None:
        dist.all_reduce(total, group=tied.group)
    for owned in tied.owned:
        store_whole(_gradient(owned.parameter), total, owned.placement, ranks)


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def store_whole(place: torch.Tensor, whole: torch.Tensor, placement: Placement, ranks: Ranks) -> None:
    """Write this rank's piece of a whole tensor into a parameter or gradient."""
    store_local(place, placement.cut(whole, ranks.places).contiguous())


def store_local(place: torch.Tensor, piece: torch.Tensor) -> None:
    """Write this rank's piece into ``place``, of which this replica may hold a shard alone."""
    if isinstance(place, DTensor):
        (dim,) = (p.dim for p in place.placements if isinstance(p, Shard))
        shards, own = place.device_mesh.size(-1), place.device_mesh.get_local_rank(-1)
        pieces = piece.chunk(shards, dim)
        if own < len(pieces):
            place.to_local().copy_(pieces[own])
    else:
        place.copy_(piece)


def whole_tensor(value: torch.Tensor, placement: Placement, ranks: Ranks) -> torch.Tensor:
    """This rank's piece to the whole tensor: gathered over replicas (ZeRO shards), tp and ep. Collective."""

    def gather(piece: torch.Tensor, axis: str) -> list[torch.Tensor]:
        size = ranks.places[axis][1]
        pieces = [torch.empty_like(piece, memory_format=torch.contiguous_format) for _ in range(size)]
        dist.all_gather(pieces, piece.contiguous(), group=ranks.group(axis))
        return pieces

    local = value.full_tensor() if isinstance(value, DTensor) else value.clone()
    return placement.join(local, gather)


def global_norm(owned: Iterable[Owned], first_homes: frozenset[Home], ranks: Ranks) -> torch.Tensor:
    """The 2-norm of all gradients of the model, each parameter counted once over all axes and ties."""
    squares: list[torch.Tensor] = []
    for item in owned:
        gradient = item.parameter.grad
        if gradient is None or item.home not in first_homes:
            continue
        sharded = isinstance(gradient, DTensor)
        first = item.replicas.is_first_of_shard if sharded else item.replicas.is_first
        held = item.placement.on("tp")
        if first and (ranks.tp % held.copies == 0 if held.is_shard else ranks.tp == 0):
            squares.append(_square_sum(local_of(gradient)))
    total = torch.stack(squares).sum() if squares else torch.zeros((), device=ranks.device)
    total = total.to(torch.float64)
    dist.all_reduce(total)
    return total.sqrt()


def _square_sum(value: torch.Tensor) -> torch.Tensor:
    wide = value if value.dtype == torch.float64 else value.float()
    return wide.square().sum()


def scale_gradients(parameters: Iterable[nn.Parameter], factor: torch.Tensor) -> None:
    """Multiply every gradient in place."""
    for parameter in parameters:
        if parameter.grad is not None:
            local = local_of(parameter.grad)
            local.mul_(factor.to(local.dtype))
