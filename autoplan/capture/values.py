"""A graph node comes in; what it reads, writes and aliases, and its fake value, go out."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoplan.capture.internals import FakeTensor, OpOverload, schema_of


def is_getitem(node: fx.Node) -> bool:
    """Whether the node picks one output of its producer."""
    return node.op == "call_function" and node.target is operator.getitem


def _schema_arguments(node: fx.Node) -> list[tuple[Any, Any]]:
    """(schema argument, what the node passes for it)."""
    op: Any = node.target
    pairs: list[tuple[Any, Any]] = []
    for index, argument in enumerate(schema_of(op).arguments):
        if index < len(node.args) and not argument.kwarg_only:
            pairs.append((argument, node.args[index]))
        elif argument.name in node.kwargs:
            pairs.append((argument, node.kwargs[argument.name]))
    return pairs


def written_arguments(node: fx.Node) -> tuple[fx.Node, ...]:
    """The nodes that an in-place op writes to."""
    if not isinstance(node.target, OpOverload) or not schema_of(node.target).is_mutable:
        return ()
    written = [v for a, v in _schema_arguments(node) if a.alias_info is not None and a.alias_info.is_write]
    return tuple(n for n in pytree.tree_leaves(written) if isinstance(n, fx.Node))


def alias_argument(node: fx.Node) -> fx.Node | None:
    """The input that the node's output is a view of, if any (a getitem: its producer's)."""
    if is_getitem(node):
        return alias_argument(node.all_input_nodes[0]) and node.all_input_nodes[0]
    if not isinstance(node.target, OpOverload):
        return None
    schema = schema_of(node.target)
    if schema.is_mutable or not any(r.alias_info is not None for r in schema.returns):
        return None
    aliased = [v for a, v in _schema_arguments(node) if a.alias_info is not None]
    return next((v for v in aliased if isinstance(v, fx.Node)), None)


def fake_mode_of(node: fx.Node) -> Any:
    """The FakeTensorMode of the node's inputs, or of any node before it."""
    candidates = [*node.all_input_nodes, node, *node.graph.nodes]
    for source in candidates:
        for tensor in pytree.tree_leaves(source.meta.get("val")):
            if isinstance(tensor, FakeTensor):
                return tensor.fake_mode
    raise AssertionError(f"no fake tensor around {node.name}")


def run_on_fakes(node: fx.Node) -> Any:
    """Run one call node on the fake values of its inputs, as the tracer would.

    Inputs with ``meta["requires_grad"]`` want gradients: attention picks its kernel (and strides) by it.
    """
    leaves, structure = pytree.tree_flatten((tuple(node.args), dict(node.kwargs)))
    wanting = any(leaf.meta.get("requires_grad") for leaf in leaves if isinstance(leaf, fx.Node))
    values = [_fake_of(leaf) if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
    args, kwargs = pytree.tree_unflatten(values, structure)
    target: Any = node.target
    with torch.set_grad_enabled(wanting), fake_mode_of(node):
        result = target(*args, **kwargs)
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, result) if wanting else result


def _fake_of(node: fx.Node) -> Any:
    value = node.meta["val"]
    if node.meta.get("requires_grad") and isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().requires_grad_()
    return value
