"""Folders of weights compared: the same files, names, dtypes and values."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from autoplan.runtime.safetensors_files import open_safetensors


def stored_bytes(folder: Path) -> int:
    tensors = open_safetensors(folder).tensors()
    return sum(one.shape.numel() * one.dtype.itemsize for one in tensors.values())


def content(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {path.name: load_file(path) for path in sorted(folder.glob("*.safetensors"))}


def assert_same_files(first: Path, second: Path) -> None:
    """Files, names, dtypes and values, the index, and what lies beside them."""
    one, other = content(first), content(second)
    assert one.keys() == other.keys()
    for file, tensors in one.items():
        assert tensors.keys() == other[file].keys()
        for key, value in tensors.items():
            assert value.dtype == other[file][key].dtype and torch.equal(value, other[file][key]), key
    for path in first.glob("*.json"):
        assert json.loads((second / path.name).read_text()) == json.loads(path.read_text()) or (
            "index" in path.name
        )
    for path in first.glob("*.index.json"):
        told = json.loads((second / path.name).read_text())
        assert told["weight_map"] == json.loads(path.read_text())["weight_map"]
