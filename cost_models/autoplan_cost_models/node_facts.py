"""Facts about one graph node that pricing needs: its op's name, its tensors, whether gradients reach it.

Comes in: nodes of a region graph with ``meta["val"]``. Goes out: names, byte sizes, dtype names and the
set of differentiable nodes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
}


def op_name(node: fx.Node) -> str:
    """``aten.linear.default`` -> ``linear``; a Python function or custom op -> its own name."""
    target: Any = node.target
    packet = getattr(target, "overloadpacket", target)
    return getattr(packet, "__name__", str(target))


def values_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a node's ``meta["val"]`` (one, a sequence, or none)."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from values_of(item)


def outputs_of(node: fx.Node) -> tuple[torch.Tensor, ...]:
    return tuple(values_of(node.meta.get("val")))


def bytes_of(tensor: torch.Tensor) -> int:
    """Bytes of the elements a kernel touches (an expanded tensor's repeats are read once)."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride()) if stride != 0 or size == 0)
    return math.prod(sizes) * tensor.element_size()


def node_bytes(node: fx.Node) -> int:
    return sum(bytes_of(tensor) for tensor in outputs_of(node))


def dtype_name(tensor: torch.Tensor) -> str:
    return DTYPE_NAMES.get(tensor.dtype, "int")


def kernel_dtype(node: fx.Node) -> str:
    """The floating dtype a node computes in: of its first floating output, else input, else ``int``."""
    candidates = list(outputs_of(node))
    for source in node.all_input_nodes:
        candidates.extend(outputs_of(source))
    return next((dtype_name(t) for t in candidates if t.is_floating_point()), "int")


def tensor_argument(argument: Any) -> torch.Tensor | None:
    """The tensor behind an argument of a node, or None for numbers and absent arguments."""
    if isinstance(argument, fx.Node):
        value = argument.meta.get("val")
        return value if isinstance(value, torch.Tensor) else None
    return None


def placeholder_needs_gradient(node: fx.Node) -> bool:
    """Trainable parameters and differentiable inputs; integer tensors, buffers and constants never.

    ``meta["requires_grad"]`` decides where present; otherwise every floating parameter and input is
    taken to need a gradient.
    """
    floating = any(t.is_floating_point() for t in outputs_of(node))
    kind = node.meta.get("kind", "input")
    return floating and kind in ("parameter", "input") and bool(node.meta.get("requires_grad", True))


def differentiable_nodes(graph: fx.Graph) -> frozenset[fx.Node]:
    """Nodes whose value needs a gradient: floating, and fed by a placeholder that needs one."""
    needing: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            if placeholder_needs_gradient(node):
                needing.add(node)
        elif any(source in needing for source in node.all_input_nodes) and _passes_gradient(node):
            needing.add(node)
    return frozenset(needing)


def _passes_gradient(node: fx.Node) -> bool:
    floating = any(t.is_floating_point() for t in outputs_of(node))
    return node.op == "call_function" and floating and op_name(node) != "detach"
