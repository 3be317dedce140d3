"""The parameters a stage computes with in, those that the optimizer updates out.

They are the same where nothing is rounded or sharded. In mixed precision the optimizer updates fp32 masters;
under ZeRO-1 it updates this replica's shard (fp32 in mixed precision) of the whole parameter that computes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoplan.runtime.replication import Replicas, shard_dim


@dataclass(frozen=True, eq=False)
class Trained:
    """A parameter of the stage (``computing``) and the one the optimizer has for it (``updated``).

    ``dim`` is the dim along which ``updated`` is a shard, -1 where it is whole.
    """

    computing: nn.Parameter
    updated: nn.Parameter
    replicas: Replicas
    dim: int = -1

    @property
    def is_itself(self) -> bool:
        return self.updated is self.computing

    def give(self, gradient: torch.Tensor) -> None:
        """Add a whole reduced gradient, or the local shard of one, to that of ``updated``."""
        given = gradient if self.dim < 0 else as_shard(gradient, self.computing, self.replicas, self.dim)
        if self.updated.grad is None:
            self.updated.grad = given
        else:
            self.updated.grad += given


def train_whole(parameter: nn.Parameter, exact: torch.Tensor, replicas: Replicas) -> Trained:
    """The optimizer updates the parameter itself, or a master with the values of ``exact``."""
    if exact.dtype == parameter.dtype:
        return Trained(parameter, parameter, replicas)
    master = nn.Parameter(exact.detach().to(parameter.device, copy=True).contiguous())
    return Trained(parameter, master, replicas)


def train_shard(parameter: nn.Parameter, exact: torch.Tensor, replicas: Replicas) -> Trained:
    """The optimizer updates this replica's shard of ``exact``, the parameter's values before rounding."""
    if not parameter.dim():  # a single number is not shared out
        return train_whole(parameter, exact, replicas)
    dim = shard_dim(parameter.shape, replicas.shards)
    piece = own_piece(exact.detach(), dim, replicas).to(parameter.device, copy=True).contiguous()
    return Trained(parameter, nn.Parameter(as_shard(piece, parameter, replicas, dim)), replicas, dim)


def own_piece(whole: torch.Tensor, dim: int, replicas: Replicas) -> torch.Tensor:
    """What this replica holds of a tensor that ZeRO shards along ``dim``."""
    pieces = whole.chunk(replicas.shards, dim)
    return pieces[replicas.shard] if replicas.shard < len(pieces) else whole.narrow(dim, 0, 0)


def as_shard(piece: torch.Tensor, like: torch.Tensor, replicas: Replicas, dim: int) -> DTensor:
    """A local piece as a shard of a tensor of the shape of ``like``."""
    mesh, placements = replicas.mesh, replicas.placements(dim)
    shape, stride = like.shape, like.stride()
    return DTensor.from_local(piece, mesh, placements, run_check=False, shape=shape, stride=stride)


def local_of(value: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor, sharded or whole."""
    return value.to_local() if isinstance(value, DTensor) else value
