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


@dataclass
class Trained:
    """A parameter of the stage (``computing``) and the one the optimizer has for it (``updated``).

    ``dim`` is the dim along which ``updated`` is a shard, -1 where it is whole. ``total`` sums this
    step's gradients of ``computing`` where those of ``updated`` are others; ``kept`` are gradients of
    earlier steps that would not come out of a mean over the replicas as they were.
    """

    computing: nn.Parameter
    updated: nn.Parameter
    replicas: Replicas
    dim: int = -1
    total: torch.Tensor | None = None
    kept: torch.Tensor | None = None

    @property
    def is_itself(self) -> bool:
        return self.updated is self.computing

    @property
    def gradient(self) -> torch.Tensor | None:
        """The sum of this step's gradients on this rank, None where none came."""
        return self.computing.grad if self.is_itself else self.total

    def collect(self) -> None:
        """Move a new gradient of ``computing`` into the total, in the precision of ``updated``."""
        gradient = self.computing.grad
        if self.is_itself or gradient is None:
            return
        if self.total is None:
            self.total = gradient.to(self.updated.dtype)
        else:
            self.total += gradient
        self.computing.grad = None

    def set_aside(self) -> None:
        """Before a step: gradients of earlier ones are equal on all replicas, and a mean over them keeps
        them; but a sum over more ranks' tokens is divided by more."""
        if self.is_itself:
            if self.replicas.holds_sums:
                self.kept, self.computing.grad = self.computing.grad, None
        elif self.dim < 0 and not self.replicas.holds_sums:
            self.total, self.updated.grad = self.updated.grad, None

    def restore(self) -> None:
        """After a step: what was kept is added to the mean."""
        if self.kept is not None:
            gradient = self.computing.grad
            self.computing.grad = self.kept if gradient is None else self.kept + gradient
            self.kept = None

    def give(self, gradient: torch.Tensor) -> None:
        """Add a whole reduced gradient, or the local shard of one, to that of ``updated``."""
        if self.is_itself:
            return
        self.total = None
        given = gradient if self.dim < 0 else as_shard(gradient, self)
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
    trained = Trained(parameter, parameter, replicas, dim)
    piece = own_piece(exact.detach(), dim, replicas).to(parameter.device, copy=True).contiguous()
    trained.updated = nn.Parameter(as_shard(piece, trained))
    return trained


def own_piece(whole: torch.Tensor, dim: int, replicas: Replicas) -> torch.Tensor:
    """What this replica holds of a tensor that ZeRO shards along ``dim``."""
    pieces = whole.chunk(replicas.shards, dim)
    return pieces[replicas.shard] if replicas.shard < len(pieces) else whole.narrow(dim, 0, 0)


def as_shard(piece: torch.Tensor, trained: Trained) -> DTensor:
    """A local piece as a shard of a tensor like ``trained.computing``."""
    replicas, like = trained.replicas, trained.computing
    return DTensor.from_local(
        piece,
        replicas.mesh,
        replicas.placements(trained.dim),
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def local_of(value: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor, sharded or whole."""
    return value.to_local() if isinstance(value, DTensor) else value
