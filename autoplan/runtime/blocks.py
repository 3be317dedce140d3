"""How a parameter lies on the ranks in, the blocks of the user's whole tensor that this rank holds out.

A block is a box of the whole tensor and the slice of the rank's own piece that has its values. A piece can be
several boxes: of a fused query-key-value weight that tp cuts, a rank holds a box of every section.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.distributed.tensor import DTensor, Shard

from autoplan.runtime.gradients import Owned
from autoplan.runtime.ranks import Ranks
from autoplan.runtime.weights import local_of
from autoplan_passes.placements import Placement
from autoplan_passes.states import cut_tensor

NOT_THERE = -2  # the index of rows that only fill up the last piece; -1 would join with 0


@dataclass(frozen=True)
class Block:
    """A box of a whole tensor (``offsets``, ``sizes``) and where the local piece has it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local: tuple[slice, ...]


@dataclass(frozen=True)
class Pieces:
    """What this rank holds of one tensor of the user's model: its piece, and the blocks that make it."""

    shape: tuple[int, ...]
    piece: torch.Tensor
    blocks: tuple[Block, ...]

    def of(self, piece: torch.Tensor) -> Pieces:
        """Another tensor that lies the same way (a moment of the optimizer)."""
        return replace(self, piece=piece)

    def views(self) -> Iterator[tuple[Block, torch.Tensor]]:
        """Every block with its values, a view of the piece."""
        for block in self.blocks:
            yield block, self.piece[block.local]


def pieces_of(owned: Owned, shape: Sequence[int], ranks: Ranks) -> Pieces:
    """The blocks of a parameter whose whole shape is ``shape``."""
    indices = _indices(shape, owned.placement, ranks.places)
    parameter = owned.parameter.detach()
    if isinstance(parameter, DTensor):
        (dim,) = (p.dim for p in parameter.placements if isinstance(p, Shard))
        shards, own = parameter.device_mesh.size(-1), parameter.device_mesh.get_local_rank(-1)
        chunks = indices[dim].chunk(shards)
        indices[dim] = chunks[own] if own < len(chunks) else indices[dim][:0]
    return Pieces(tuple(shape), local_of(parameter), _blocks(indices))


def whole_pieces(tensor: torch.Tensor) -> Pieces:
    """A tensor that this rank holds whole."""
    shape = tuple(tensor.shape)
    return Pieces(shape, tensor, (Block((0,) * len(shape), shape, tuple(slice(0, n) for n in shape)),))


def _indices(
    shape: Sequence[int], placement: Placement, places: Mapping[str, tuple[int, int]]
) -> list[torch.Tensor]:
    """For every dim, which of the whole tensor's indices this rank's piece holds, in its order."""
    indices = [torch.arange(size) for size in shape]
    if placement.padded:
        rows, cut = placement.padded
        indices[0] = torch.cat([indices[0], torch.full((cut - rows,), NOT_THERE)])
    for axis, state in placement.states:
        if state.is_shard:
            indices[state.dim] = cut_tensor(indices[state.dim], replace(state, dim=0), *places[axis])
    return indices


def _blocks(indices: Sequence[torch.Tensor]) -> tuple[Block, ...]:
    runs = [_runs(held) for held in indices]
    return tuple(
        Block(
            tuple(start for start, _, _ in box),
            tuple(length for _, _, length in box),
            tuple(slice(at, at + length) for _, at, length in box),
        )
        for box in itertools.product(*runs)
    )


def _runs(held: torch.Tensor) -> list[tuple[int, int, int]]:
    """Consecutive indices: (first index, position in the piece, how many)."""
    if not held.numel():
        return []
    starts = [0, *((held.diff() != 1).nonzero().flatten() + 1).tolist(), held.numel()]
    return [(int(held[a]), a, b - a) for a, b in itertools.pairwise(starts) if held[a] != NOT_THERE]
