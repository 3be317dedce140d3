"""The loss of a captured model in, how much each micro-batch counts in the loss of the global batch out.

A mean over tokens is divided by the tokens it counts. Where micro-batches count different numbers (labels
with ``ignore_index``, masks), the mean of their means is another loss, and depends on how the data is cut.
With n_i targets in piece i of k and N in all, piece i has the weight k n_i / N, and the mean over pieces is
that of one batch. A sum over the batch has the weight k. A loss that adds several of these up has one term
for each (:func:`find_loss_terms`); all else is averaged as it comes, piece by piece.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoplan.capture.program import Capture
from autoplan.errors import BadInputError
from autoplan.regions import side_input_graph
from autoplan_passes.loss_terms import PASSED_ON, loss_leaves, op_name
from autoplan_passes.stages import capture_loss, parameter_free_chain

LIKELIHOODS = frozenset({"cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"})
FLOORS = frozenset({"clamp", "clamp_min", "maximum"})
MEAN, SUM = 1, 2  # ATen's numbers for reductions

Piece = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Count:
    """What a mean divides by, from a piece of the batch alone: ``graph`` makes it from the user inputs
    ``inputs`` (placeholders).

    With ``ignored`` the graph makes class indices, of which those that differ are counted. ``may_be_zero``:
    the model itself keeps from dividing by zero.
    """

    graph: fx.GraphModule
    inputs: tuple[str, ...]
    ignored: int | None = None
    may_be_zero: bool = False

    def of(self, piece: Piece) -> float:
        """The count of one micro-batch."""
        (made,) = self.graph(*(piece[name] for name in self.inputs))
        return float(made if self.ignored is None else (made != self.ignored).sum())


@dataclass(frozen=True)
class LossTerm:
    """One of the terms whose sum is the loss: a mean of ``count``, a sum over the batch, or (neither) what is
    averaged over the pieces as it is."""

    count: Count | None = None
    is_sum: bool = False

    def weights(self, pieces: Sequence[Piece]) -> list[float]:
        """The weight of each piece; their mean is 1, or their number for a sum.

        Raises :class:`BadInputError` for a piece whose mean is 0 / 0.
        """
        number = len(pieces)
        if self.count is None or number == 1:
            return [float(number if self.is_sum else 1)] * number
        counts = [self.count.of(piece) for piece in pieces]
        total = sum(counts)
        if total == 0 or (0.0 in counts and not self.count.may_be_zero):
            ignored = self.count.ignored
            what = f"are {ignored} (ignored)" if ignored is not None else "are masked"
            raise BadInputError(
                f"Expected targets in every micro-batch, but all labels of micro-batch {counts.index(0.0)} "
                f"of {number} {what}. Use larger ones: --pin micro_batch=N."
            )
        return [count * number / total for count in counts]


def find_loss_terms(capture: Capture) -> tuple[LossTerm, ...]:
    """The terms of the loss, in the order in which :func:`split_loss` finds them; one where they all count
    alike."""
    nodes = {node.name: node for node in capture.graph.nodes}
    terms = tuple(_term(capture, leaf) for leaf in loss_leaves(nodes[capture_loss(capture)]))
    alike = all(term.count is None and term.is_sum == terms[0].is_sum for term in terms)
    return terms[:1] if alike else terms


def piece_weights(terms: Sequence[LossTerm], pieces: Sequence[Piece]) -> list[tuple[float, ...]]:
    """The weights of the terms in each piece of a global batch."""
    return list(zip(*(term.weights(pieces) for term in terms)))


def _term(capture: Capture, leaf: fx.Node) -> LossTerm:
    name = op_name(leaf)
    if name in LIKELIHOODS:
        arguments = _arguments(leaf)
        if arguments["reduction"] == SUM:
            return LossTerm(is_sum=True)
        return LossTerm(_target_count(capture, arguments))
    if name == "div" and len(leaf.all_input_nodes) == 2:
        above, below = leaf.all_input_nodes
        if _is_batch_sum(above):
            return LossTerm(_ratio_count(capture, below), is_sum=_is_given_whole(below))
        return LossTerm()
    if _is_batch_sum(leaf):
        return LossTerm(is_sum=not _is_divided_by_batch(capture, leaf))
    return LossTerm()


def _target_count(capture: Capture, arguments: Mapping[str, Any]) -> Count | None:
    """Of a mean likelihood of class indices, all of one weight."""
    targets = arguments.get("target", arguments.get("self"))
    if arguments.get("weight") is not None or arguments["reduction"] != MEAN:
        return None
    if not isinstance(targets, fx.Node) or targets.meta["val"].is_floating_point():
        return None
    made = _from_inputs(capture, targets)
    return made and Count(*made, ignored=int(arguments["ignore_index"]))


def _ratio_count(capture: Capture, below: fx.Node) -> Count | None:
    """Of a sum that is divided by a number the batch gives, such as that of a mask's entries."""
    floored = False
    while op_name(below) in PASSED_ON | FLOORS and len(below.all_input_nodes) == 1:
        floored = floored or op_name(below) in FLOORS
        below = below.all_input_nodes[0]
    if not _is_batch_sum(below):
        return None
    made = _from_inputs(capture, below)
    return made and Count(*made, may_be_zero=floored)


def _from_inputs(capture: Capture, node: fx.Node) -> tuple[fx.GraphModule, tuple[str, ...]] | None:
    """The graph that makes a value from the batch alone, and what it reads."""
    if parameter_free_chain(node) is None:
        return None
    graph = side_input_graph(capture, [node.name], capture.batch)
    held = [n for n in graph.graph.nodes if n.op == "placeholder"]
    if any(n.meta["kind"] != "input" for n in held):
        return None
    return graph, tuple(str(n.meta["source"]) for n in held)


def _is_batch_sum(node: fx.Node) -> bool:
    """Whether a node sums something made from the batch up to one number (a penalty on weights does not)."""
    while op_name(node) in PASSED_ON and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    reduces = op_name(node) in ("sum", "count_nonzero") or _reduction(node) == SUM
    if not reduces or node.meta["val"].dim() != 0:
        return False
    return any(_reads_batch(source) for source in node.all_input_nodes)


def _reads_batch(node: fx.Node) -> bool:
    """Whether a value is made from an input of the user."""
    seen: set[fx.Node] = set()
    pending = [node]
    while pending:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        if current.op == "placeholder" and current.meta.get("kind") == "input":
            return True
        pending.extend(current.all_input_nodes)
    return False


def _reduction(node: fx.Node) -> Any:
    return _arguments(node).get("reduction") if node.op == "call_function" else None


def _is_given_whole(node: fx.Node) -> bool:
    """Whether a divisor is a single number of the batch, which every micro-batch is given."""
    return node.op == "placeholder" and node.meta.get("kind") == "input" and node.meta["val"].dim() == 0


def _is_divided_by_batch(capture: Capture, leaf: fx.Node) -> bool:
    """Whether what is summed is divided by how many samples, or entries of them, there are: a mean.

    A trace knows numbers alone: one that is the product of the leading dims of what is summed counts them.
    """
    dims = leaf.all_input_nodes[0].meta["val"].shape
    counts = {capture.batch, *itertools.accumulate(dims, operator.mul)}
    node = leaf
    while node.users:
        node = next(iter(node.users))
        if op_name(node) == "div" and any(number in counts for number in node.args[1:]):
            return True
    return False


def _arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of an ATen op by name, defaults filled in."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return {}
    given = {argument.name: value for argument, value in zip(schema.arguments, node.args)}
    filled = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    return {**filled, **given, **node.kwargs}
