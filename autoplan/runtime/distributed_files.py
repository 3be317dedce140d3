"""The blocks that ranks hold in, a checkpoint of ``torch.distributed.checkpoint`` out, and back.

Tensors are stored by name with the shape of the user's own model, whatever the plan cut them into; any box of
them can be read. Copies of a block on several ranks are written once, by the rank with the least to write.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from autoplan.errors import BadInputError
from autoplan.runtime.blocks import Block, Pieces

METADATA = ".metadata"  # written last


def write_checkpoint(path: Path, tensors: Mapping[str, Pieces], objects: Mapping[str, Any]) -> None:
    """Write a checkpoint (*collective*): the blocks and the objects of every rank, an object from one."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / METADATA).unlink(missing_ok=True)  # one that is written over is none until it is whole again
    except OSError as error:
        raise BadInputError(f"cannot write the checkpoint {path}: {error.strerror}.") from None
    dist.barrier()
    dcp.save({**tensors, **objects}, checkpoint_id=path, planner=_Saving())


def read_checkpoint(path: Path, tensors: Mapping[str, Pieces], objects: list[str]) -> dict[str, Any]:
    """Fill the pieces from a checkpoint, and return the objects of these names (*collective*).

    What follows a ``#`` in a name tells pieces of the same stored tensor apart.
    """
    planner = _Loading(objects)
    with warnings.catch_warnings():
        # Outside a process group: "assuming the intent is to load in a single process", as it is.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninit")
        dcp.load({**tensors, **dict.fromkeys(objects)}, checkpoint_id=path, planner=planner)
    return planner.objects


def checkpoint_contents(path: Path) -> Mapping[str, TensorStorageMetadata | BytesStorageMetadata]:
    """What a checkpoint holds by name; BadInputError where ``path`` is none."""
    if not (path / METADATA).is_file():
        raise BadInputError(
            f"{path} is no checkpoint: expected a folder written by `.save()`, with a file .metadata (which "
            "is written last: a checkpoint that was cut off has none)."
        )
    return dcp.FileSystemReader(path).read_metadata().state_dict_metadata


def _chunk(block: Block) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(block.offsets), torch.Size(block.sizes))


class _Saving(DefaultSavePlanner):
    """Writes blocks as shards; the copies that other ranks have fall away in the global plan."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        items: list[WriteItem] = []
        for name, value in self.state_dict.items():
            if not isinstance(value, Pieces):
                items.append(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO))
                continue
            properties = TensorProperties.create_from_tensor(value.piece)
            for block in value.blocks:
                data = TensorWriteData(_chunk(block), properties, torch.Size(value.shape))
                index = MetadataIndex(name, torch.Size(block.offsets))
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        value = self.state_dict[write_item.index.fqn]
        if isinstance(value, Pieces):
            offsets = tuple(write_item.index.offset or ())
            return next(view for block, view in value.views() if block.offsets == offsets).contiguous()
        stream = io.BytesIO()
        torch.save(value, stream)
        return stream


class _Loading(DefaultLoadPlanner):
    """Reads, of every saved block, what lies in this rank's own."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.names = names
        self.objects: dict[str, Any] = {}
        self.pieces: dict[str, Pieces] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator
        self.pieces = {name: value for name, value in state_dict.items() if isinstance(value, Pieces)}

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None  # dcp.load has read it
        items: list[ReadItem] = []
        stored = self.metadata.state_dict_metadata
        for key, value in self.pieces.items():
            name = key.partition("#")[0]
            saved = stored[name]
            assert isinstance(saved, TensorStorageMetadata)  # names are checked before
            for item in create_read_items_for_chunk_list(name, saved, [_chunk(b) for b in value.blocks]):
                items.append(replace(item, dest_index=replace(item.dest_index, fqn=key)))
        none = torch.Size((0,))
        for name in self.names:
            index = MetadataIndex(name)
            items.append(ReadItem(LoadItemType.BYTE_IO, index, none, index, none, none))
        return LoadPlan(items)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.objects[read_item.dest_index.fqn] = torch.load(value, weights_only=False)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        pieces = self.pieces[read_item.dest_index.fqn]
        offsets = tuple(read_item.dest_index.offset or ())
        view = next(view for block, view in pieces.views() if block.offsets == offsets)
        inside = zip(read_item.dest_offsets, read_item.lengths)
        return view[tuple(slice(start, start + length) for start, length in inside)]
