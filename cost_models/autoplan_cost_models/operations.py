"""From a region's graph to the work it does: one :class:`Operation` per node.

Comes in: a local (per-rank) region graph with ``meta["val"]`` on every node. Goes out: operations in
graph order, then the gradient sums autograd adds where a tensor has several users.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import fx

from autoplan.deferral import deferred_weight
from autoplan.regather import regathering_products
from autoplan_cost_models.contractions import (
    contraction_kernels,
    is_contraction,
    refuse_unpriced_contraction,
)
from autoplan_cost_models.execution import EAGER, Execution
from autoplan_cost_models.fused_kernels import LINEAR_LOSS, SUMMING, fused_costs
from autoplan_cost_models.fusion import fused
from autoplan_cost_models.keeping import with_policy
from autoplan_cost_models.kernels import CollectiveCall, Kernel, Kind, Operation
from autoplan_cost_models.node_facts import (
    differentiable_nodes,
    kernel_dtype,
    node_bytes,
    op_name,
    outputs_of,
)
from autoplan_cost_models.traffic import is_free, memory_kernels

# The Python functions that are nothing but communication, and whether they also copy a tensor locally
# (to cut it, or to join the pieces that arrived).
PURE_COLLECTIVES: dict[str, bool] = {
    "copy_to": False,
    "reduce_from": False,
    "gather_from": True,
    "scatter_to": True,
    "gather_reduce": True,
    "reduce_scatter": True,
    "all_to_all": True,
    "dispatch": True,
    "combine": True,
}
# Small kernels that work out where rows go, and about how often they read or write a number a row.
ROUTING_LAUNCHES, ROUTING_PASSES = 16, 8
LINEARS = frozenset(["linear", "addmm", "_grouped_mm"])
LOSSES = frozenset(["cross_entropy_loss", "vocab_cross_entropy", "nll_loss_forward", LINEAR_LOSS])
# Node names given to work that belongs to no node.
GRADIENT_SUMS = "gradient sums"


def operations(graph: fx.GraphModule, execution: Execution = EAGER) -> tuple[Operation, ...]:
    """One record per ``call_function`` node, plus one named ``gradient sums``, as ``execution`` runs them.

    Raises UnsupportedOpError for a matrix-product-like op without a FLOPs formula.
    """
    needing = differentiable_nodes(graph.graph)
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    if any(op_name(node) in LOSSES for node in nodes):
        execution = replace(execution, linear_dtype="")
    found = [_in_passes(node_operation(node, needing, execution), node, needing, execution) for node in nodes]
    part_of: dict[fx.Node, Hashable] = {}
    if execution.fuses_pointwise:
        found, part_of = fused(graph.graph, found)
    found = with_policy(graph.graph, found, execution.keeping)
    return (*found, _gradient_sums(graph.graph, needing, part_of))


def _in_passes(
    operation: Operation, node: fx.Node, needing: frozenset[fx.Node], execution: Execution
) -> Operation:
    """The operation with the bytes per element of its first input that ``execution`` states for the op."""
    passes = execution.passes.get(op_name(node))
    if operation.kind in ("gemm", "grouped_gemm") and op_name(node) in LINEARS and execution.linear_dtype:
        forward, backward = (
            _in_dtype(ks, execution.linear_dtype) for ks in (operation.forward, operation.backward)
        )
        return replace(operation, forward=forward, backward=backward)
    if passes is None:
        return operation
    elements = sum(tensor.numel() for tensor in outputs_of(node.all_input_nodes[0]))
    forward, backward = (Kernel("memory", kernel_dtype(node), size * elements, launches=4) for size in passes)
    return replace(operation, forward=(forward,), backward=(backward,) if node in needing else ())


def node_operation(node: fx.Node, needing: frozenset[fx.Node], execution: Execution = EAGER) -> Operation:
    """The work of one node; ``needing`` are the nodes whose value needs a gradient."""
    calls_forward, calls_backward = _collective_calls(node, needing)
    if regathering_products(node):
        calls_backward = ()  # with the first of its products, which compute meanwhile
    calls_backward += _beside(node, needing)
    kind: Kind
    fused_op = fused_costs(node, needing, execution.logit_bytes)
    if fused_op is not None:
        kind, forward, backward = fused_op
    elif is_contraction(node):
        kind, forward, backward = contraction_kernels(node, needing)
    else:
        refuse_unpriced_contraction(node)
        forward, backward = memory_kernels(node, needing)
        kind = "free" if is_free(node) else "memory"
        if op_name(node) in PURE_COLLECTIVES:
            kind, (forward, backward) = "collective", _local_copies(node, needing)
        elif op_name(node) == "route":
            forward = (Kernel("memory", "int", ROUTING_PASSES * node_bytes(node), launches=ROUTING_LAUNCHES),)
    return Operation(
        node.name,
        str(node.target),
        kind,
        forward,
        backward,
        calls_forward,
        calls_backward,
        regathers=bool(regathering_products(node)),
    )


def _beside(node: fx.Node, needing: frozenset[fx.Node]) -> tuple[CollectiveCall, ...]:
    """What runs beside the backward of the first product of a gathered tensor: the gather once more, and the
    sum of the tensor's gradient."""
    gather = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
    if gather is None or node not in regathering_products(gather)[:1] or gather not in needing:
        return ()
    again, back = _collective_calls(gather, needing)
    return tuple(replace(call, overlapped=True) for call in (*again, *back))


def _in_dtype(kernels: tuple[Kernel, ...], dtype: str) -> tuple[Kernel, ...]:
    """The same products in another dtype; its measured rates include the casts of what is multiplied."""
    return tuple(replace(kernel, dtype=dtype) if kernel.flops else kernel for kernel in kernels)


def _local_copies(
    node: fx.Node, needing: frozenset[fx.Node]
) -> tuple[tuple[Kernel, ...], tuple[Kernel, ...]]:
    """Reading and writing the larger of input and output once each way."""
    if not PURE_COLLECTIVES[op_name(node)]:
        return (), ()
    larger = max(node_bytes(node), *(node_bytes(source) for source in node.all_input_nodes))
    copy = (Kernel("memory", kernel_dtype(node), 2.0 * larger),)
    again = copy if regathering_products(node) else ()
    return copy, (*copy, *again) if node in needing else ()


def _collective_calls(
    node: fx.Node, needing: frozenset[fx.Node]
) -> tuple[tuple[CollectiveCall, ...], tuple[CollectiveCall, ...]]:
    """``meta["collective"]``: one or several (kinds, then bytes, forward and backward; then the axis)."""
    entry: Any = node.meta.get("collective")
    if not entry:
        return (), ()
    entries: Iterable[Any] = [entry] if isinstance(entry[0], str) else entry
    forward: list[CollectiveCall] = []
    backward: list[CollectiveCall] = []
    for kind_forward, kind_backward, bytes_forward, bytes_backward, axis in entries:
        if kind_forward != "none":
            forward.append(_call(kind_forward, bytes_forward, axis))
        if kind_backward != "none" and node in needing:
            backward.append(_call(kind_backward, bytes_backward, axis))
    return tuple(forward), tuple(backward)


def _call(kind: str, sent_bytes: float, axis: str) -> CollectiveCall:
    return CollectiveCall(kind, float(sent_bytes), axis, overlapped=kind == "ring")


def _gradient_sums(
    graph: fx.Graph, needing: frozenset[fx.Node], part_of: Mapping[fx.Node, Hashable]
) -> Operation:
    """Autograd adds the gradients of a tensor's users one by one: read two, write one, k - 1 times.

    Users that are ``part_of`` one kernel count once, and not where the tensor never leaves that kernel.
    What a parameter's gradient is added to over micro-batches depends on ZeRO: see ``stage_time``.
    """
    kernels: list[Kernel] = []
    for node in graph.nodes:
        if node not in needing:
            continue
        users = {part_of.get(user, user) for user in node.users if user in needing}
        extra = len(users - {part_of.get(node, node)}) - 1
        if extra > 0 and op_name(node) != "getitem" and op_name(node) not in SUMMING:
            traffic = 3.0 * node_bytes(node) * extra
            later = all(deferred_weight(user) is node for user in node.users)
            kernels.append(Kernel("memory", kernel_dtype(node), traffic, launches=extra, deferrable=later))
    return Operation(GRADIENT_SUMS, "add", "memory", backward=tuple(kernels))
