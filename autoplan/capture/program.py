"""The captured program: one flat functional ATen graph of forward and loss, with facts about it.

Comes in: what :func:`autoplan.capture.capture_model` traced. Goes out: :class:`Capture`, whose graph
nodes carry fake tensors and whose parameters and buffers are known by qualified name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import fx


@dataclass(frozen=True)
class ParameterInfo:
    """One parameter or buffer by its canonical qualified name (the first of its tied names)."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    is_buffer: bool = False
    tied_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class BatchForm:
    """How the graph changes with the batch size: everything is linear in it.

    ``arguments[node]`` holds, for each integer of the node's flattened (args, kwargs), the increase per
    extra sample; ``shapes[node]`` the increase of each dim of each output tensor (flattened);
    ``strides[node]`` each dim's stride at ``Capture.batch + 1`` and its increase beyond.
    Nodes that do not change are absent. Empty when only ``Capture.batch`` itself can be used.
    """

    arguments: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    strides: Mapping[str, tuple[tuple[int, int], ...]] = field(
        default_factory=dict[str, tuple[tuple[int, int], ...]]
    )
    known: bool = True


@dataclass(frozen=True)
class Capture:
    """One traced model at batch size ``batch``.

    ``graph``: placeholders first; each placeholder has ``meta["kind"]`` in ``parameter buffer constant
    input`` and ``meta["source"]`` its qualified name (for an input: the keyword or position it is fed
    by). Every tensor-valued node has ``meta["val"]`` (a FakeTensor on cpu), ``meta["nn_module_stack"]``
    and ``meta["stack_trace"]`` where the exporter knew them. The single output is the scalar loss.
    The graph is functional (no in-place ops) and pre-dispatch (linear, sdpa, cross-entropy whole).
    ``module_classes`` gives each module's class, ``containers`` the paths of ModuleList, Sequential and
    ModuleDict modules. Smaller batches than ``least_batch`` cannot run. ``coupled_at`` is the file:line
    where samples meet each other on the way to the loss ("" where none do): only the whole batch is right.
    """

    name: str
    source: str
    graph: fx.Graph
    batch: int
    batch_form: BatchForm
    parameters: Mapping[str, ParameterInfo]
    constants: Mapping[str, torch.Tensor]
    input_names: tuple[str, ...]
    dtype: str
    sizes: Mapping[str, int]
    tokens_per_sample: int
    module_classes: Mapping[str, str]
    opaque: tuple[str, ...]
    warnings: tuple[str, ...]
    fingerprint: str
    capture_s: float = 0.0
    containers: frozenset[str] = frozenset()
    least_batch: int = 1
    coupled_at: str = ""
