"""Classes that a mesh axis does not divide: a region graph comes in, one whose vocabulary divides goes out.

A table of 50257 rows on 2 ranks gets rows that no token looks up, the logits columns that no label names::

    cross_entropy(view(linear(x, p_head), [16, 50257]), target)
      --> cross_entropy(view(hide_classes(linear(x, p_head), 50257), [16, 50304]), target)

Hidden columns are the least number there is: their probability is exactly zero, and so is the gradient of
what made them. Loss and gradients are those of the real classes, and the rows added stay zero.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

from torch import fx

from autoplan_passes.calls import Call, op_name, parameter_names, shape_of
from autoplan_passes.collectives import hide_classes
from autoplan_passes.fused_loss import linear_cross_entropy
from autoplan_passes.local_ops import find_fake_mode, propagate, set_arguments
from autoplan_passes.shared_heads import share_heads
from autoplan_passes.shifted_loss import SAME_ROWS, VIEWS

FUSED_LOSS = "linear_cross_entropy"
LOSSES = ("aten.cross_entropy_loss", "position_cross_entropy")
# Large pieces become a multiple of what matrix units take at once; 64 in every library that states one.
LARGE_PIECE, PIECE_MULTIPLE = 1024, 64


def padded_length(length: int, size: int) -> int:
    """The least length from ``length`` on that ``size`` ranks divide, in large pieces of full tiles."""
    piece = -(-length // size)
    if piece >= LARGE_PIECE:
        piece = -(-piece // PIECE_MULTIPLE) * PIECE_MULTIPLE
    return piece * size


def made_divisible(graph: fx.GraphModule, size: int) -> fx.GraphModule:
    """The graph that the tp axis of ``size`` ranks cuts: classes padded, few key-value heads shared."""
    return share_heads(pad_classes(graph, size), size) if size > 1 else graph


def pad_classes(graph: fx.GraphModule, size: int) -> fx.GraphModule:
    """A copy in which ``size`` ranks divide the classes of every table and head; the graph itself where they
    do already, or where something else than a loss reads the logits.

    Padded parameters have ``meta["padded"]``: (classes, classes with the rows added).
    """
    names = {node.name for node in graph.graph.nodes if _may_be_padded(node, size)}
    if not names:
        return graph
    padded = fx.GraphModule(graph, copy.deepcopy(graph.graph))
    with find_fake_mode(graph.graph):
        heads: list[fx.Node] = []
        for node in [n for n in padded.graph.nodes if n.name in names]:
            heads += _widen(node, size)
        for head in dict.fromkeys(heads):
            _hide(padded.graph, head, size)
    padded.graph.lint()
    padded.recompile()
    return padded


def _may_be_padded(node: fx.Node, size: int) -> bool:
    """Whether a parameter's rows are classes that ``size`` ranks do not divide, and rows may be added."""
    if node.meta.get("kind") != "parameter" or len(shape_of(node)) != 2 or "padded" in node.meta:
        return False
    classes = shape_of(node)[0]
    if classes % size == 0 or classes < size or not node.users:
        return False
    return all(
        _looks_up(user, node) or _makes_logits(user, node) or _is_loss_of(user, node) for user in node.users
    )


def _looks_up(user: fx.Node, table: fx.Node) -> bool:
    return op_name(user) == "aten.embedding" and Call(user).tensors[0] is table


def _is_loss_of(loss: fx.Node, parameter: fx.Node) -> bool:
    """Whether this is a loss with its output layer inside, whose classes are the parameter's rows."""
    if op_name(loss) != FUSED_LOSS:
        return False
    call = Call(loss)
    return (
        call.tensors[1] is parameter and call.tensors[0] is not parameter and not call.arguments["smoothing"]
    )


def _makes_logits(head: fx.Node, parameter: fx.Node) -> bool:
    """Whether this is a product whose classes are the parameter's rows, read by losses over them alone."""
    if op_name(head) != "aten.linear" or Call(head).tensors[0] is parameter:
        return False
    others = [n for n in Call(head).tensors[1:] if n is not parameter]
    if any(n.meta.get("kind") != "parameter" or len(n.users) > 1 for n in others if len(shape_of(n)) == 1):
        return False
    return shape_of(head)[-1] == shape_of(parameter)[0] and _ends_in_loss(head)


def _ends_in_loss(node: fx.Node) -> bool:
    """Whether all that is made of the logits is a loss that hidden columns leave as it is."""
    classes = shape_of(node)[-1]
    for user in node.users:
        if op_name(user) in LOSSES:
            call = Call(user)
            plain = call.tensors[0] is node and len(shape_of(node)) == 2 and len(call.shapes) == 2
            smoothed = call.arguments.get("label_smoothing") or call.arguments.get("smoothing")
            if not plain or smoothed:
                return False
        elif (
            op_name(user) not in (*SAME_ROWS, "aten.slice")
            or shape_of(user)[-1] != classes
            or not _ends_in_loss(user)
        ):
            return False
    return bool(node.users)


def _widen(parameter: fx.Node, size: int) -> Sequence[fx.Node]:
    """Add rows to a parameter; the products that it makes logits with."""
    value = parameter.meta["val"]
    rows = padded_length(value.shape[0], size)
    parameter.meta |= {"padded": (value.shape[0], rows), "global_shape": tuple(value.shape)}
    parameter.meta["val"] = value.new_empty([rows, *value.shape[1:]]).requires_grad_(value.requires_grad)
    return [user for user in parameter.users if not _looks_up(user, parameter)]


def _hide(graph: fx.Graph, head: fx.Node, size: int) -> None:
    """Hide the added columns of a product's logits, and give what follows its new shape."""
    if op_name(head) == FUSED_LOSS:
        given = Call(head).arguments
        named = {"positions": "", "vocabulary": "", **given, "classes": head.args[1].meta["padded"][0]}  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess] - a node
        head.args, head.kwargs = tuple(named[name] for name in parameter_names(linear_cross_entropy)), {}
        propagate(head)
        return
    classes = shape_of(head)[-1]
    weight, *bias = Call(head).tensors[1:]
    for node in (weight, *bias):
        if "padded" not in node.meta:
            _widen(node, size)
    propagate(head)
    with graph.inserting_after(head):
        hidden = graph.call_function(hide_classes, (head, classes))
    hidden.meta = {key: head.meta[key] for key in ("nn_module_stack", "stack_trace") if key in head.meta}
    head.replace_all_uses_with(hidden, delete_user_cb=lambda user: user is not hidden)
    propagate(hidden)
    _resize(hidden)


def _resize(node: fx.Node) -> None:
    """Run what the logits go through again, at their new number of classes."""
    columns = shape_of(node)[-1]
    for user in list(node.users):
        if op_name(user) in LOSSES:
            continue
        name: str = VIEWS.get(op_name(user), "")
        if name:
            set_arguments(user, Call(user), {name: [*shape_of(user)[:-1], columns]})
        propagate(user)
        _resize(user)
