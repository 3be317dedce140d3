"""The mesh of a plan in, this process's place in it out: process groups, coordinates, device.

Rank = ((pp * dp_size + dp) * cp_size + cp) * tp_size + tp, as in :class:`autoplan.plan.Mesh`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoplan.errors import BadPlanError
from autoplan.plan import AXES, Mesh
from autoplan.runtime.devices import collective_backend, local_device


@dataclass(frozen=True)
class Ranks:
    """This process in the plan's mesh; ``pp``, ``dp``, ``cp``, ``tp`` are its coordinates.

    ``extra`` holds the groups that are no axis of the mesh: ``replicas`` (dp x cp), ``ep`` and
    ``expert_replicas`` (the ranks with the same experts).
    """

    shape: Mesh
    mesh: DeviceMesh
    device: torch.device
    rank: int
    pp: int
    dp: int
    cp: int
    tp: int
    extra: Mapping[str, dist.ProcessGroup]

    @property
    def replica(self) -> int:
        """This process's number among the ranks that hold the same dense parameters."""
        return self.dp * self.shape.cp + self.cp

    @property
    def places(self) -> dict[str, tuple[int, int]]:
        """This process's number, and how many there are, on every axis that cuts parameters."""
        return {"ep": (self.dp % self.shape.ep, self.shape.ep), "tp": (self.tp, self.shape.tp)}

    @property
    def region_axes(self) -> list[str]:
        """The axes that collectives inside a region may name."""
        return ["cp", "tp", *(["ep"] if self.shape.ep > 1 else [])]

    def group(self, axis: str) -> dist.ProcessGroup:
        """The group of an axis, or of ``replicas``, ``ep``, ``expert_replicas``."""
        return self.extra[axis] if axis in self.extra else self.mesh.get_group(axis)

    def rank_at(self, **coordinates: int) -> int:
        """Global rank at these coordinates (``pp=``, ``dp=``, ``cp=``, ``tp=``), this process's own where not
        given."""
        rank = 0
        for axis in AXES:
            rank = rank * getattr(self.shape, axis) + coordinates.get(axis, getattr(self, axis))
        return rank


def join_ranks(shape: Mesh) -> Ranks:
    """Bring up the process groups if the launcher's environment is there, and lay the mesh over them."""
    device = local_device()
    _initialise(shape, device)
    world = dist.get_world_size()
    if world != shape.devices:
        raise BadPlanError(
            f"Expected {shape.devices} processes for the plan's mesh "
            f"{shape}, found {world}.\n{launch_line(shape)}"
        )
    sizes = tuple(getattr(shape, axis) for axis in AXES)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=AXES)
    place = mesh.get_coordinate() or [0] * len(AXES)
    return Ranks(shape, mesh, device, dist.get_rank(), *place, extra=_extra_groups(shape))


def members(shape: Mesh, name: str) -> torch.Tensor:
    """The ranks of every group of a kind, a row each: ``replicas``, ``ep`` or ``expert_replicas``."""
    outer = shape.dp // shape.ep
    ranks = torch.arange(shape.devices).view(shape.pp, outer, shape.ep, shape.cp, shape.tp)
    if name == "replicas":
        return ranks.permute(0, 4, 1, 2, 3).reshape(-1, shape.replicas)
    if name == "ep":
        return ranks.permute(0, 1, 3, 4, 2).reshape(-1, shape.ep)
    return ranks.permute(0, 2, 4, 1, 3).reshape(-1, outer * shape.cp)


def own_group(groups: torch.Tensor) -> dist.ProcessGroup:
    """Make a group of every row of ranks, which together are all ranks; this process's (*collective*)."""
    own, _ = dist.new_subgroups_by_enumeration(groups.tolist())
    assert isinstance(own, dist.ProcessGroup)  # every rank is in one of the groups
    return own


def _extra_groups(shape: Mesh) -> dict[str, dist.ProcessGroup]:
    """Groups over several axes, or over a part of one; every rank makes all of them in the same order."""
    wanted = ["replicas", *(["ep", "expert_replicas"] if shape.ep > 1 else [])]
    return {name: own_group(members(shape, name)) for name in wanted}


def launch_line(shape: Mesh) -> str:
    """What to type to start as many processes as the mesh needs, on one host."""
    return f"Launch with: torchrun --nproc-per-node {shape.devices} TRAIN_SCRIPT.py"


def _initialise(shape: Mesh, device: torch.device) -> None:
    if dist.is_initialized():
        return
    backend = collective_backend(device)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)
    elif shape.devices == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    else:
        raise BadPlanError(
            f"The plan runs on {shape.devices} processes, but this one was started alone "
            f"(RANK and WORLD_SIZE are not set).\n{launch_line(shape)}"
        )


def tied_group(ranks: Ranks, stages: Sequence[int]) -> dist.ProcessGroup | None:
    """The group of the given stages' ranks at this process's (dp, cp, tp); every rank must call this.

    None where this process is on none of the stages.
    """
    shape = ranks.shape
    if len(stages) == shape.pp:
        return ranks.group("pp")
    groups = [
        [ranks.rank_at(pp=stage, dp=dp, cp=cp, tp=tp) for stage in stages]
        for dp in range(shape.dp)
        for cp in range(shape.cp)
        for tp in range(shape.tp)
    ]
    own, _ = dist.new_subgroups_by_enumeration(groups)
    return own if isinstance(own, dist.ProcessGroup) and ranks.pp in stages else None
