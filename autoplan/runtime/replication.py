"""A rank's place in the mesh in, the ranks that hold copies of its parameters out: :class:`Replicas`.

Over them gradients are averaged and ZeRO shards are cut. With ZeRO groups smaller than all of them (HSDP)
a shard lies in a group of adjacent replicas, which share a node where they can, and every group has all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from autoplan.errors import BadPlanError
from autoplan.runtime.ranks import Ranks, members, own_group
from autoplan_passes.placements import parse_placement


@dataclass(frozen=True)
class Replicas:
    """The ranks with copies of the same parameters, seen from one of them.

    ``group`` holds all ``size`` of them, ``shard_group`` the ``shards`` that ZeRO shares one copy among,
    ``across`` those with the same shard in every group (None: there is one group). Summed gradients are
    divided by ``divisor``. ``mesh`` is that of sharded parameters, its last dim the shard group.
    """

    group: dist.ProcessGroup
    shard_group: dist.ProcessGroup
    across: dist.ProcessGroup | None
    mesh: DeviceMesh
    size: int
    shards: int
    rank: int
    divisor: int

    @property
    def shard(self) -> int:
        """Which shard this rank holds."""
        return self.rank % self.shards

    @property
    def holds_sums(self) -> bool:
        """Whether the gradients here are sums over the tokens of more ranks than hold copies (experts)."""
        return self.divisor != self.size

    @property
    def is_first(self) -> bool:
        """Whether no replica before this one holds the same whole parameters."""
        return self.rank == 0

    @property
    def is_first_of_shard(self) -> bool:
        """Whether no replica before this one holds the same shards."""
        return self.rank < self.shards

    def placements(self, dim: int) -> tuple[Placement, ...]:
        """Those of a parameter sharded along ``dim`` on ``mesh``."""
        return (Shard(dim),) if self.across is None else (Replicate(), Shard(dim))


def join_replicas(ranks: Ranks, zero_shard: int = 0) -> dict[str, Replicas]:
    """Replicas of dense parameters (``replicas``) and of experts (``expert_replicas``; *collective*).

    ``zero_shard`` dense replicas share one copy of what ZeRO shards, 0: all of them.
    """
    return {
        name: _join(ranks, name, _shards(ranks, name, zero_shard))
        for name in ("replicas", "expert_replicas")
        if name in ranks.extra
    }


def replicas_of(placement: str, replicas: Mapping[str, Replicas]) -> Replicas:
    """The replicas of a parameter that is so placed: those of its experts, or of all that is no expert's."""
    by_expert = parse_placement(placement).by_expert
    return replicas["expert_replicas" if by_expert else "replicas"]


def shard_dim(shape: torch.Size, shards: int) -> int:
    """The dim along which a parameter is sharded: the first that divides, else the first (then uneven)."""
    return next((dim for dim, size in enumerate(shape) if size and size % shards == 0), 0)


def _shards(ranks: Ranks, name: str, zero_shard: int) -> int:
    size = dist.get_world_size(ranks.group(name))
    if not zero_shard:
        return size
    shape = ranks.shape
    if shape.replicas % zero_shard:
        raise BadPlanError(
            f"zero_shard = {zero_shard} does not divide the {shape.replicas} replicas (dp x cp) of the mesh "
            f"{shape}. Search again: autoplan search MODEL.py --pin zero_shard=N"
        )
    return zero_shard if name == "replicas" else max(1, zero_shard // shape.ep)


def _join(ranks: Ranks, name: str, shards: int) -> Replicas:
    group = ranks.group(name)
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    dense = dist.get_world_size(ranks.group("replicas"))
    if shards == size:
        mesh = DeviceMesh.from_group(group, ranks.device.type, mesh_dim_names=("shard",))
        return Replicas(group, group, None, mesh, size, shards, rank, dense)
    places = members(ranks.shape, name).view(-1, size // shards, shards)
    shard_group = own_group(places.reshape(-1, shards))
    across = own_group(places.transpose(1, 2).reshape(-1, size // shards))
    own = torch.tensor(dist.get_process_group_ranks(group)).view(size // shards, shards)
    names = ("across", "shard")
    mesh = DeviceMesh.from_group([across, shard_group], ranks.device.type, own, mesh_dim_names=names)
    return Replicas(group, shard_group, across, mesh, size, shards, rank, dense)
