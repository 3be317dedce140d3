"""The loss of a captured model in, how much each micro-batch counts in the mean over the global batch out.

A mean over tokens is divided by the tokens it counts. Where micro-batches count different numbers (labels
with ``ignore_index``), the mean of their means is another loss, and depends on how the data is cut. With
n_i targets in piece i of k and N in all, piece i has the weight k n_i / N, and the loss is that of one batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoplan.capture.program import Capture
from autoplan.errors import BadInputError
from autoplan.regions import side_input_graph
from autoplan_passes.stages import capture_loss, parameter_free_chain

PASSED_ON = frozenset({"view", "reshape", "_to_copy", "clone", "alias", "squeeze", "contiguous"})


@dataclass(frozen=True)
class TargetCount:
    """Counts the targets of a piece: ``graph`` makes them from the user inputs ``inputs`` (placeholders)."""

    graph: fx.GraphModule
    inputs: tuple[str, ...]
    ignore_index: int

    def count(self, piece: Mapping[str, torch.Tensor]) -> int:
        """Targets of one micro-batch that are not ignored."""
        (targets,) = self.graph(*(piece[name] for name in self.inputs))
        return int((targets != self.ignore_index).sum())


def find_target_count(capture: Capture) -> TargetCount | None:
    """How to count targets, where the loss is a cross-entropy averaged over class indices; else None.

    (A loss that is a sum of several means keeps the mean of means.)
    """
    nodes = {node.name: node for node in capture.graph.nodes}
    node = nodes[capture_loss(capture)]
    while _name(node) in PASSED_ON and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    if _name(node) != "cross_entropy_loss":
        return None
    arguments = _cross_entropy_arguments(node)
    targets = arguments["target"]
    if arguments["weight"] is not None or arguments["reduction"] != 1 or not isinstance(targets, fx.Node):
        return None
    if targets.meta["val"].is_floating_point() or parameter_free_chain(targets) is None:
        return None
    graph = side_input_graph(capture, [targets.name], capture.batch)
    held = [n for n in graph.graph.nodes if n.op == "placeholder"]
    if any(n.meta["kind"] != "input" for n in held):
        return None
    return TargetCount(graph, tuple(str(n.meta["source"]) for n in held), int(arguments["ignore_index"]))


def piece_weights(counter: TargetCount | None, pieces: Sequence[Mapping[str, torch.Tensor]]) -> list[float]:
    """The weight of each piece of a global batch; all 1 where pieces count alike.

    Raises :class:`BadInputError` for a piece without any target, whose mean is 0 / 0.
    """
    if counter is None or len(pieces) == 1:
        return [1.0] * len(pieces)
    counts = [counter.count(piece) for piece in pieces]
    if 0 in counts:
        raise BadInputError(
            f"Expected targets in every micro-batch, but all labels of micro-batch {counts.index(0)} "
            f"of {len(counts)} are {counter.ignore_index} (ignored). Use larger ones: --pin micro_batch=N."
        )
    total = sum(counts)
    return [count * len(counts) / total for count in counts]


def _name(node: fx.Node) -> str:
    target: Any = node.target
    schema = getattr(target, "_schema", None)
    return str(schema.name).partition("::")[2] if schema is not None else ""


def _cross_entropy_arguments(node: fx.Node) -> dict[str, Any]:
    target: Any = node.target
    schema = target._schema.arguments
    given = {argument.name: value for argument, value in zip(schema, node.args)}
    defaults = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    return {**defaults, **given, **node.kwargs}
