"""The mesh of a plan in, this process's place in it out: process groups, coordinates, device.

Rank = (pp * dp_size + dp) * tp_size + tp, as in :class:`autoplan.plan.Mesh`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoplan.errors import BadPlanError
from autoplan.plan import AXES, Mesh


@dataclass(frozen=True)
class Ranks:
    """This process in the plan's mesh; ``pp``, ``dp``, ``tp`` are its coordinates."""

    shape: Mesh
    mesh: DeviceMesh
    device: torch.device
    rank: int
    pp: int
    dp: int
    tp: int

    def group(self, axis: str) -> dist.ProcessGroup:
        return self.mesh.get_group(axis)

    def rank_at(self, *, pp: int | None = None, dp: int | None = None, tp: int | None = None) -> int:
        """Global rank at these coordinates, this process's own where not given."""
        stage, replica, piece = (self.pp if pp is None else pp), (self.dp if dp is None else dp), tp
        return (stage * self.shape.dp + replica) * self.shape.tp + (self.tp if piece is None else piece)


def join_ranks(shape: Mesh) -> Ranks:
    """Bring up the process groups if the launcher's environment is there, and lay the mesh over them."""
    device = local_device()
    _initialise(shape, device)
    world = dist.get_world_size()
    if world != shape.devices:
        raise BadPlanError(
            f"Expected {shape.devices} processes for the plan's mesh "
            f"pp {shape.pp} x dp {shape.dp} x tp {shape.tp}, found {world}.\n{launch_line(shape)}"
        )
    mesh = init_device_mesh(device.type, (shape.pp, shape.dp, shape.tp), mesh_dim_names=AXES)
    pp, dp, tp = mesh.get_coordinate() or (0, 0, 0)
    return Ranks(shape, mesh, device, dist.get_rank(), pp, dp, tp)


def launch_line(shape: Mesh) -> str:
    """What to type to start as many processes as the mesh needs, on one host."""
    return f"Launch with: torchrun --nproc-per-node {shape.devices} TRAIN_SCRIPT.py"


def local_device() -> torch.device:
    """The accelerator of this process (``LOCAL_RANK``), or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def _initialise(shape: Mesh, device: torch.device) -> None:
    if dist.is_initialized():
        return
    backend = "gloo" if device.type == "cpu" else "nccl"
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
    """The group of the given stages' ranks at this process's (dp, tp); every rank must call this.

    None where this process is on none of the stages.
    """
    shape = ranks.shape
    if len(stages) == shape.pp:
        return ranks.group("pp")
    groups = [
        [ranks.rank_at(pp=stage, dp=dp, tp=tp) for stage in stages]
        for dp in range(shape.dp)
        for tp in range(shape.tp)
    ]
    own, _ = dist.new_subgroups_by_enumeration(groups)
    return own if isinstance(own, dist.ProcessGroup) and ranks.pp in stages else None
