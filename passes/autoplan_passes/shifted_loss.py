"""Losses of shifted positions: a region graph comes in, one whose logits are not sliced goes out.

A next-token loss inside the model drops the last position's logits and the first label. Cut along the
sequence, the ranks would hold pieces of one position less, which do not divide. Here all logits stay and the
positions dropped get a label that is ignored, which is the same loss to the last gradient::

    cross_entropy(flatten(slice(logits, 1, 0, 7)), target)
      --> cross_entropy(flatten(logits), flatten(pad(unflatten(target), (0, 1), ignore_index)))
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from torch import fx

from autoplan_passes.calls import Call, op_name, shape_of
from autoplan_passes.local_ops import find_fake_mode, propagate, set_arguments
from autoplan_passes.table_dims import piece_of_slice

VIEWS = {"aten.view": "size", "aten._unsafe_view": "size", "aten.reshape": "shape", "aten.flatten": ""}
SAME_ROWS = ("aten.contiguous", "aten.clone", "aten._to_copy", "aten.to", "aten.alias", *VIEWS)


def keep_all_positions(graph: fx.GraphModule) -> fx.GraphModule:
    """A copy in which no loss drops positions of its logits; the graph itself where none does."""
    if not any(_dropped(node) for node in graph.graph.nodes):
        return graph
    kept = fx.GraphModule(graph, copy.deepcopy(graph.graph))
    with find_fake_mode(graph.graph):
        for node in list(kept.graph.nodes):
            chain = _dropped(node)
            if chain:
                _keep(kept.graph, node, chain)
    kept.graph.eliminate_dead_code()
    kept.graph.lint()
    kept.recompile()
    return kept


def _dropped(loss: fx.Node) -> list[fx.Node]:
    """The nodes from the slice that drops positions to the loss, the loss left out; [] if it drops none."""
    if op_name(loss) != "aten.cross_entropy_loss" or Call(loss).arguments["reduction"] == 0:
        return []
    logits, target = Call(loss).tensors[:2]
    if len(shape_of(logits)) != 2 or len(shape_of(target)) != 1:
        return []
    chain = [logits]
    while _passes_rows(chain[0]) and len(chain[0].users) == 1:
        chain.insert(0, Call(chain[0]).tensors[0])
    piece = chain[0]
    if op_name(piece) != "aten.slice" or len(piece.users) != 1:
        return []
    call = Call(piece)
    in_steps, dim = piece_of_slice(call) is None, call.dim(default=0)
    classes_last = dim < len(call.output) - 1 and call.output[-1] == shape_of(logits)[-1]
    return chain if classes_last and not in_steps else []


def _passes_rows(node: fx.Node) -> bool:
    """Whether the node has all rows of its input, in order."""
    whole_slice = op_name(node) == "aten.slice" and Call(node).output == Call(node).shapes[0]
    return whole_slice or op_name(node) in SAME_ROWS


def _keep(graph: fx.Graph, loss: fx.Node, chain: Sequence[fx.Node]) -> None:
    """Let the chain start at the whole tensor, and the targets be ignored where positions were dropped."""
    call = Call(chain[0])
    dim, bounds, whole = call.dim(default=0), piece_of_slice(call), call.tensors[0]
    assert bounds is not None
    classes, left_over = shape_of(whole)[-1], call.shapes[0][dim] - sum(bounds)
    pads = [0, 0] * (len(call.output) - 2 - dim) + [bounds[0], left_over]
    target, ignore = Call(loss).tensors[1], int(Call(loss).arguments["ignore_index"])
    with graph.inserting_before(loss):
        rows = _made(graph, torch.ops.aten.reshape.default, target, list(call.output[:-1]))
        padded = _made(graph, torch.ops.aten.constant_pad_nd.default, rows, pads, ignore)
        flat = _made(graph, torch.ops.aten.reshape.default, padded, [-1])
    loss.replace_input_with(target, flat)
    chain[1].replace_input_with(chain[0], whole)
    for node in chain[1:]:
        own = Call(node)
        if VIEWS.get(own.name):
            merged = [math.prod(shape_of(whole)[:-1]), classes]
            set_arguments(node, own, {VIEWS[own.name]: merged})
        propagate(node)


def _made(graph: fx.Graph, op: object, *arguments: object) -> fx.Node:
    return propagate(graph.call_function(op, arguments))  # pyright: ignore[reportArgumentType] - any op
