"""Ops that only move bytes: which are views (free), and what the others read and write.

Comes in: a node that is no contraction. Goes out: its kernels forward and backward, priced by bytes as
eager PyTorch runs them (one kernel an op: chains of pointwise ops are not fused).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from autoplan_cost_models.kernels import Kernel
from autoplan_cost_models.node_facts import kernel_dtype, node_bytes, op_name, outputs_of, tensor_argument

VIEWS = frozenset(
    [
        "hide_classes",
        "view",
        "_unsafe_view",
        "transpose",
        "permute",
        "t",
        "unsqueeze",
        "squeeze",
        "expand",
        "alias",
        "detach",
        "getitem",
        "as_strided",
        "slice",
        "select",
        "narrow",
        "split",
        "split_with_sizes",
        "chunk",
        "unbind",
        "unflatten",
        "movedim",
        "swapaxes",
        "swapdims",
        "view_as",
        "expand_as",
        "lift_fresh",
        "diagonal",
        "unfold",
        "view_as_real",
        "view_as_complex",
        "real",
        "imag",
        "mT",
        "mH",
        "T",
        "unsafe_split",
        "unsafe_chunk",
        "tensor_split",
        "broadcast_to",
        "atleast_1d",
        "atleast_2d",
        "_assert_tensor_metadata",
        "sym_size",
        "sym_numel",
        "sym_stride",
    ]
)
# View when the strides allow it, a copy otherwise.
VIEW_OR_COPY = frozenset(["reshape", "flatten", "contiguous", "_reshape_alias", "view_copy"])
# Return their input when nothing changes.
CASTS = frozenset(["to", "_to_copy", "type_as", "float", "half", "bfloat16"])
# Backward writes a zero-filled gradient of the whole input and copies the piece in.
PARTIAL_VIEWS = frozenset(
    ["slice", "select", "narrow", "split", "split_with_sizes", "chunk", "unbind", "diagonal", "unfold"]
)
# Backward sums the gradient over the repeated dims.
EXPANDING = frozenset(["expand", "expand_as", "broadcast_to"])
# Backward needs neither input nor output, only the output's gradient.
LINEAR = frozenset(
    [
        "add",
        "sub",
        "neg",
        "rsub",
        "clone",
        "_to_copy",
        "to",
        "type_as",
        "contiguous",
        "reshape",
        "flatten",
        "cat",
        "stack",
        "mean",
        "sum",
        "cumsum",
        "copy",
        "roll",
        "flip",
        "index",
        "index_select",
        "gather",
        "embedding",
        "permute_copy",
        "masked_fill",
        "where",
        "pad",
        "constant_pad_nd",
        "repeat",
        "tile",
        "repeat_interleave",
        "index_put",
        "scatter",
        "scatter_add",
        "index_add",
        "slice_scatter",
        "tril",
        "triu",
    ]
)
# Passes over the input-sized tensors that one op takes beyond reading inputs and writing outputs.
EXTRA_FORWARD_PASSES = {
    "cross_entropy_loss": 2.0,
    "position_cross_entropy": 2.0,
    "layer_norm": 1.0,
    "native_layer_norm": 1.0,
    "rms_norm": 1.0,
    "batch_norm": 1.0,
    "group_norm": 1.0,
    "softmax": 1.0,
    "_softmax": 1.0,
}
# cross_entropy_loss backward: write the gradient of the log-probabilities, read it and the saved
# log-probabilities, write the gradient of the logits (4 passes); the default is 2 or 3 an input.
BACKWARD_PASSES = {
    "cross_entropy_loss": 5.0,
    "position_cross_entropy": 5.0,
    "softmax": 3.0,
    "_softmax": 3.0,
    "log_softmax": 3.0,
}
SEVERAL_LAUNCHES = {"cross_entropy_loss": 2, "sort": 3, "topk": 2, "layer_norm": 1, "index_put": 2}


def is_free(node: fx.Node) -> bool:
    """True when the op returns a view of its input (or no tensor), so the device runs nothing."""
    name = op_name(node)
    if not outputs_of(node) or name in VIEWS:
        return True
    source = _first_tensor(node)
    if source is None:
        return False
    if name in VIEW_OR_COPY:
        return _viewable(source, outputs_of(node)[0])
    if name in CASTS:
        return source.dtype == outputs_of(node)[0].dtype
    return name in ("dropout", "feature_dropout", "alpha_dropout") and _dropout_is_off(node)


def memory_kernels(
    node: fx.Node, needing: frozenset[fx.Node]
) -> tuple[tuple[Kernel, ...], tuple[Kernel, ...]]:
    """Forward and backward kernels of an op that moves bytes (backward ones of views included)."""
    forward = () if is_free(node) else (_forward(node),)
    backward = (_backward(node, needing),) if node in needing else ()
    return forward, tuple(kernel for kernel in backward if kernel.bytes > 0)


def _forward(node: fx.Node) -> Kernel:
    name = op_name(node)
    inputs = float(sum(_read_bytes(node, source) for source in node.all_input_nodes))
    traffic = inputs * (1.0 + EXTRA_FORWARD_PASSES.get(name, 0.0)) + node_bytes(node)
    return Kernel("memory", kernel_dtype(node), traffic, launches=SEVERAL_LAUNCHES.get(name, 1))


def _read_bytes(node: fx.Node, source: fx.Node) -> int:
    """Gathers read the rows they pick, not the whole table."""
    whole = node_bytes(source)
    if op_name(node) in ("embedding", "index", "index_select", "gather", "vocab_embedding"):
        return min(whole, node_bytes(node))
    return whole


def _backward(node: fx.Node, needing: frozenset[fx.Node]) -> Kernel:
    name = op_name(node)
    sources = [source for source in node.all_input_nodes if source in needing]
    gradient_in = float(node_bytes(node))
    written = float(sum(node_bytes(source) for source in sources))
    dtype = kernel_dtype(node)
    if name in PARTIAL_VIEWS:
        return Kernel("memory", dtype, written + 2 * gradient_in, launches=2)
    if name in EXPANDING:
        expanded = math.prod(outputs_of(node)[0].shape) * outputs_of(node)[0].element_size()
        return Kernel("memory", dtype, written + expanded if expanded != written else 0.0)
    if is_free(node) or (name in ("add", "sub") and not _broadcasts(node, sources)):
        return Kernel("memory", dtype, 0.0)
    passes = BACKWARD_PASSES.get(name, 1.0 if name in LINEAR else 2.0)
    if name in ("embedding", "vocab_embedding"):  # dense gradient of the table: zero-fill, then scatter
        return Kernel("memory", dtype, written + 3 * gradient_in, launches=2)
    launches = max(1, len(sources)) if passes > 1 else 1
    return Kernel("memory", dtype, gradient_in * max(1, len(sources)) + passes * written, launches=launches)


def _broadcasts(node: fx.Node, sources: list[fx.Node]) -> bool:
    """Whether the gradient of a sum must be reduced (else autograd hands the same tensor on)."""
    out = outputs_of(node)[0]
    return any(
        tensor.shape != out.shape or tensor.dtype != out.dtype
        for source in sources
        for tensor in outputs_of(source)
    )


def _first_tensor(node: fx.Node) -> torch.Tensor | None:
    argument: Any = node.args[0] if node.args else None
    return tensor_argument(argument)


def _dropout_is_off(node: fx.Node) -> bool:
    probability: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5)
    training: Any = node.args[2] if len(node.args) > 2 else node.kwargs.get("train", True)
    return not training or probability == 0.0


def _viewable(source: torch.Tensor, output: torch.Tensor) -> bool:
    """Whether ``source`` has a view of the output's shape: torch's stride rule for ``view``."""
    if source.is_contiguous():
        return True
    probe = torch.empty_strided(source.shape, source.stride(), device="meta")
    try:
        probe.view(output.shape)
    except RuntimeError:
        return False
    return output.stride() == probe.view(output.shape).stride()
