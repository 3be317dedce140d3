"""A module already in memory and inputs for it come in; a :class:`ModelSource` goes out.

The module is never touched: each build is a copy whose parameters are on meta, and inputs of other batch
sizes repeat or drop samples of those given.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from autoplan.capture.source import Inputs, ModelSource, checked_inputs
from autoplan.errors import BadInputError


def module_source(
    model: nn.Module,
    inputs: Mapping[str, Any] | tuple[Any, ...],
    *,
    name: str | None = None,
    loss_fn: Callable[[Any, Any], Any] | None = None,
) -> ModelSource:
    """A source for ``model`` with ``inputs`` (a dict of keywords or a tuple; the first dim is the batch).

    Raises BadInputError when the inputs hold no tensor or do not agree on the batch size.
    """
    kind = type(model)
    given = checked_inputs(inputs, kind.__name__)
    batch = _batch_size(given, kind.__name__)

    def make_inputs(wanted: int) -> Inputs:
        rows = torch.arange(wanted) % batch
        return _map(given, lambda x: x.index_select(0, rows) if x.dim() and len(x) == batch else x)

    try:
        path = inspect.getfile(kind)
    except (OSError, TypeError):
        path = f"<{kind.__qualname__}>"
    return ModelSource(name or kind.__name__, path, lambda: _meta_copy(model), make_inputs, loss_fn, ())


def _meta_copy(model: nn.Module) -> nn.Module:
    """A deep copy that shares no tensor with the model and holds no weights; ties are kept."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        meta = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(meta, requires_grad=parameter.requires_grad)
    return copy.deepcopy(model, memo)


def _batch_size(inputs: Inputs, name: str) -> int:
    tensors = list(inputs.values()) if isinstance(inputs, Mapping) else list(inputs)
    sizes = {len(x) for x in tensors if isinstance(x, torch.Tensor) and x.dim()}
    if len(sizes) != 1:
        raise BadInputError(
            f"the inputs of {name} should be tensors whose first dim is the batch size; found first dims "
            f"{sorted(sizes) or 'none'}. Pass a dict of keyword tensors of one batch size."
        )
    return sizes.pop()


def _map(inputs: Inputs, change: Callable[[torch.Tensor], torch.Tensor]) -> Inputs:
    if isinstance(inputs, Mapping):
        return {k: change(v) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    return tuple(change(v) if isinstance(v, torch.Tensor) else v for v in inputs)
