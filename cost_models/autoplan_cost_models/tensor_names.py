"""Names of a region's tensors that a person recognises: the logits by role, others by module and op.

Comes in: a region graph. Goes out: a name for every node.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from autoplan_cost_models.node_facts import DTYPE_NAMES, op_name, outputs_of

LOSSES = (
    "cross_entropy_loss",
    "vocab_cross_entropy",
    "position_cross_entropy",
    "vocab_position_cross_entropy",
    "nll_loss",
    "nll_loss_nd",
    "nll_loss_forward",
)
# Ops between the logits and the loss that only change their shape, dtype or scale.
PASSED_THROUGH = (
    "view",
    "reshape",
    "_unsafe_view",
    "_to_copy",
    "to",
    "contiguous",
    "clone",
    "slice",
    "alias",
    "log_softmax",
    "_log_softmax",
    "transpose",
    "permute",
    "flatten",
    "unsqueeze",
    "squeeze",
    "copy_to",
)


def tensor_names(graph: fx.Graph) -> dict[fx.Node, str]:
    """``logits (fp32)`` on the way into a classification loss, ``mlp.up_proj linear (bf16)`` elsewhere."""
    names = {node: _plain_name(node) for node in graph.nodes}
    for node in graph.nodes:
        if node.op == "call_function" and op_name(node) in LOSSES:
            names.update(_logits_names(node))
    return names


def _logits_names(loss: fx.Node) -> dict[fx.Node, str]:
    """Walk back from the loss's first argument to the node that made the logits."""
    found: dict[fx.Node, str] = {}
    node: Any = loss.args[0]
    while isinstance(node, fx.Node) and node.op == "call_function":
        found[node] = f"logits ({_dtype(node)})"
        if op_name(node) not in PASSED_THROUGH:
            break
        node = node.args[0]
    return found


def _plain_name(node: fx.Node) -> str:
    if node.op != "call_function":
        return str(node.meta.get("source", node.name))
    module = _module_path(node)
    return f"{module}{op_name(node)} ({_dtype(node)})"


def _module_path(node: fx.Node) -> str:
    """The innermost module's last two names, e.g. ``mlp.up_proj ``; empty when unknown."""
    stack: Any = node.meta.get("nn_module_stack") or {}
    entries = list(stack.values())
    if not entries:
        return ""
    path = str(entries[-1][0]).replace("L['self']", "").strip(".")
    return ".".join(path.split(".")[-2:]) + " " if path else ""


def _dtype(node: fx.Node) -> str:
    tensors = outputs_of(node)
    if not tensors:
        return "none"
    return DTYPE_NAMES.get(tensors[0].dtype, str(tensors[0].dtype).removeprefix("torch."))
