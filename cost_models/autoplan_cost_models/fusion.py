"""Chains of pointwise ops as one kernel, the way torch.compile and hand-fused layers run them.

Comes in: a region's graph and its operations, one a node. Goes out: the same operations, where each chain's
kernels are replaced by one forward and one backward on its last node: forward reads what enters the
chain and writes what leaves it; backward reads the gradients of what leaves and what entered (it makes
the rest again) and writes the gradients of what entered.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from torch import fx

from autoplan_cost_models.kernels import Kernel, Operation
from autoplan_cost_models.node_facts import differentiable_nodes, kernel_dtype, node_bytes, op_name

# Ops whose every output element depends on one row of each input, so that they join a chain.
POINTWISE = frozenset(
    [
        *("add", "sub", "mul", "div", "neg", "rsub", "pow", "square", "sqrt", "rsqrt", "exp", "log"),
        *("gelu", "silu", "relu", "sigmoid", "tanh", "cos", "sin", "abs", "clamp", "where", "cat"),
        *("to", "_to_copy", "type_as", "clone", "masked_fill", "dropout", "native_dropout", "mean", "sum"),
        *("layer_norm", "native_layer_norm", "rms_norm"),
    ]
)
NORMS = frozenset(["layer_norm", "native_layer_norm", "rms_norm"])


def fused(
    graph: fx.Graph, operations: Sequence[Operation]
) -> tuple[tuple[Operation, ...], dict[fx.Node, Hashable]]:
    """The operations with every chain of pointwise ops as one kernel each way, and what each node is part of.

    A chain reads a tensor once, and so do the linear layers of one input, which are one product: autograd
    adds up one gradient for each.
    """
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    needing = differentiable_nodes(graph)
    kinds = {node: operation.kind for node, operation in zip(nodes, operations)}
    changed = dict(zip(nodes, operations))
    part_of: dict[fx.Node, Hashable] = {
        node: ("linear", node.args[0]) for node in nodes if op_name(node) == "linear"
    }
    for number, chain in enumerate(_chains(nodes, kinds)):
        part_of.update((node, number) for node in chain)
        for node in chain:
            changed[node] = replace(changed[node], forward=(), backward=())
        forward, backward = _kernels(chain, needing)
        changed[chain[-1]] = replace(changed[chain[-1]], forward=forward, backward=backward)
    return tuple(changed.values()), part_of


def chains_of(graph: fx.Graph, operations: Sequence[Operation]) -> dict[fx.Node, int]:
    """The chain of every node that is in one, by number."""
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    kinds = {node: operation.kind for node, operation in zip(nodes, operations)}
    return {node: number for number, chain in enumerate(_chains(nodes, kinds)) for node in chain}


def _chains(nodes: Sequence[fx.Node], kinds: dict[fx.Node, str]) -> list[list[fx.Node]]:
    """Connected pointwise nodes and the views between them; those that move no bytes alone are no chain."""
    chain_of: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        if not _joins(node, kinds):
            continue
        chain = [node]
        for source in node.all_input_nodes:
            other = chain_of.get(source)
            if other is not None and other is not chain:
                chain = other + chain if node in chain else other
                for member in chain:
                    chain_of[member] = chain
        if node not in chain:
            chain.append(node)
        for member in chain:
            chain_of[member] = chain
    unique = {id(chain): chain for chain in chain_of.values()}
    return [chain for chain in unique.values() if any(kinds[node] == "memory" for node in chain)]


def _joins(node: fx.Node, kinds: dict[fx.Node, str]) -> bool:
    if kinds[node] == "free":
        return True
    return kinds[node] == "memory" and op_name(node) in POINTWISE


def _kernels(
    chain: Sequence[fx.Node], needing: frozenset[fx.Node]
) -> tuple[tuple[Kernel, ...], tuple[Kernel, ...]]:
    members = set(chain)
    entering = list(dict.fromkeys(s for n in chain for s in n.all_input_nodes if s not in members))
    leaving = [node for node in chain if any(user not in members for user in node.users)]
    read, written = _bytes(entering), _bytes(leaving)
    dtype = kernel_dtype(chain[-1])
    forward = Kernel("memory", dtype, read + written)
    gradients_in = _bytes([node for node in leaving if node in needing])
    gradients_out = _bytes([node for node in entering if node in needing])
    if not gradients_out:
        return (forward,), ()
    norms = sum(node_bytes(node) for node in chain if op_name(node) in NORMS)  # its weight's gradient
    return (forward,), (Kernel("memory", dtype, gradients_in + read + gradients_out + norms),)


def _bytes(nodes: Sequence[fx.Node]) -> float:
    """Bytes of the tensors behind nodes; a view counts as the tensor it looks at."""
    return float(sum(node_bytes(node) for node in nodes))
