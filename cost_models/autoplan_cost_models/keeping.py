"""What a framework keeps its own way, over what autograd saves.

Comes in: a region's graph, the storages that autograd saved (:class:`StorageRecord`), a framework's
:class:`Keeping`. Goes out: the same record as the framework would have it: insides of fused chains made
again, a loss's own buffers, 8-bit inputs; and which operations selective recompute keeps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from autoplan_cost_models.execution import Keeping
from autoplan_cost_models.fusion import NORMS, chains_of
from autoplan_cost_models.kernels import CONTRACTION_KINDS, Operation
from autoplan_cost_models.node_facts import op_name, outputs_of
from autoplan_cost_models.tensor_names import LOSSES

# Products of two activations, and what is never made again.
OF_TWO = ("matmul", "bmm", "baddbmm")
RANDOM = ("dropout", "native_dropout", "bernoulli", "rand_like")


@dataclass
class StorageRecord:
    """Storages seen in one run: bytes of each, who made it, which nodes saved it."""

    size: dict[int, int] = field(default_factory=dict[int, int])
    made_by: dict[int, fx.Node] = field(default_factory=dict[int, fx.Node])
    saved_by: dict[int, list[fx.Node]] = field(default_factory=dict[int, list[fx.Node]])
    outputs: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict[fx.Node, tuple[int, ...]])
    held: list[torch.Tensor] = field(default_factory=list[torch.Tensor])

    def note(self, tensor: torch.Tensor, node: fx.Node) -> int:
        """The storage's key; the tensor is held so that no later storage takes the same key."""
        storage = tensor.untyped_storage()
        key = StorageWeakRef(storage).cdata
        if key not in self.size:
            self.size[key] = storage.nbytes()
            self.made_by[key] = node
        self.held.append(tensor)
        return key

    def is_inside(self, key: int) -> bool:
        """Whether the storage is no node's output, but made inside the op that saved it."""
        return key not in self.outputs.get(self.made_by[key], ())

    def make(self, size: float, node: fx.Node) -> int:
        """A storage that the op makes inside and saves."""
        key = -1 - len(self.size)
        self.size[key], self.made_by[key], self.saved_by[key] = int(size), node, [node]
        return key


def as_kept(
    graph: fx.Graph, operations: Sequence[Operation], record: StorageRecord, keeping: Keeping
) -> None:
    """Change the record in place to what the framework saves."""
    if keeping.chains:
        _make_again_inside_chains(graph, operations, record)
    if keeping.eight_bit_inputs:
        _in_eight_bits(graph, record)
    if keeping.loss_bytes is not None:
        _own_loss(graph, record, keeping.loss_bytes[0])


def _make_again_inside_chains(
    graph: fx.Graph, operations: Sequence[Operation], record: StorageRecord
) -> None:
    """A value that only its own chain reads, and what a norm makes inside, are made again from what enters:
    who saved them saves that. (Row statistics, a number a row, are kept.)"""
    chain = chains_of(graph, operations)
    of_node: dict[fx.Node, list[int]] = {}
    for key in record.saved_by:
        of_node.setdefault(record.made_by[key], []).append(key)
    for node in reversed(list(graph.nodes)):
        for key in of_node.get(node, ()):
            inner = record.is_inside(key)
            if inner and (op_name(node) not in NORMS or record.size[key] < _bytes(node, record)):
                continue
            if not inner and not _stays(node, record.saved_by.get(key, ()), chain):
                continue
            savers = record.saved_by.pop(key)
            for source in node.all_input_nodes:
                if source.op == "placeholder" and source.meta.get("kind", "input") != "input":
                    continue
                for enters in record.outputs.get(source, ()):
                    record.saved_by.setdefault(enters, []).extend(savers)
                    if enters not in of_node.setdefault(record.made_by[enters], []):
                        of_node[record.made_by[enters]].append(enters)


def _bytes(node: fx.Node, record: StorageRecord) -> int:
    return sum(record.size[key] for key in record.outputs[node])


def _stays(node: fx.Node, savers: Sequence[fx.Node], chain: Mapping[fx.Node, int]) -> bool:
    """Whether all that read a chain's node, or save it, belong to the chain too. What is random is not made
    again."""
    readers = {*node.users, *savers}
    own = chain.get(node)
    return own is not None and op_name(node) not in RANDOM and all(chain.get(user) == own for user in readers)


def _in_eight_bits(graph: fx.Graph, record: StorageRecord) -> None:
    """Linear layers save 8-bit copies of their inputs: instead of the tensor where nobody else saves it,
    beside it where somebody does. The output layer multiplies in 16 bits."""
    if any(op_name(node) in LOSSES for node in graph.nodes):
        return
    for key, savers in list(record.saved_by.items()):
        linears = [node for node in savers if op_name(node) in ("linear", "addmm")]
        made = record.made_by[key]
        if not linears or made.op == "placeholder":
            continue
        copies = record.size[key] / 2
        if len(linears) == len(savers):
            del record.saved_by[key]
        record.saved_by[record.make(copies, made)] = linears


def _own_loss(graph: fx.Graph, record: StorageRecord, saved_bytes: float) -> None:
    """Replace what the loss saves of the size of the logits with ``saved_bytes`` a logit."""
    for node in graph.nodes:
        if op_name(node) not in LOSSES:
            continue
        elements = sum(tensor.numel() for tensor in outputs_of(node.all_input_nodes[0]))
        for key, savers in list(record.saved_by.items()):
            if node in savers and record.size[key] >= elements:
                record.saved_by[key] = [other for other in savers if other is not node]
                if not record.saved_by[key]:
                    del record.saved_by[key]
        record.make(saved_bytes * elements, node)


def with_policy(graph: fx.Graph, operations: Sequence[Operation], keeping: Keeping) -> tuple[Operation, ...]:
    """The operations, each knowing whether selective recompute keeps its output."""
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    if keeping.selective == "every second product":
        products = [node.name for node in nodes if op_name(node) == "linear"]
        dropped = set(products[1::2])
        return tuple(replace(one, kept=False) if one.name in dropped else one for one in operations)
    if keeping.selective == "all but core attention":
        core = {node.name for node in core_attention(graph, operations)}
        return tuple(replace(one, kept=one.name not in core) for one in operations)
    return tuple(operations)


def core_attention(graph: fx.Graph, operations: Sequence[Operation]) -> frozenset[fx.Node]:
    """What stands between queries, keys and values, and the context: fused attention, or two products with
    what is between them (a product of two activations is the scores' or the context's)."""
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    kinds = {node: one.kind for node, one in zip(nodes, operations)}
    core = {node for node in nodes if kinds[node] == "attention"}
    products = [node for node in nodes if kinds[node] in CONTRACTION_KINDS and op_name(node) in OF_TWO]
    before: dict[fx.Node, set[fx.Node]] = {}
    for node in nodes:
        behind = set().union(*(before.get(source, set()) for source in node.all_input_nodes))
        if node in products and behind:
            core |= behind | {node}
        goes_on = bool(behind) and op_name(node) not in ("linear", "addmm")
        before[node] = {node} if node in products else behind | {node} if goes_on else set()
    return frozenset(core)


def kept_storages(
    graph: fx.Graph, operations: Sequence[Operation], record: StorageRecord, keeping: Keeping
) -> dict[int, int]:
    """What selective recompute keeps: outputs of the operations that it does not run again, and what
    attention saves inside; or all that is saved but what only core attention makes and reads."""
    if keeping.selective == "all but core attention":
        core = core_attention(graph, operations)
        inside = {k for k, by in record.saved_by.items() if record.made_by[k] in core and core.issuperset(by)}
        return {key: record.size[key] for key in record.saved_by if key not in inside}
    keeping_names = {operation.name for operation in operations if operation.selective_keeps}
    attention = {operation.name for operation in operations if operation.kind == "attention"}
    kept: dict[int, int] = {}
    for node in graph.nodes:
        if node.name not in keeping_names:
            continue
        keys = list(record.outputs[node])
        if node.name in attention:
            keys.extend(k for k, savers in record.saved_by.items() if record.made_by[k] is node and savers)
        kept.update({key: record.size[key] for key in keys})
    return {k: size for k, size in kept.items() if not keeping.only_read or k in record.saved_by}
