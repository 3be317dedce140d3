"""Captures of one model at two neighbouring batch sizes come in; how all grows with the batch goes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoplan.capture.program import BatchForm


@dataclass(frozen=True)
class NodeForm:
    """One node with its integers taken out: ``skeleton`` must not change with the batch, the integers may."""

    skeleton: str
    integers: tuple[int, ...]
    dims: tuple[int, ...]
    strides: tuple[int, ...]


def is_integer(value: object) -> bool:
    """An int that may count samples (not a bool)."""
    return isinstance(value, int) and not isinstance(value, bool)


def flat_arguments(node: fx.Node) -> list[Any]:
    """The node's (args, kwargs) flattened; ``None`` and nodes are leaves."""
    return pytree.tree_flatten((tuple(node.args), dict(node.kwargs)))[0]


def node_forms(graph: fx.Graph) -> list[NodeForm]:
    """Every node of the graph in order, nodes numbered."""
    numbers = {node: i for i, node in enumerate(graph.nodes)}
    return [_node_form(node, numbers) for node in graph.nodes]


def _node_form(node: fx.Node, numbers: dict[fx.Node, int]) -> NodeForm:
    leaves, structure = pytree.tree_flatten((tuple(node.args), dict(node.kwargs)))
    words = [_word(leaf, numbers) for leaf in leaves]
    tensors = output_tensors(node)
    dims = tuple(int(d) for t in tensors for d in t.shape)
    strides = tuple(int(s) for t in tensors for s in t.stride())
    types = ",".join(f"{t.dtype}{t.dim()}" for t in tensors)
    target = node.meta.get("source", "") if node.op == "placeholder" else node.target
    skeleton = f"{node.op} {target} {' '.join(words)} {len(leaves)} {structure.num_nodes} -> {types}"
    return NodeForm(skeleton, tuple(leaf for leaf in leaves if is_integer(leaf)), dims, strides)


def _word(leaf: Any, numbers: dict[fx.Node, int]) -> str:
    if isinstance(leaf, fx.Node):
        return f"%{numbers[leaf]}"
    return "#" if is_integer(leaf) else repr(leaf)


def output_tensors(node: fx.Node) -> list[torch.Tensor]:
    """The tensors a node gives, flattened."""
    return [v for v in pytree.tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor)]


def same_structure(first: Sequence[NodeForm], second: Sequence[NodeForm]) -> bool:
    """Whether the two graphs differ in integers alone."""
    return len(first) == len(second) and all(
        a.skeleton == b.skeleton and len(a.integers) == len(b.integers) and len(a.dims) == len(b.dims)
        for a, b in zip(first, second)
    )


def batch_form(graph: fx.Graph, smaller: Sequence[NodeForm], larger: Sequence[NodeForm]) -> BatchForm:
    """Growth per extra sample, from the forms at batch b (of ``graph``) and b + 1."""
    arguments: dict[str, tuple[int, ...]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    strides: dict[str, tuple[tuple[int, int], ...]] = {}
    for node, a, b in zip(graph.nodes, smaller, larger, strict=True):
        grown = tuple(y - x for x, y in zip(a.integers, b.integers))
        widened = tuple(y - x for x, y in zip(a.dims, b.dims))
        if any(grown):
            arguments[node.name] = grown
        if any(widened):
            shapes[node.name] = widened
            # the stride of a dim of size 1 means nothing: a batch of one shows it at the larger size
            steps = zip(a.dims, a.strides, b.strides)
            strides[node.name] = tuple((y, y - x if size > 1 else 0) for size, x, y in steps)
    return BatchForm(arguments=arguments, shapes=shapes, strides=strides, known=True)


def node_of_pairs(graph: fx.Graph, form: BatchForm) -> fx.Node | None:
    """The first node that holds a number for each pair of samples: computed from parameters, floating, with
    two dims that both grow with the batch."""
    learned: set[fx.Node] = set()
    for node in graph.nodes:
        if node.meta.get("kind") == "parameter":
            learned.add(node)
        if not learned.intersection(node.all_input_nodes):
            continue
        learned.add(node)
        steps = iter(form.shapes.get(node.name, ()))
        for tensor in output_tensors(node):
            growing = [dim for dim in range(tensor.dim()) if next(steps, 0)]
            if len(growing) > 1 and tensor.is_floating_point():
                return node
    return None


def at_batch(node: fx.Node, form: BatchForm, extra: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The node's (args, kwargs) with every integer moved by ``extra`` samples; nodes are left as they are."""
    growth = form.arguments.get(node.name)
    if not growth or not extra:
        return tuple(node.args), dict(node.kwargs)
    leaves, structure = pytree.tree_flatten((tuple(node.args), dict(node.kwargs)))
    steps = iter(growth)
    moved = [leaf + next(steps) * extra if is_integer(leaf) else leaf for leaf in leaves]
    return pytree.tree_unflatten(moved, structure)
