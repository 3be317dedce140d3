"""A compound view op (reshape, contiguous, to, chunk, ...) comes in; simple ops of equal meaning go out."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from autoplan.capture.internals import FakeTensor

aten = torch.ops.aten
Emit = Callable[..., fx.Node]


def lower(node: fx.Node, args: Any, kwargs: Any, emit: Emit) -> fx.Node:
    """Emit the simple ops for ``node`` on new arguments; gives the node that holds its value."""
    rule = LOWERED.get(node.target, _by_tracing)
    return rule(node, args, kwargs, emit)


def row_major(tensor: torch.Tensor) -> bool:
    """Contiguous in a way that does not change with the batch: strides of dims of size 1 count too."""
    step = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride())):
        if stride != step:
            return False
        step *= max(size, 1)
    return True


def viewable(shape: Sequence[int], strides: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether a view can give the shape ``wanted``, dims of size 1 counted as if they were larger.

    The algorithm of ``at::detail::computeStride``: dims whose strides chain form a block; the wanted dims
    must cut each block evenly.
    """
    blocks: list[int] = []
    for dim in range(len(shape)):
        chains = dim > 0 and strides[dim - 1] == strides[dim] * shape[dim]
        if chains:
            blocks[-1] *= shape[dim]
        else:
            blocks.append(shape[dim])
    sizes = iter(wanted)
    for block in blocks:
        left = 1
        while left < block:
            left *= next(sizes, block + 1)
        if left != block:
            return False
    return True


def _reshape(node: fx.Node, args: Any, kwargs: Any, emit: Emit) -> fx.Node:
    """A view where one is possible, else a copy."""
    source, after = args[0], node.meta["val"]
    before = source.meta["val"]
    shape = args[1] if node.target is aten.reshape.default else list(after.shape)
    if before.shape == after.shape:
        return source
    if viewable(before.shape, before.stride(), after.shape):
        return emit(aten.view.default, source, shape)
    copy = emit(aten.clone.default, source, memory_format=torch.contiguous_format)
    return emit(aten._unsafe_view.default, copy, shape)


def _contiguous(node: fx.Node, args: Any, kwargs: Any, emit: Emit) -> fx.Node:
    layout = kwargs.get("memory_format", torch.contiguous_format)
    before = args[0].meta["val"]
    if layout is torch.contiguous_format:
        done = row_major(before)
    else:
        done = before.is_contiguous(memory_format=layout)
    return args[0] if done else emit(aten.clone.default, args[0], memory_format=layout)


def _to(node: fx.Node, args: Any, kwargs: Any, emit: Emit) -> fx.Node:
    """A cast, or nothing where the dtype stays (every tensor is on one device)."""
    dtype = node.meta["val"].dtype
    if dtype == args[0].meta["val"].dtype:
        return args[0]
    return emit(aten._to_copy.default, args[0], dtype=dtype)


def _dropout(node: fx.Node, args: Any, kwargs: Any, emit: Emit) -> fx.Node:
    source, probability, train = args
    if probability == 0 or not train:
        return source
    return emit(operator.getitem, emit(aten.native_dropout.default, source, probability, train), 0)


def _copy(node: fx.Node, args: Any, kwargs: Any, emit: Emit) -> fx.Node:
    return emit(aten.clone.default, args[0])


LOWERED: dict[Any, Callable[[fx.Node, Any, Any, Emit], fx.Node]] = {
    aten.reshape.default: _reshape,
    aten.flatten.using_ints: _reshape,
    aten.unflatten.int: _reshape,
    aten.view_as.default: _reshape,
    aten.reshape_as.default: _reshape,
    aten.contiguous.default: _contiguous,
    aten.to.dtype: _to,
    aten.to.dtype_layout: _to,
    aten.to.device: _to,
    aten.to.other: _to,
    aten.type_as.default: _to,
    aten.dropout.default: _dropout,
    aten.lift_fresh_copy.default: _copy,
}


def _by_tracing(node: fx.Node, args: Any, kwargs: Any, emit: Emit) -> fx.Node:
    """Trace the one op on fakes below autograd, where it is made of simple views, and copy what comes out."""
    leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
    nodes = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]
    fakes: list[Any] = [n.meta["val"] for n in nodes]
    target: Any = node.target

    def op(*tensors: torch.Tensor) -> Any:
        queue = list(tensors)
        values = [queue.pop(0) if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
        call_args, call_kwargs = pytree.tree_unflatten(values, structure)
        return target(*call_args, **call_kwargs)

    mode = next(f.fake_mode for f in fakes if isinstance(f, FakeTensor))
    with mode, torch.no_grad():
        traced = make_fx(op)(*fakes)
    return _splice(traced.graph, nodes, emit)


def _splice(graph: fx.Graph, inputs: Sequence[fx.Node], emit: Emit) -> fx.Node:
    """Emit the nodes of a small graph; a tuple result is packed as the list it is."""
    queue = list(inputs)
    env: dict[fx.Node, Any] = {}
    result: Any = None
    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = queue.pop(0)
        elif node.op == "output":
            result = node.args[0]
        else:
            args, kwargs = map_arg((node.args, node.kwargs), env.__getitem__)
            env[node] = emit(node.target, *args, **kwargs)
    if isinstance(result, fx.Node):
        return env[result]
    producers = {n.all_input_nodes[0] for n in result}
    return env[producers.pop()]
