"""A parallel model and a folder of safetensors in; every rank's pieces read, or the whole written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from autoplan.errors import BadInputError
from autoplan.runtime.blocks import pieces_of
from autoplan.runtime.checkpoint import put_buffers
from autoplan.runtime.pretrained import named_sources, source_for, write_pretrained
from autoplan.runtime.safetensors_files import open_safetensors
from autoplan.runtime.sources import Box, Source

if TYPE_CHECKING:
    from autoplan.runtime.parallel import ParallelModel

REMEMBERED = 2  # parameters kept whole while what is stored of them is written piece by piece


def load_pretrained(run: ParallelModel, folder: Path) -> int:
    """See :meth:`ParallelModel.load_pretrained`; returns the bytes that this rank has read."""
    stored = open_safetensors(folder)
    sources = named_sources(stored, run.library)
    aliases: dict[str, list[str]] = {}
    for alias, name in run.state_names.items():
        aliases.setdefault(name, []).append(alias)
    for owned in run.owned:
        name = owned.home.name
        shape = run.program.parameters[name].shape
        source = source_for(name, aliases.get(name, []), sources, folder)
        if tuple(source.shape) != tuple(shape):
            raise BadInputError(
                f"{folder} has {name} of shape {list(source.shape)}, the model's has {list(shape)}: its "
                "weights are another model's."
            )
        for block, view in pieces_of(owned, shape, run.ranks).views():
            with torch.no_grad():
                view.copy_(source.read(_box(block.offsets, block.sizes)))
    for name, value in run.plain_state.items():
        if name in sources:
            value.copy_(sources[name].whole())
    put_buffers(run)
    run.pretrained_from = folder
    return stored.bytes_read


def save_pretrained(run: ParallelModel, folder: Path, like: Path | None) -> None:
    """See :meth:`ParallelModel.save_pretrained` (*collective*)."""
    like = like or run.pretrained_from
    gathered = _Gathered(run)
    names = run.state_names if like is not None else {name: name for name in run.state_names.values()}
    state: dict[str, Source] = {alias: _Parameter(gathered, name) for alias, name in names.items()}
    dtypes = {alias: run.dtype_of(name) for alias, name in names.items()}
    write_pretrained(folder, state, dtypes, run.library, like, write=run.rank == 0)


class _Gathered:
    """Whole parameters from all ranks, the last few remembered (*collective*)."""

    def __init__(self, run: ParallelModel) -> None:
        self.run = run
        self.kept: dict[str, torch.Tensor] = {}

    def whole(self, name: str) -> torch.Tensor:
        if name not in self.kept:
            while len(self.kept) >= REMEMBERED:
                self.kept.pop(next(iter(self.kept)))
            self.kept[name] = self.run.whole_state(name)
        return self.kept[name]


class _Parameter(Source):
    """A parameter or buffer of the model by its first name."""

    def __init__(self, gathered: _Gathered, name: str) -> None:
        self.gathered, self.name = gathered, name
        run = gathered.run
        known: Mapping[str, torch.Tensor] = run.plain_state
        shape = known[name].shape if name in known else run.program.parameters[name].shape
        self.shape = torch.Size(shape)

    def read(self, box: Box) -> torch.Tensor:
        return self.gathered.whole(self.name)[box]


def _box(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Box:
    return tuple(slice(start, start + size) for start, size in zip(offsets, sizes))
