"""Regions: the captured graph cut into consecutive pieces, repeated blocks found by structure.

Comes in: a :class:`~autoplan.capture.program.Capture`. Goes out: :class:`Region` records in execution
order, equal pieces sharing a ``class_id``, and the graph of one region at any batch size.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx, nn
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from autoplan.capture.batch import at_batch, output_tensors
from autoplan.capture.internals import FakeTensor, OpOverload, schema_of
from autoplan.capture.opaque import flops_of
from autoplan.capture.program import BatchForm, Capture
from autoplan.capture.values import run_on_fakes
from autoplan.errors import BadInputError
from autoplan.region_spans import Span, find_spans


@dataclass(frozen=True)
class Region:
    """A run of consecutive nodes that a stage takes whole.

    ``name`` is the module path of a block (``model.layers.0``) or, for what lies round the blocks,
    ``embed``, ``head`` or ``glue.N``. ``inputs`` and ``outputs`` are names of nodes of the
    capture graph (user inputs by their placeholder's name); ``side_inputs`` those computed inputs that
    depend on no parameter (masks, rope tables): a stage may recompute them. Regions of one ``class_id``
    have equal graphs, and their inputs, parameters and outputs correspond by position.
    """

    name: str
    module_class: str
    class_id: str
    nodes: tuple[str, ...]
    inputs: tuple[str, ...]
    side_inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]


def find_regions(capture: Capture) -> tuple[Region, ...]:
    """Cut the graph into regions, in execution order; every node belongs to exactly one."""
    facts = _facts(capture)
    regions = [_region(facts, span) for span in find_spans(capture)]
    return tuple(replace(region, class_id=_class_id(capture, facts, region)) for region in regions)


class _Facts:
    """What is asked of the capture again and again: nodes by name, what needs gradients, what is free."""

    def __init__(self, capture: Capture) -> None:
        held = capture.graph.find_nodes(op="placeholder")
        self.placeholders = {n.meta["source"]: n for n in held if n.meta["kind"] != "input"}
        self.nodes = {node.name: node for node in capture.graph.nodes}
        self.differentiable = differentiable_nodes(capture)
        self.side = side_nodes(capture.graph)


_FACTS: WeakKeyDictionary[fx.Graph, _Facts] = WeakKeyDictionary()


def _facts(capture: Capture) -> _Facts:
    """The facts of a capture, worked out once."""
    if capture.graph not in _FACTS:
        _FACTS[capture.graph] = _Facts(capture)
    return _FACTS[capture.graph]


def differentiable_nodes(capture: Capture) -> set[fx.Node]:
    """Nodes through which a gradient flows to a trainable parameter."""
    found: set[fx.Node] = set()
    for node in capture.graph.nodes:
        if node.op == "placeholder" and node.meta["kind"] == "parameter":
            if capture.parameters[node.meta["source"]].trainable:
                found.add(node)
        elif node.op == "call_function" and node.target is not torch.ops.aten.detach.default:
            floating = any(t.is_floating_point() for t in output_tensors(node))
            if floating and any(n in found for n in node.all_input_nodes):
                found.add(node)
    return found


def side_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Computed nodes that depend on no parameter and on no random draw."""
    tied_down: set[fx.Node] = set()
    free: set[fx.Node] = set()
    for node in graph.nodes:
        random = isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags
        if (
            (node.op == "placeholder" and node.meta["kind"] == "parameter")
            or random
            or any(n in tied_down for n in node.all_input_nodes)
        ):
            tied_down.add(node)
        elif node.op == "call_function":
            free.add(node)
    return free


def _region(facts: _Facts, span: Span) -> Region:
    """The record of one span, its class still open."""
    inside = set(span.nodes)
    inputs: dict[str, fx.Node] = {}
    held: dict[str, dict[str, None]] = {"parameter": {}, "buffer": {}, "constant": {}}
    for node in span.nodes:
        for source in node.all_input_nodes:
            kind = source.meta.get("kind") if source.op == "placeholder" else None
            if kind in held:
                held[str(kind)][source.meta["source"]] = None
            elif source not in inside:
                inputs[source.name] = source
    outputs = [n for n in span.nodes if any(user not in inside for user in n.users)]
    return Region(
        name=span.name,
        module_class=span.module_class,
        class_id="",
        nodes=tuple(n.name for n in span.nodes),
        inputs=tuple(inputs),
        side_inputs=tuple(name for name, node in inputs.items() if node in facts.side),
        outputs=tuple(n.name for n in outputs),
        parameters=tuple(held["parameter"]),
        buffers=(*held["buffer"], *held["constant"]),
    )


def local_name(capture: Capture, region: Region, name: str) -> str:
    """A parameter's name relative to the region's module (the tied alias that lies in the module, if any)."""
    path = region.name.partition("@")[0] + "."
    info = capture.parameters.get(name)
    for alias in (name, *(info.tied_names if info else ())):
        if alias.startswith(path):
            return alias.removeprefix(path)
    return name


def _class_id(capture: Capture, facts: _Facts, region: Region) -> str:
    """Hash of the region's ops, shapes, constants, parameters, wiring and boundary positions."""
    words = {facts.nodes[name]: f"x{i}" for i, name in enumerate(region.inputs)}
    digest = hashlib.sha256()
    for name in region.inputs:
        node = facts.nodes[name]
        digest.update(
            f"in {_shapes(node)} {node in facts.differentiable} {name in region.side_inputs};".encode()
        )
    for source in region.parameters:
        node = facts.placeholders[source]
        words[node] = f"p:{local_name(capture, region, source)}"
        digest.update(f"{words[node]} {_shapes(node)} {capture.parameters[source].trainable};".encode())
    for index, source in enumerate(region.buffers):
        node = facts.placeholders[source]
        words[node] = f"b{index}"
        digest.update(f"{words[node]} {_shapes(node)} {_value_hash(capture, source)};".encode())
    for index, name in enumerate(region.nodes):
        node = facts.nodes[name]
        digest.update(f"{node.target} {_argument_words(node, words)} -> {_shapes(node)};".encode())
        words[node] = f"n{index}"
    digest.update(" ".join(words[facts.nodes[name]] for name in region.outputs).encode())
    return f"{region.module_class}-{digest.hexdigest()[:12]}"


def _shapes(node: fx.Node) -> str:
    return " ".join(f"{t.dtype}{tuple(t.shape)}" for t in output_tensors(node))


def _argument_words(node: fx.Node, words: Mapping[fx.Node, str]) -> str:
    leaves, structure = pytree.tree_flatten((tuple(node.args), dict(node.kwargs)))
    return (
        " ".join(words[x] if isinstance(x, fx.Node) else repr(x) for x in leaves) + f" {structure.num_nodes}"
    )


def _value_hash(capture: Capture, name: str) -> str:
    """Constants of equal regions are equal in value; buffers are told apart by shape alone."""
    value = capture.constants.get(name)
    if value is None or value.is_meta or isinstance(value, FakeTensor):
        return ""
    return hashlib.sha256(
        value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    ).hexdigest()


def region_graph(capture: Capture, region: Region, batch: int) -> fx.GraphModule:
    """The region alone as a functional graph at micro-batch ``batch``.

    Placeholders in this order: the region's inputs, its parameters, its buffers and constants, each with
    ``meta["kind"]`` (``input parameter buffer constant``), ``meta["source"]`` (the name in the capture:
    node name, or qualified parameter name), ``meta["val"]`` and ``meta["requires_grad"]``. The output is a
    tuple of the region's outputs. Node names are canonical: they depend on the region's class alone, so a
    layout made for one region serves every region of its class.
    Raises :class:`BadInputError` when the batch size cannot be changed.
    """
    names = (region.inputs, region.parameters, region.buffers)
    return _subgraph(capture, region, names, region.nodes, region.outputs, batch)


def side_input_graph(capture: Capture, names: Sequence[str], batch: int) -> fx.GraphModule:
    """The graph that computes side inputs ``names`` from user inputs, buffers and constants alone."""
    nodes = {node.name: node for node in capture.graph.nodes}
    needed: dict[fx.Node, None] = {}
    stack = [nodes[name] for name in names]
    while stack:
        node = stack.pop()
        if node not in needed:
            needed[node] = None
            stack.extend(node.all_input_nodes)
    order = [node for node in capture.graph.nodes if node in needed]
    inputs = tuple(n.name for n in order if n.op == "placeholder" and n.meta["kind"] == "input")
    held = tuple(n.meta["source"] for n in order if n.op == "placeholder" and n.meta["kind"] != "input")
    calls = tuple(n.name for n in order if n.op == "call_function")
    region = Region("side", "side", "side", calls, inputs, (), tuple(names), (), held)
    return _subgraph(capture, region, (inputs, (), held), calls, tuple(names), batch)


def _subgraph(
    capture: Capture,
    region: Region,
    held: tuple[Sequence[str], Sequence[str], Sequence[str]],
    calls: Sequence[str],
    outputs: Sequence[str],
    batch: int,
) -> fx.GraphModule:
    extra = batch - capture.batch
    if extra and not capture.batch_form.known:
        raise BadInputError(
            f"micro-batch {batch} was asked of a model whose batch size is fixed at {capture.batch}: "
            f"use --pin micro_batch={capture.batch}."
        )
    facts = _facts(capture)
    nodes = facts.nodes
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for index, name in enumerate(held[0]):
        _add_placeholder(graph, env, nodes[name], f"x_{index}", "input", name)
    for name in held[1]:
        local = re.sub(r"\W", "_", local_name(capture, region, name))
        _add_placeholder(graph, env, facts.placeholders[name], f"p_{local}", "parameter", name)
    for index, name in enumerate(held[2]):
        kind = facts.placeholders[name].meta["kind"]
        local = re.sub(r"\W", "_", local_name(capture, region, name)) if kind == "buffer" else str(index)
        _add_placeholder(graph, env, facts.placeholders[name], f"{kind[0]}_{local}", kind, name)
    for old, new in env.items():
        new.meta["requires_grad"] = old in facts.differentiable
        if extra and old.name in capture.batch_form.shapes:
            new.meta["val"] = _grown(old, capture.batch_form, extra)
    for name in calls:
        _add_call(graph, env, nodes[name], capture, extra)
        env[nodes[name]].meta["requires_grad"] = nodes[name] in facts.differentiable
    graph.output(tuple(env[nodes[name]] for name in outputs))
    return fx.GraphModule(nn.Module(), graph)


def _add_placeholder(
    graph: fx.Graph, env: dict[fx.Node, fx.Node], old: fx.Node, name: str, kind: str, source: str
) -> None:
    env[old] = graph.create_node("placeholder", name, name=name)  # graph.placeholder() would lower the case
    env[old].meta = {"val": old.meta["val"], "kind": kind, "source": source}


def _add_call(
    graph: fx.Graph, env: dict[fx.Node, fx.Node], old: fx.Node, capture: Capture, extra: int
) -> None:
    """Copy one node under its canonical name; at another batch, patch its integers and re-run it on fakes."""
    args, kwargs = at_batch(old, capture.batch_form, extra)
    args, kwargs = map_arg((args, kwargs), env.__getitem__)
    new = graph.create_node("call_function", old.target, args, kwargs, name=canonical_target_name(old))
    new.meta = {**old.meta, "source": old.name}
    env[old] = new
    if extra:
        new.meta["val"] = run_on_fakes(new)
        if "opaque" in new.meta:
            new.meta["flops"] = flops_of(new)


def canonical_target_name(node: fx.Node) -> str:
    """``aten.linear.default`` -> ``linear``."""
    target: Any = node.target
    name = schema_of(target).name.partition("::")[2] if isinstance(target, OpOverload) else target.__name__
    return name.strip("_") or "op"


def _grown(node: fx.Node, form: BatchForm, extra: int) -> Any:
    """The node's value with every dim and stride moved by ``extra`` samples."""
    dims, steps = iter(form.shapes[node.name]), iter(form.strides[node.name])

    def grown(tensor: torch.Tensor) -> torch.Tensor:
        shape = [int(size) + next(dims) * extra for size in tensor.shape]
        strides = [at_larger + growth * (extra - 1) for at_larger, growth in (next(steps) for _ in shape)]
        with tensor.fake_mode:  # pyright: ignore[reportAttributeAccessIssue]: graph values are FakeTensors
            return torch.empty_strided(shape, strides, dtype=tensor.dtype, device="cpu")

    return pytree.tree_map_only(torch.Tensor, grown, node.meta["val"])
