"""Weights as Hugging Face stores them in, those of the model's own names out, and back again.

Names and layouts in files differ from a model's (experts stored one by one are one tensor in the model). What
differs is in transformers' own conversions, which run here on sources: see :mod:`autoplan.runtime.sources`.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoplan.errors import BadInputError
from autoplan.runtime.safetensors_files import (
    SafetensorsFolder,
    copy_beside,
    files_by_size,
    open_safetensors,
    write_safetensors,
)
from autoplan.runtime.sources import Source


@dataclass
class Library:
    """A model of the transformers library inside the user's: its class, config and where it is.

    ``used`` are the conversions that the weights it was loaded from needed (None: not loaded).
    """

    prefix: str
    kind: Any
    config: Any
    used: list[Any] | None = None

    def empty(self) -> Any:
        """The model without weights."""
        with torch.device("meta"):
            model = self.kind(copy.deepcopy(self.config))
        if self.used is not None:
            model._weight_conversions = self.used
        return model


def library_of(model: nn.Module) -> Library | None:
    """The transformers model that ``model`` is or holds; None where it has none."""
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return None
    for name, module in model.named_modules():
        if isinstance(module, transformers.PreTrainedModel):
            return Library(f"{name}." if name else "", type(module), module.config)
    return None


def named_sources(stored: SafetensorsFolder, library: Library | None) -> dict[str, Source]:
    """The tensors of a folder by the names that the user's model has for them."""
    if library is None:
        return dict(stored.tensors())
    converted = _converted(dict(stored.tensors()), library)
    return {library.prefix + name: source for name, source in converted.items()}


def _converted(stored: Mapping[str, Source], library: Library) -> dict[str, Source]:
    """As ``from_pretrained`` converts them, in transformers' ``convert_and_load_state_dict_in_model``."""
    from transformers import conversion_mapping
    from transformers import core_model_loading as loading

    model = library.empty()
    known = model.state_dict()
    mapping = conversion_mapping.get_model_conversion_mapping(model)
    renamings = [one for one in mapping if isinstance(one, loading.WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, loading.WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    wanted: dict[str, Any] = {}
    for key in sorted(stored, key=loading.dot_natural_key):
        name, pattern = loading.rename_source_key(key, renamings, converters, model.base_model_prefix, known)
        if name not in known and key in known:
            name, pattern = key, None
        if name not in known:
            continue
        if pattern is not None:
            one = wanted.setdefault(name, copy.deepcopy(by_pattern[pattern]))
        else:
            one, pattern = wanted.setdefault(name, loading.WeightRenaming(key, name)), key
        one.add_tensor(name, key, pattern, stored[key])
    found: dict[str, Source] = {}
    for name, one in wanted.items():
        for target, value in one.convert(name, model=model, config=model.config).items():
            found[target] = value[0] if isinstance(value, list) else value
    library.used = [one for one in mapping if one.was_used()]
    return found


def stored_sources(state: Mapping[str, Source], library: Library | None) -> dict[str, Source]:
    """A model's tensors by the names, and in the layout, in which ``save_pretrained`` stores them."""
    if library is None:
        return dict(state)
    from transformers.core_model_loading import revert_weight_conversion

    inside = {n.removeprefix(library.prefix): s for n, s in state.items() if n.startswith(library.prefix)}
    revert: Any = revert_weight_conversion  # typed for tensors, for which sources stand here
    return revert(library.empty(), inside)


def source_for(name: str, aliases: list[str], sources: Mapping[str, Source], folder: Path) -> Source:
    """The stored tensor of a parameter, under any name that it has."""
    found = next((sources[one] for one in (name, *aliases) if one in sources), None)
    if found is None:
        raise BadInputError(
            f"{folder} has no {name}: its weights are another model's (it has {len(sources)} tensors of this "
            f"model{', such as ' + next(iter(sources)) if sources else ''})."
        )
    return found


def write_pretrained(
    folder: Path,
    state: Mapping[str, Source],
    dtypes: Mapping[str, torch.dtype],
    library: Library | None,
    like: Path | None,
    *,
    write: bool = True,
) -> None:
    """Write a model's tensors as they were stored in ``like`` (names, dtypes, files, what lies beside them).

    Without ``like``: as ``save_pretrained`` would, ``state`` holding every tensor once. ``dtypes``: those of
    ``state``. Reading sources may be collective: every rank calls this, one with ``write``.
    """
    if write:
        folder.mkdir(parents=True, exist_ok=True)
    sources = stored_sources(state, library)
    if like is None:
        kept = {name: dtypes.get(name, _only(dtypes)) for name in sources}
        sizes = {name: sources[name].shape.numel() * dtype.itemsize for name, dtype in kept.items()}
        files = files_by_size(sizes)
        if write and library is not None:
            config = copy.deepcopy(library.config)
            config.architectures = [library.kind.__name__]
            config.save_pretrained(folder)
    else:
        original = open_safetensors(like)
        if library is not None and library.used is None:
            named_sources(original, library)  # finds the conversions that this folder needs
            sources = stored_sources(state, library)
        files, tensors = dict(original.files), original.tensors()
        kept = {name: tensor.dtype for name, tensor in tensors.items()}
        # What the model does not have (a table that it computes) is as it was.
        sources = {**tensors, **sources}
        if write:
            copy_beside(like, folder)
    write_safetensors(folder, files, _reader(sources, kept), write=write)


def _reader(
    sources: Mapping[str, Source], dtypes: Mapping[str, torch.dtype]
) -> Callable[[str], torch.Tensor]:
    return lambda name: sources[name].whole().to(dtypes[name])


def _only(dtypes: Mapping[str, torch.dtype]) -> torch.dtype:
    """The dtype of what is stored under a name that the model does not have: that of most of the model."""
    found = list(dtypes.values())
    return max(set(found), key=found.count)
