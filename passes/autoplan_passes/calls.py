"""What an op was called with: an FX node comes in, its named arguments and tensor shapes go out."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from inspect import signature
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from autoplan_passes.dims import Shape

# Ops whose result is a list of pieces of their input: the list stands for the whole input.
PIECES = ("aten.split", "aten.split_with_sizes", "aten.chunk", "aten.unbind", "aten.tensor_split")


def op_name(node: fx.Node) -> str:
    """``aten.linear``, ``getitem``; empty for nodes that are not calls."""
    if node.op != "call_function":
        return ""
    if node.target is operator.getitem:
        return "getitem"
    if isinstance(node.target, OpOverload):
        return node.target.name().split(".")[0].replace("::", ".")
    return getattr(node.target, "__name__", str(node.target))


def overload_name(node: fx.Node) -> str:
    """``aten.min.other``: the op with its overload."""
    return node.target.name().replace("::", ".") if isinstance(node.target, OpOverload) else op_name(node)


def schema_defaults(op: OpOverload) -> dict[str, Any]:
    """Names of an op's arguments, in order, with their default values (None where there is none)."""
    arguments = op._schema.arguments  # pyright: ignore[reportPrivateUsage] - torch has no public schema
    return {a.name: a.default_value if a.has_default_value() else None for a in arguments}


@lru_cache
def parameter_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of a Python function's arguments, in order; an item is taken of ``input`` at ``index``."""
    return ("input", "index") if function is operator.getitem else tuple(signature(function).parameters)


def is_tensor(node: fx.Node) -> bool:
    """Whether the node's value is a tensor or a list of tensors."""
    value = node.meta.get("val")
    return isinstance(value, (torch.Tensor, tuple, list))


def first_tensor(node: fx.Node) -> torch.Tensor:
    """The node's tensor, or the first of its list."""
    value = node.meta["val"]
    return value if isinstance(value, torch.Tensor) else next(v for v in value if isinstance(v, torch.Tensor))


def shape_of(node: fx.Node) -> Shape:
    """Global shape that the node's placement is about; of a list of pieces, the shape of their whole."""
    if op_name(node) in PIECES:
        return shape_of(node.all_input_nodes[0])
    return tuple(first_tensor(node).shape)


def tensor_inputs(node: fx.Node) -> tuple[fx.Node, ...]:
    """The distinct tensor-valued inputs, in the order of ``all_input_nodes``."""
    return tuple(n for n in node.all_input_nodes if is_tensor(n))


def output_nodes(graph: fx.Graph) -> list[fx.Node]:
    """The outputs of a graph, in order."""
    given = graph.output_node().args[0]
    values = given if isinstance(given, (tuple, list)) else (given,)
    return [value for value in values if isinstance(value, fx.Node)]


@dataclass(frozen=True)
class Call:
    """One call of an op; ``tensors`` has every tensor argument in order, repeats included."""

    node: fx.Node

    @cached_property
    def name(self) -> str:
        return op_name(self.node)

    @cached_property
    def arguments(self) -> Mapping[str, Any]:
        target = self.node.target
        if not isinstance(target, OpOverload):
            return {**dict(zip(parameter_names(target), self.node.args)), **self.node.kwargs}
        defaults = schema_defaults(target)
        return {**defaults, **dict(zip(defaults, self.node.args)), **self.node.kwargs}

    @cached_property
    def tensors(self) -> tuple[fx.Node, ...]:
        found: list[fx.Node] = []
        fx.map_arg((self.node.args, self.node.kwargs), lambda n: found.append(n) if is_tensor(n) else None)
        return tuple(found)

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        return tuple(shape_of(n) for n in self.tensors)

    @cached_property
    def output(self) -> Shape:
        return shape_of(self.node)

    def dim(self, name: str = "dim", default: int = -1, rank: int | None = None) -> int:
        """A dim argument, counted from the front."""
        value = self.arguments.get(name)
        value = default if value is None else value
        return int(value) % max(rank if rank is not None else len(self.shapes[0]), 1)

    def dims(self, name: str = "dim") -> tuple[int, ...]:
        """A dim or dims argument, counted from the front; none given means all."""
        value, rank = self.arguments.get(name), len(self.shapes[0])
        if value is None or value == []:
            return tuple(range(rank))
        listed: list[int] = [value] if isinstance(value, int) else list(value)
        return tuple(int(d) % max(rank, 1) for d in listed)
