"""A folder of safetensors files in, its tensors by name out, any box of them alone; and such a folder out.

The layout is that of Hugging Face: one ``model.safetensors``, or several files with the index
``model.safetensors.index.json`` (``weight_map``: tensor -> file).
"""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from autoplan.errors import BadInputError
from autoplan.runtime.sources import Box, Source

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SHARD_BYTES = 5 * 10**9  # one file of what is written without an original to follow


@dataclass
class SafetensorsFolder:
    """The tensors of one folder. ``bytes_read`` counts what has been read of them."""

    folder: Path
    files: Mapping[str, str]
    bytes_read: int = 0
    _open: dict[str, Any] = field(default_factory=dict[str, Any])

    def opened(self, name: str) -> Any:
        """The file that holds a tensor, mapped into memory."""
        file = self.files[name]
        if file not in self._open:
            self._open[file] = _safetensors().safe_open(str(self.folder / file), framework="pt")
        return self._open[file]

    def tensors(self) -> dict[str, StoredTensor]:
        """All tensors by name; nothing is read but the files' heads."""
        return {name: StoredTensor(self, name) for name in self.files}


class StoredTensor(Source):
    """A tensor in a file."""

    def __init__(self, where: SafetensorsFolder, name: str) -> None:
        self.where, self.name = where, name
        self.slice = where.opened(name).get_slice(name)
        self.shape = torch.Size(self.slice.get_shape())

    @property
    def dtype(self) -> torch.dtype:
        """Without reading more than one value."""
        if not self.shape:
            return self.where.opened(self.name).get_tensor(self.name).dtype
        return self.slice[tuple(slice(0, 0) for _ in self.shape)].dtype

    def read(self, box: Box) -> torch.Tensor:
        found = self.slice[box] if box else self.where.opened(self.name).get_tensor(self.name)
        self.where.bytes_read += found.numel() * found.element_size()
        return found


def open_safetensors(folder: Path) -> SafetensorsFolder:
    """The weights in a folder; BadInputError where there are none."""
    if (folder / INDEX).is_file():
        try:
            files = dict(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise BadInputError(
                f"{folder / INDEX}: expected an object with a `weight_map`: {error}."
            ) from None
        absent = sorted({file for file in files.values() if not (folder / file).is_file()})
        if absent:
            raise BadInputError(f"{folder / INDEX} names {absent[0]}, which is not there. Download it too.")
        return SafetensorsFolder(folder, files)
    if not (folder / SINGLE).is_file():
        raise BadInputError(
            f"Expected {SINGLE} or {INDEX} in {folder}: a folder that `save_pretrained` wrote, or a "
            "downloaded model. Weights in other formats are not read: save them again with transformers."
        )
    with _safetensors().safe_open(str(folder / SINGLE), framework="pt") as file:
        return SafetensorsFolder(folder, dict.fromkeys(file.keys(), SINGLE))


def write_safetensors(
    folder: Path, files: Mapping[str, str], read: Callable[[str], torch.Tensor], *, write: bool
) -> None:
    """Write every file of ``files`` (tensor -> file), one after the other, and the index where several.

    ``read(name)`` gives a whole tensor; every rank calls it for all, in the same order, ``write`` or not.
    """
    total = 0
    for file in dict.fromkeys(files.values()):
        tensors: dict[str, torch.Tensor] = {}
        for name in (name for name, one in files.items() if one == file):
            tensor = read(name)
            total += tensor.numel() * tensor.element_size()
            if write:
                tensors[name] = tensor.cpu().contiguous().clone()
        if write:
            _safetensors().torch.save_file(tensors, str(folder / file), metadata={"format": "pt"})
    if write and len(set(files.values())) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(files)}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def files_by_size(sizes_bytes: Mapping[str, int], limit_bytes: int = SHARD_BYTES) -> dict[str, str]:
    """Tensors to files of at most ``limit_bytes`` (a larger tensor has one of its own), in their order."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes_bytes.items():
        if groups[-1] and filled + size > limit_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    if len(groups) == 1:
        return dict.fromkeys(groups[0], SINGLE)
    count = len(groups)
    return {
        name: f"model-{number:05d}-of-{count:05d}.safetensors"
        for number, group in enumerate(groups, 1)
        for name in group
    }


def copy_beside(source: Path, target: Path) -> None:
    """What lies beside the weights: configuration, tokenizer, code; no weights."""
    for path in source.iterdir():
        weights = path.suffix in (".safetensors", ".bin", ".pt", ".pth", ".h5") or path.name == INDEX
        if path.is_file() and not weights and path.resolve() != (target / path.name).resolve():
            shutil.copyfile(path, target / path.name)


def _safetensors() -> Any:
    try:
        importlib.import_module("safetensors.torch")
        return importlib.import_module("safetensors")
    except ImportError:
        raise BadInputError(
            "Reading and writing safetensors needs the package safetensors: pip install safetensors"
        ) from None
