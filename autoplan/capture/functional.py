"""An exported graph comes in; the same graph without in-place ops, and with simple ops only, goes out.

    y = x[:, 1:]              y = slice(x, 1, 1)
    y.mul_(2)        -->      y1 = mul(y, 2); x1 = slice_scatter(x, y1, 1, 1)
    f(x)                      f(x1)

Linear, attention and cross-entropy stay whole. It does what ``ExportedProgram.run_decompositions({})``
does, node by node instead of by tracing again (half the time of a capture), and decides "is it contiguous"
and "is it a view" in a way that is the same at batch 1 and at larger batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import ExportGraphSignature, OutputKind
from torch.fx.node import map_arg

from autoplan.capture.batch import output_tensors
from autoplan.capture.internals import OpOverload, is_composite
from autoplan.capture.lowering import LOWERED, lower
from autoplan.capture.values import alias_argument, is_getitem, run_on_fakes, written_arguments

aten = torch.ops.aten
CHECKS = frozenset(
    {
        "aten._assert_tensor_metadata.default",
        "aten._assert_async.msg",
        "aten._assert_scalar.default",
        "aten.sym_constrain_range_for_size.default",
        "aten.sym_constrain_range.default",
    }
)


class NotFunctional(Exception):
    """An in-place pattern that the rewrite below does not know."""


class Functionaliser:
    """Rewrites one flat graph into ``self.graph``, keeping track of which nodes share storage.

    ``base[n]`` is the node that owns the storage of n, ``parent[n]`` the node that n is a view of.
    A write to a base makes its views stale; a stale view is made again when it is next read.
    """

    def __init__(self, source: fx.Graph) -> None:
        self.source = source
        self.graph = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.base: dict[fx.Node, fx.Node] = {}
        self.parent: dict[fx.Node, fx.Node] = {}
        self.version: dict[fx.Node, int] = {}
        self.fresh: dict[fx.Node, int] = {}
        self.meta: dict[str, Any] = {}
        self.written: set[str] = set()

    def run(self) -> fx.Graph:
        """The functional graph; placeholders keep their names and order."""
        for node in self.source.nodes:
            if node.op == "placeholder":
                new = self.graph.placeholder(node.name)
                new.meta = dict(node.meta)
                self._own(node, new)
            elif node.op == "output":
                self.graph.output(map_arg(node.args[0], self.read))
            elif node.op != "call_function" or not _is_plain(node):
                raise NotFunctional(f"{node.op} {node.target}")
            elif str(node.target) not in CHECKS:
                self.meta = node.meta
                self._call(node)
        return self.graph

    def _own(self, node: fx.Node, new: fx.Node) -> None:
        self.env[node], self.base[node] = new, node
        self.version[node] = self.fresh[node] = 0

    def _view(self, node: fx.Node, parent: fx.Node, new: fx.Node) -> None:
        self.env[node], self.parent[node] = new, parent
        self.base[node] = self.base[parent]
        self.fresh[node] = self.version[self.base[node]]

    def read(self, node: fx.Node) -> fx.Node:
        """The new node that holds the current value of ``node``."""
        if self.fresh[node] != self.version[self.base[node]]:
            current = self.read(self.parent[node])
            self.env[node] = current if written_arguments(node) else self._emit_like(node)
            self.fresh[node] = self.version[self.base[node]]
        return self.env[node]

    def write(self, node: fx.Node, value: fx.Node) -> None:
        """Make ``value`` the current value of ``node`` and of every tensor whose storage it shares."""
        if self.base[node] is node:
            self.version[node] += 1
            if node.op == "placeholder":
                self.written.add(node.name)
        else:
            parent = self.parent[node]
            self.write(parent, self._scatter(node, parent, value))
        self.env[node] = value
        self.fresh[node] = self.version[self.base[node]]

    def _call(self, node: fx.Node) -> None:
        written = written_arguments(node)
        if written:
            self._write_in_place(node, written)
            return
        new = self._emit_like(node)
        source = alias_argument(node)
        if source is None or not _shares_storage(node, new, self.env[source]):
            self._own(node, new)
        else:
            self._view(node, source, new)

    def _emit_like(self, node: fx.Node) -> fx.Node:
        """The node again on current values: lowered to simple ops where it is a compound of views."""
        args, kwargs = map_arg((node.args, node.kwargs), self.read)
        if node.target in LOWERED or _is_compound_view(node):
            return lower(node, args, kwargs, self._emit)
        new = self.graph.create_node("call_function", node.target, args, kwargs, name=node.name)
        new.meta = dict(node.meta)
        return new

    def _emit(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Add a node of our own; its value is found by running it on fakes."""
        new = self.graph.create_node("call_function", target, args, kwargs, name=_short_name(target))
        new.meta = {k: v for k, v in self.meta.items() if k != "val"}
        new.meta["val"] = run_on_fakes(new)
        return new

    def _write_in_place(self, node: fx.Node, written: tuple[fx.Node, ...]) -> None:
        """``op_(x, ...)`` --> ``y = op(x, ...)``, and y takes the place of x."""
        if len(written) != 1 or len(output_tensors(node)) != 1:
            raise NotFunctional(str(node.target))
        target = written[0]
        args, kwargs = map_arg((node.args, node.kwargs), self.read)
        value = self._functional_value(node, target, args, kwargs)
        before = self.env[target].meta["val"]
        if value.meta["val"].dtype != before.dtype:
            value = self._emit(aten._to_copy.default, value, dtype=before.dtype)
        if value.meta["val"].shape != before.shape:
            value = self._emit(aten.expand.default, value, list(before.shape))
        self.write(target, value)
        self._same(node, target)

    def _same(self, node: fx.Node, target: fx.Node) -> None:
        """The result of an in-place op is the very tensor it wrote."""
        self.env[node], self.base[node] = self.env[target], self.base[target]
        self.parent[node], self.fresh[node] = target, self.fresh[target]

    def _functional_value(self, node: fx.Node, target: fx.Node, args: Any, kwargs: Any) -> fx.Node:
        op: Any = node.target
        name = op._schema.name.partition("::")[2]
        if name == "copy_":
            return args[1]
        if name == "zero_":
            return self._emit(aten.zeros_like.default, args[0])
        packet = getattr(aten, name.removesuffix("_"), None)
        overload = getattr(packet, op._overloadname, None)
        if overload is None or not name.endswith("_"):
            raise NotFunctional(str(op))
        return self._emit(overload, *args, **kwargs)

    def _scatter(self, node: fx.Node, parent: fx.Node, value: fx.Node) -> fx.Node:
        """The parent's value with ``value`` in the place that the view ``node`` shows."""
        if written_arguments(node):
            return value
        if is_getitem(node):
            raise NotFunctional("write into a piece of a split")
        whole, args = self.read(parent), node.args
        target: Any = node.target
        shape = list(whole.meta["val"].shape)
        if target is aten.slice.Tensor:
            return self._emit(aten.slice_scatter.default, whole, value, *args[1:])
        if target is aten.select.int:
            return self._emit(aten.select_scatter.default, whole, value, *args[1:])
        if target is aten.transpose.int:
            return self._emit(target, value, *args[1:])
        if target in (aten.view.default, aten.unsqueeze.default, aten.squeeze.dim, aten._unsafe_view.default):
            return self._emit(aten.view.default, value, shape)
        if target in (aten.alias.default, aten.detach.default) or self.env[parent] is self.env[node]:
            return value
        raise NotFunctional(f"write through {target}")


@dataclass(frozen=True)
class Functional:
    """A functional graph, the exporter's signature, its constants, and the buffers that forward updated."""

    graph: fx.Graph
    signature: ExportGraphSignature
    constants: Mapping[str, Any]
    updated: tuple[str, ...]


def functional(exported: torch.export.ExportedProgram) -> Functional:
    """The functional form of an exported program; gradients stay bit-equal."""
    try:
        rewriter = Functionaliser(exported.graph)
        graph = rewriter.run()
    except NotFunctional:
        lowered = exported.run_decompositions({})
        outputs = lowered.graph_signature.output_specs
        updated = [str(spec.target) for spec in outputs if spec.kind is OutputKind.BUFFER_MUTATION]
        return Functional(lowered.graph, lowered.graph_signature, lowered.constants, tuple(updated))
    graph.lint()
    buffers = exported.graph_signature.inputs_to_buffers
    statistics = {n.name for node in graph.nodes for n in _running_statistics(node)}
    updated = [name for node, name in buffers.items() if node in rewriter.written | statistics]
    return Functional(graph, exported.graph_signature, exported.constants, tuple(updated))


def _running_statistics(node: fx.Node) -> list[fx.Node]:
    """The buffers that a batch norm updates while it trains (its schema does not say so)."""
    if node.target is not aten.batch_norm.default or not node.args[5]:
        return []
    return [n for n in node.args[3:5] if isinstance(n, fx.Node)]


def _is_plain(node: fx.Node) -> bool:
    return is_getitem(node) or isinstance(node.target, OpOverload)


def _shares_storage(node: fx.Node, new: fx.Node, source: fx.Node) -> bool:
    """Whether the emitted node is a view of ``source`` (a lowered reshape may have copied)."""
    if is_getitem(node) or node.target not in LOWERED:
        return True
    current = new
    while current is not source:
        if alias_argument(current) is None:
            return False
        current = current.all_input_nodes[0]
    return True


def _is_compound_view(node: fx.Node) -> bool:
    """A view op made of other view ops (unflatten, chunk, movedim, ...)."""
    op: Any = node.target
    if is_getitem(node) or alias_argument(node) is None:
        return False
    return is_composite(op)


def _short_name(target: Any) -> str:
    return target._schema.name.partition("::")[2].strip("_") if hasattr(target, "_schema") else "getitem"
