"""A checkpoint of any plan and the model's file in, safetensors that transformers loads out; no ranks run."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from autoplan.capture import load_model_source
from autoplan.capture.build import DTYPES, build_fake
from autoplan.errors import BadInputError
from autoplan.runtime.blocks import Block, Pieces
from autoplan.runtime.distributed_files import checkpoint_contents, read_checkpoint
from autoplan.runtime.load import first_names
from autoplan.runtime.pretrained import library_of, write_pretrained
from autoplan.runtime.sources import Box, Source


class SavedTensor(Source):
    """A tensor of a checkpoint."""

    def __init__(self, checkpoint: Path, name: str, stored: TensorStorageMetadata) -> None:
        self.checkpoint, self.name = checkpoint, name
        self.shape, self.dtype = stored.size, stored.properties.dtype

    def read(self, box: Box) -> torch.Tensor:
        sizes = tuple(one.stop - one.start for one in box)
        block = Block(tuple(one.start for one in box), sizes, tuple(slice(0, size) for size in sizes))
        found = torch.empty(sizes, dtype=self.dtype)
        read_checkpoint(self.checkpoint, {self.name: Pieces(tuple(self.shape), found, (block,))}, [])
        return found


def convert_checkpoint(
    checkpoint: Path, model: Path, folder: Path, *, like: Path | None = None, dtype: str = ""
) -> int:
    """Write the weights of a checkpoint; returns how many tensors it has. ``dtype``: empty as it was saved.

    Raises BadInputError where the checkpoint is not of the model in ``model``.
    """
    contents = checkpoint_contents(checkpoint)
    fake = build_fake(load_model_source(model), "fp32").model
    names = first_names(fake)
    state: dict[str, Source] = {}
    dtypes: dict[str, torch.dtype] = {}
    for alias, name in names.items():
        stored = contents.get(f"model.{name}")
        if not isinstance(stored, TensorStorageMetadata):
            raise BadInputError(f"{checkpoint} has no {name}: it was saved for another model than {model}.")
        if like is not None or alias == name:
            state[alias] = SavedTensor(checkpoint, f"model.{name}", stored)
            floating = stored.properties.dtype.is_floating_point
            dtypes[alias] = DTYPES[dtype] if dtype and floating else stored.properties.dtype
    write_pretrained(folder, state, dtypes, library_of(fake), like)
    return len(state)
