"""What a region keeps for its backward and needs while it runs, measured on fake tensors.

Comes in: a local region graph. Goes out: a :class:`MemoryTrace`: every tensor autograd saves (by storage,
once), what selective recompute keeps, and the live bytes at each step of forward and backward.

Attention is measured as a fused kernel saves it (q, k, v, output, log-sum-exp) when the chip has one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from autoplan.deferral import deferred_weight
from autoplan.regather import regathering_products
from autoplan_cost_models.contractions import ATTENTION
from autoplan_cost_models.execution import EAGER_KEEPING, Keeping
from autoplan_cost_models.keeping import StorageRecord, as_kept, kept_storages
from autoplan_cost_models.kernels import Operation
from autoplan_cost_models.liveness import BackwardSteps, backward_steps, forward_live_bytes
from autoplan_cost_models.node_facts import node_bytes, outputs_of, placeholder_needs_gradient, values_of
from autoplan_cost_models.tensor_names import tensor_names


@dataclass(frozen=True)
class NamedBytes:
    """A tensor (or group of tensors) by a name a person knows, in bytes."""

    name: str
    bytes: float


@dataclass(frozen=True)
class MemoryTrace:
    """Memory of one region at one micro-batch, in bytes.

    Everything excludes parameters, and the region's outputs (the next region counts them as inputs).
    ``saved``: what autograd keeps without recompute, beyond the inputs. ``kept``: what selective
    recompute keeps (outputs of contractions and collectives). ``recomputed_selective`` and
    ``recomputed_full``: what recompute makes again, gathered tensors whole. ``forward_peak``: most live
    bytes of a forward that saves nothing; ``forward_extra``: most live bytes beyond ``saved`` of one that
    saves.
    ``last_saver``: nodes from this index on need not run again (recompute stops there). ``deferred``: what a
    split backward keeps until the weights get their gradients (what products read, and the gradients of
    what they made).
    """

    inputs: tuple[NamedBytes, ...]
    side_inputs: tuple[NamedBytes, ...]
    saved: tuple[NamedBytes, ...]
    kept: tuple[NamedBytes, ...]
    recomputed_selective: float
    recomputed_full: float
    forward_peak: float
    forward_extra: float
    backward: BackwardSteps
    output_bytes: float
    last_saver: int
    deferred: tuple[NamedBytes, ...] = ()


class _FusedAttention(torch.autograd.Function):
    """Saves what a flash kernel saves: q, k, v, output and the fp32 log-sum-exp of each row."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, like: torch.Tensor
    ) -> torch.Tensor:
        output = torch.empty_strided(like.shape, like.stride(), dtype=query.dtype)
        log_sum_exp = torch.empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, log_sum_exp)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError("the measuring stand-in for attention is never run backward")


class _Recorder(fx.Interpreter):
    """Runs a region graph on fake tensors and records storages made and saved, node by node."""

    def __init__(self, graph: fx.GraphModule, fused_attention: bool) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self.fused_attention = fused_attention
        self.record = StorageRecord()
        self.node: fx.Node = next(iter(graph.graph.nodes))

    def run_node(self, n: fx.Node) -> Any:
        self.node = n
        if n.op == "call_function" and any(name in str(n.target) for name in ATTENTION):
            result = self._attention(n)
        else:
            result = super().run_node(n)
        self.record.outputs[n] = tuple(self.record.note(tensor, n) for tensor in values_of(result))
        return result

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        key = self.record.note(tensor, self.node)
        self.record.saved_by.setdefault(key, []).append(self.node)
        return tensor

    def _attention(self, node: fx.Node) -> Any:
        if self.fused_attention:
            args, _ = self.fetch_args_kwargs_from_env(node)
            return _FusedAttention.apply(*args[:3], outputs_of(node)[0])
        with sdpa_kernel(SDPBackend.MATH):
            return _laid_out(super().run_node(node), outputs_of(node)[0])


def _laid_out(output: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Views after attention were traced on the fused kernel's strides: the copy a reshape would make."""
    if output.stride() == like.stride():
        return output
    return torch.empty_strided(like.shape, like.stride(), dtype=output.dtype).copy_(output)


def trace_memory(
    graph: fx.GraphModule,
    operations: Sequence[Operation],
    *,
    fused_attention: bool = True,
    keeping: Keeping = EAGER_KEEPING,
) -> MemoryTrace:
    """Run ``graph`` forward on fake cpu tensors under saved-tensor hooks and account for every storage.

    ``operations`` are those of the same graph, in order; ``keeping``: what the program that runs it does its
    own way. Collective functions in the graph must be
    bound to dry groups by the caller.
    """
    recorder = _Recorder(graph, fused_attention)
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = [_fresh(node) for node in graph.graph.nodes if node.op == "placeholder"]
        with torch.autograd.graph.saved_tensors_hooks(recorder.save, _unpack):
            recorder.run(*inputs, enable_io_processing=False)
    return _account(graph.graph, operations, recorder.record, keeping)


def _unpack(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _fresh(node: fx.Node) -> Any:
    """A new fake tensor of the placeholder's shape, requiring a gradient where it needs one."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return value
    fresh = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
    return fresh.requires_grad_(True) if placeholder_needs_gradient(node) else fresh


def _account(
    graph: fx.Graph, operations: Sequence[Operation], record: StorageRecord, keeping: Keeping
) -> MemoryTrace:
    names = tensor_names(graph)
    outside = _outside_storages(graph, record)
    made_again = {key: record.size[key] for key in record.saved_by if key not in outside}
    _keep_pieces(graph, record)
    as_kept(graph, operations, record, keeping)
    saved = {key: record.size[key] for key in record.saved_by if key not in outside}
    kept = kept_storages(graph, operations, record, keeping)
    kept = {key: size for key, size in kept.items() if key not in outside}
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    labels = {key: _label(record, key, names) for key in {*saved, *kept}}
    live = forward_live_bytes(nodes, record.outputs, record.size, outside, saved)
    differentiable, side = _input_bytes(graph, record)
    return MemoryTrace(
        inputs=differentiable,
        side_inputs=side,
        saved=tuple(NamedBytes(labels[key], float(size)) for key, size in saved.items()),
        kept=tuple(NamedBytes(labels[key], float(size)) for key, size in kept.items()),
        recomputed_selective=float(sum(size for key, size in made_again.items() if key not in kept)),
        recomputed_full=float(sum(made_again.values())),
        forward_peak=live.without_saving,
        forward_extra=live.beyond_saved,
        backward=backward_steps(graph, record.saved_by, saved, names, keeping.loss_bytes),
        output_bytes=_output_bytes(graph),
        last_saver=_last_saver(nodes, record),
        deferred=_deferred(nodes, record),
    )


def _keep_pieces(graph: fx.Graph, record: StorageRecord) -> None:
    """Products of a gathered tensor save this rank's piece, and gather it again."""
    for node in graph.nodes:
        if regathering_products(node):
            (whole,), (piece,) = record.outputs[node], record.outputs[node.all_input_nodes[0]]
            savers = record.saved_by.pop(whole, [])
            if savers:
                record.saved_by.setdefault(piece, []).extend(savers)


def _outside_storages(graph: fx.Graph, record: StorageRecord) -> frozenset[int]:
    """Storages other owners count: placeholders' (parameters, inputs) and the region's outputs'."""
    outside: set[int] = set()
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            outside.update(record.outputs[node])
    return frozenset(outside)


def _input_bytes(
    graph: fx.Graph, record: StorageRecord
) -> tuple[tuple[NamedBytes, ...], tuple[NamedBytes, ...]]:
    """Inputs that carry gradients (one owner: this region), and those every block reads (masks, tables)."""
    differentiable: list[NamedBytes] = []
    side: list[NamedBytes] = []
    for node in graph.nodes:
        if node.op != "placeholder" or node.meta.get("kind", "input") != "input":
            continue
        size = float(sum(record.size[key] for key in record.outputs[node]))
        name = str(node.meta.get("source", node.name))
        (differentiable if placeholder_needs_gradient(node) else side).append(NamedBytes(name, size))
    return tuple(differentiable), tuple(side)


def _output_bytes(graph: fx.Graph) -> float:
    """Bytes of the region's floating outputs: what a later stage must be sent."""
    (output,) = (node for node in graph.nodes if node.op == "output")
    tensors = (tensor for source in output.all_input_nodes for tensor in outputs_of(source))
    return float(sum(t.numel() * t.element_size() for t in tensors if t.is_floating_point()))


def _deferred(nodes: Sequence[fx.Node], record: StorageRecord) -> tuple[NamedBytes, ...]:
    """Rows of products whose weight gradients wait, each storage once, and a gradient of every output."""
    products = [node for node in nodes if deferred_weight(node) is not None]
    rows = {key: record.size[key] for node in products for key in record.outputs[node.all_input_nodes[0]]}
    return (
        NamedBytes("inputs of products whose weight gradients wait", float(sum(rows.values()))),
        NamedBytes("gradients that wait for them", float(sum(node_bytes(node) for node in products))),
    )


def _last_saver(nodes: Sequence[fx.Node], record: StorageRecord) -> int:
    """Index after which recompute has made every saved tensor again (torch's checkpoint stops there).

    A node that saves only its inputs is not run: autograd packs inputs before it computes.
    """
    savers: Mapping[fx.Node, set[int]] = _by_saver(record)
    last = max((i for i, node in enumerate(nodes) if node in savers), default=-1)
    if last < 0:
        return 0
    node = nodes[last]
    made_here = any(record.made_by[key] is node for key in savers[node])
    return last + 1 if made_here else last


def _by_saver(record: StorageRecord) -> dict[fx.Node, set[int]]:
    savers: dict[fx.Node, set[int]] = {}
    for key, nodes in record.saved_by.items():
        for node in nodes:
            savers.setdefault(node, set()).add(key)
    return savers


def _label(record: StorageRecord, key: int, names: Mapping[fx.Node, str]) -> str:
    """The maker's name; a storage that is no node's output is internal to the op that saved it."""
    node = record.made_by[key]
    if key in record.outputs[node]:
        return names[node]
    loss_input = node.all_input_nodes[0] if node.all_input_nodes else node
    if names.get(loss_input, "").startswith("logits"):
        return "log-probabilities of the " + names[loss_input]
    return f"saved inside {names[node]}"
