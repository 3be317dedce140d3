"""Ops that need more than themselves on local tensors: what is called instead, and what that sends.

A name from a rule and the op's call come in; the function of :mod:`autoplan_passes.collectives` with its
arguments, and its collectives with their bytes, go out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoplan_passes import collectives, fused_loss, ring
from autoplan_passes.calls import Call, first_tensor
from autoplan_passes.states import State

# (sent forward, sent backward, bytes forward, bytes backward)
Sent = tuple[str, str, float, float]
AVERAGE = "average_of_parts"


@dataclass(frozen=True)
class Implementation:
    """``function`` replaces the op; ``arguments(call, output, axis)`` gives its own, of global nodes."""

    function: Callable[..., Any]
    arguments: Callable[[Call, State, str], tuple[Any, ...]]
    sent: Callable[[Call], tuple[Sent, ...]]


def _embedding_arguments(call: Call, _output: State, axis: str) -> tuple[Any, ...]:
    given = call.arguments
    return (given["indices"], given["weight"], given.get("padding_idx", -1), axis)


def _cross_entropy_arguments(call: Call, _output: State, axis: str) -> tuple[Any, ...]:
    names = ("self", "target", "reduction", "ignore_index", "label_smoothing")
    return (*(call.arguments[name] for name in names), axis)


def _cross_entropy_sent(call: Call) -> tuple[Sent, ...]:
    """The largest logit, then three sums, of every position, in single precision or better."""
    positions = call.shapes[0][0] * max(4, first_tensor(call.tensors[0]).element_size())
    return (("all_reduce", "none", positions, 0.0), ("all_reduce", "none", 3 * positions, 0.0))


def _position_entropy_arguments(call: Call, _output: State, axis: str) -> tuple[Any, ...]:
    names = ("self", "target", "ignore_index", "label_smoothing")
    return (*(call.arguments[name] for name in names), axis)


def _vocab_position_arguments(call: Call, _output: State, axis: str) -> tuple[Any, ...]:
    return (*call.arguments.values(), axis)


def _rows_of_loss_arguments(call: Call, _output: State, axis: str) -> tuple[Any, ...]:
    return tuple(
        {**call.arguments, "positions": axis, "vocabulary": call.arguments.get("vocabulary", "")}.values()
    )


def _vocabulary_of_loss_arguments(call: Call, _output: State, axis: str) -> tuple[Any, ...]:
    return tuple(
        {**call.arguments, "positions": call.arguments.get("positions", ""), "vocabulary": axis}.values()
    )


def _one_count_sent(_call: Call) -> tuple[Sent, ...]:
    return (("all_reduce", "none", 8.0, 0.0),)


def _hide_arguments(call: Call, output: State, axis: str) -> tuple[Any, ...]:
    given = (call.arguments["logits"], call.arguments["classes"])
    return (*given, axis) if output.dim == len(call.output) - 1 else given


def _dropout_arguments(call: Call, output: State, axis: str) -> tuple[Any, ...]:
    tensor = next(iter(call.tensors))
    sections = output.sections_of(call.output[output.dim]) if output.sections else ()
    order = (sections, True) if output.zigzag else (sections,) if sections else ()
    return (tensor, call.arguments["p"], output.dim, axis, *order)


def _ring_arguments(call: Call, output: State, axis: str) -> tuple[Any, ...]:
    given = call.arguments
    scale = given["scale"] or call.shapes[0][-1] ** -0.5
    tensors = (given[name] for name in ("query", "key", "value", "attn_mask"))
    return (*tensors, bool(given["is_causal"]), scale, output.zigzag, axis)


def _ring_sent(call: Call) -> tuple[Sent, ...]:
    """Keys and values pass all ranks; backward with their gradients in single precision or better."""
    keys_values = [first_tensor(tensor) for tensor in call.tensors[1:3]]
    held = sum(tensor.numel() * tensor.element_size() for tensor in keys_values)
    gradients = sum(tensor.numel() * max(4, tensor.element_size()) for tensor in keys_values)
    return (("ring", "ring", held, held + gradients),)


def repeated_heads_sent(call: Call) -> tuple[Sent, ...]:
    """Keys and values by heads, each head once for every rank that needs it: one head a rank."""
    sizes = [math.prod(shape) / shape[1] for shape in call.shapes[1:3]]
    sent = [size * first_tensor(tensor).element_size() for size, tensor in zip(sizes, call.tensors[1:3])]
    return tuple(("all_to_all", "all_to_all", size, size) for size in sent)


def _nothing_sent(_call: Call) -> tuple[Sent, ...]:
    return ()


IMPLEMENTATIONS: Mapping[str, Implementation] = {
    "vocab_embedding": Implementation(collectives.vocab_embedding, _embedding_arguments, _nothing_sent),
    "vocab_cross_entropy": Implementation(
        collectives.vocab_cross_entropy, _cross_entropy_arguments, _cross_entropy_sent
    ),
    "position_cross_entropy": Implementation(
        collectives.position_cross_entropy, _position_entropy_arguments, _one_count_sent
    ),
    "vocab_position_cross_entropy": Implementation(
        collectives.vocab_position_cross_entropy, _vocab_position_arguments, _cross_entropy_sent
    ),
    "hide_classes": Implementation(collectives.hide_classes, _hide_arguments, _nothing_sent),
    "position_linear_cross_entropy": Implementation(
        fused_loss.linear_cross_entropy, _rows_of_loss_arguments, _one_count_sent
    ),
    "vocab_linear_cross_entropy": Implementation(
        fused_loss.linear_cross_entropy, _vocabulary_of_loss_arguments, _cross_entropy_sent
    ),
    "sliced_dropout": Implementation(collectives.sliced_dropout, _dropout_arguments, _nothing_sent),
    "ring_attention": Implementation(ring.ring_attention, _ring_arguments, _ring_sent),
}
# The op itself, on inputs that are sent on the way to it (see ``local_ops``).
SENT_ON_THE_WAY: Mapping[str, Callable[[Call], tuple[Sent, ...]]] = {"repeated_heads": repeated_heads_sent}


def implementation_sends(name: str, call: Call) -> tuple[Sent, ...]:
    """Collectives inside an implementation; none for the op itself."""
    if name in IMPLEMENTATIONS:
        return IMPLEMENTATIONS[name].sent(call)
    return SENT_ON_THE_WAY[name](call) if name in SENT_ON_THE_WAY else ()


def scaled(graph: fx.Graph, node: fx.Node, size: int) -> fx.Node:
    """An average over a rank's part, to that part's share of the whole average."""
    return graph.call_function(torch.ops.aten.div.Tensor, (node, size))
