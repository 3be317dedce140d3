"""A stage's source and the user's model in, the stage as a live module with this rank's weights out."""

from __future__ import annotations

import importlib
import linecache
from collections.abc import Container, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from autoplan.errors import BadInputError
from autoplan_codegen.stage import StageSource
from autoplan_passes.placements import parse_placement

KERNEL_ENTRY_POINTS = "autoplan.kernels"
_REGISTERED: set[tuple[str, str]] = set()


@dataclass(frozen=True)
class Place:
    """Where a stage lives: (number, size) on every axis that cuts parameters, and its device."""

    on_axes: Mapping[str, tuple[int, int]]
    device: torch.device


def import_stage(source: StageSource, index: int, directory: Path | None = None) -> ModuleType:
    """Run a stage's source as a module; written to ``directory`` (``stage_K.py``) where one is given."""
    filename = f"<autoplan stage_{index}.py>"
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"stage_{index}.py"
        path.write_text(source.text)
        filename = str(path)
    linecache.cache[filename] = (len(source.text), None, source.text.splitlines(True), filename)
    module = ModuleType(f"autoplan_stage_{index}")
    module.__file__ = filename
    exec(compile(source.text, filename, "exec"), module.__dict__)
    return module


def build_stage(
    module: ModuleType,
    source: StageSource,
    tensors: Mapping[str, torch.Tensor],
    constants: Mapping[str, torch.Tensor],
    place: Place,
    dtype: torch.dtype | None = None,
    sharded_dtype: torch.dtype | None = None,
    shared: Container[str] = (),
) -> nn.Module:
    """The stage with the user's weights, each cut to this rank's piece and moved to its device.

    ``dtype`` is what floating-point parameters and buffers become, ``sharded_dtype`` trained parameters
    that can be sharded: those at the paths of ``shared`` that are no single numbers (None: as in the model).
    """
    vars(module)["DEVICE"] = place.device
    register_kernels(place.device)
    with torch.device("meta"):
        stage: nn.Module = module.Stage()
    for row in source.parameters:
        whole = _value(tensors, row.name)
        sharded = whole.requires_grad and whole.dim() and row.path in shared
        kept = sharded_dtype if sharded else dtype
        piece = parse_placement(row.placement).cut(_as(whole.detach(), kept), place.on_axes)
        copied = piece.to(device=place.device, copy=True).contiguous()
        set_tensor(stage, row.path, nn.Parameter(copied, requires_grad=whole.requires_grad))
    for path, home in source.tied_paths.items():
        set_tensor(stage, path, tensor_at(stage, home))
    for path, name in source.buffers.items():
        value = _value({**constants, **tensors}, name)
        set_tensor(stage, path, _as(value.detach(), dtype).to(device=place.device, copy=True))
    return stage


def register_kernels(device: torch.device) -> None:
    """Make the kernels of the device known where a stage's fused ops look for them.

    Ours are ``torch.ops.autoplan.*``; other packages register theirs for their device under an entry point of
    the group ``autoplan.kernels``, a function that is called once with the device.
    """
    if device.type != "cpu":
        importlib.import_module("autoplan_codegen.kernels")
    for point in entry_points(group=KERNEL_ENTRY_POINTS):
        if (point.name, point.value) not in _REGISTERED:
            _REGISTERED.add((point.name, point.value))
            point.load()(device)


def share_parameters(
    stage: nn.Module, source: StageSource, held: dict[tuple[str, str], nn.Parameter]
) -> None:
    """Give a stage the parameters that an earlier stage of this rank holds already, placed alike.

    ``held`` maps (name, placement) to them, and takes up the stage's own.
    """
    for row in source.parameters:
        own = tensor_at(stage, row.path)
        shared = held.setdefault((row.name, row.placement), own)
        if shared is not own:
            paths = [path for path, home in source.tied_paths.items() if home == row.path]
            for path in (row.path, *paths):
                set_tensor(stage, path, shared)


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers of a model by every name they have; refuses a model without weights."""
    tensors: dict[str, torch.Tensor] = dict(model.named_buffers(remove_duplicate=False))
    tensors.update(model.named_parameters(remove_duplicate=False))
    empty = next((name for name, tensor in tensors.items() if tensor.is_meta), None)
    if empty is not None:
        raise BadInputError(
            f"Expected a model with weights, but {empty} is on the meta device and has none.\n"
            "Build the model without `torch.device('meta')` and pass it again."
        )
    return tensors


def first_names(model: nn.Module) -> dict[str, str]:
    """Every key of the user's ``state_dict`` -> the first name of the same tensor."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    first: dict[int, str] = {}
    for name, parameter in parameters.items():
        first.setdefault(id(parameter), name)
    return {name: first.get(id(parameters.get(name)), name) for name in model.state_dict()}


def tensor_at(module: nn.Module, path: str) -> Any:
    """The parameter or buffer at a dotted attribute path."""
    owner, _, name = path.rpartition(".")
    return getattr(module.get_submodule(owner), name)


def set_tensor(module: nn.Module, path: str, value: torch.Tensor) -> None:
    """Replace the parameter or buffer at a dotted attribute path."""
    owner, _, name = path.rpartition(".")
    setattr(module.get_submodule(owner), name, value)


def _value(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    if name not in tensors:
        raise BadInputError(
            f"The plan's code needs {name}, which the model does not have (it has {len(tensors)} tensors, "
            f"such as {', '.join(list(tensors)[:3])}). Pass the model that the plan was made for."
        )
    return tensors[name]


def _as(value: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return value.to(dtype) if dtype is not None and value.is_floating_point() else value
