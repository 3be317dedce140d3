"""Which products a split backward takes apart: the one rule that the rewrite and the prices share.

Comes in: a node of a region graph. Goes out: the node of its weight where the gradient of the weight can be
made later than that of the input, or None.
"""

from __future__ import annotations

from torch import fx

# op -> which argument is its weight. All other gradients are made with those of the inputs.
WEIGHT_ARGUMENT = {"linear": 1, "_grouped_mm": 1}
_VIEWS = ("transpose", "t", "permute")
_ARGUMENTS = ("bias", "offs")  # keywords that may stand for the third argument


def deferred_weight(node: fx.Node) -> fx.Node | None:
    """The weight of a product, a trained parameter or a transposed one, whose gradient can be put off."""
    if node.op != "call_function" or _name(node) not in WEIGHT_ARGUMENT:
        return None
    if len(node.args) > 3 or any(key not in _ARGUMENTS for key in node.kwargs):
        return None
    weight = node.args[WEIGHT_ARGUMENT[_name(node)]]
    return weight if isinstance(weight, fx.Node) and _is_trained(weight) else None


def _is_trained(node: fx.Node) -> bool:
    if node.op == "placeholder":
        return node.meta.get("kind") == "parameter" and bool(node.meta.get("requires_grad", True))
    return _name(node) in _VIEWS and _is_trained(node.all_input_nodes[0])


def _name(node: fx.Node) -> str:
    packet = getattr(node.target, "overloadpacket", None)
    return str(getattr(packet, "__name__", ""))
