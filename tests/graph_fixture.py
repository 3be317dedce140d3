"""Region graphs for tests: a small module and its inputs come in, a functional graph with kinds goes out."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Sequence

import torch
from torch import fx, nn


def functional_graph(
    module: nn.Module, inputs: Sequence[torch.Tensor], *, needs_gradient: bool = True
) -> fx.GraphModule:
    """The graph of one module as ``region_graph`` makes them: inputs, parameters, buffers, constants."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch.export trips over its own deprecations
        exported = torch.export.export(module, tuple(inputs), strict=False).run_decompositions({})
    kinds = {
        **dict.fromkeys(exported.graph_signature.inputs_to_parameters, "parameter"),
        **dict.fromkeys(exported.graph_signature.inputs_to_buffers, "buffer"),
        **dict.fromkeys(exported.graph_signature.inputs_to_lifted_tensor_constants, "constant"),
    }
    sources = {
        **exported.graph_signature.inputs_to_parameters,
        **exported.graph_signature.inputs_to_buffers,
        **exported.graph_signature.inputs_to_lifted_tensor_constants,
    }
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    order = ["input", "parameter", "buffer", "constant"]
    placeholders = [n for n in exported.graph.nodes if n.op == "placeholder"]
    for node in sorted(placeholders, key=lambda n: order.index(kinds.get(n.name, "input"))):
        env[node] = graph.node_copy(node)
        kind = kinds.get(node.name, "input")
        env[node].meta = {"val": node.meta["val"], "kind": kind, "source": sources.get(node.name, node.name)}
        if kind == "input":
            env[node].meta["requires_grad"] = needs_gradient
    for node in exported.graph.nodes:
        if node.op == "call_function" and "_assert_tensor_metadata" not in str(node.target):
            env[node] = graph.node_copy(node, lambda n: env[n])
        elif node.op == "output":
            graph.output(tuple(env[n] for n in node.args[0] if isinstance(n, fx.Node)))
    graph.eliminate_dead_code()
    result = fx.GraphModule(nn.Module(), graph)
    assert all(n.op != "get_attr" and n.target is not operator.add for n in graph.nodes)
    return result
