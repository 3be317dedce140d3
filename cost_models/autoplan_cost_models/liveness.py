"""Live bytes of a region's forward and backward, step by step.

Comes in: a region graph, which storage each node makes and which autograd saves. Goes out: the most
bytes live in forward, and for every step of backward the gradients alive less the activations freed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from autoplan.regather import regathering_products
from autoplan_cost_models.contractions import ATTENTION
from autoplan_cost_models.fused_kernels import LINEAR_LOSS, SUMMING, loss_workspace_bytes
from autoplan_cost_models.node_facts import differentiable_nodes, node_bytes, op_name, outputs_of
from autoplan_cost_models.tensor_names import LOSSES
from autoplan_cost_models.traffic import is_free


@dataclass(frozen=True)
class ForwardLive:
    """Most live bytes: of a forward that saves nothing, and of one that saves, beyond all it saves."""

    without_saving: float
    beyond_saved: float


@dataclass(frozen=True)
class BackwardSteps:
    """One entry a node, last node first: live bytes beyond the saved ones, and the largest part by name."""

    extra_bytes: tuple[float, ...]
    largest_bytes: tuple[float, ...]
    largest_names: tuple[str, ...]


def forward_live_bytes(
    nodes: Sequence[fx.Node],
    outputs: Mapping[fx.Node, tuple[int, ...]],
    size: Mapping[int, int],
    outside: Collection[int],
    saved: Mapping[int, int],
) -> ForwardLive:
    """Walk forward; a storage lives from the node that makes it to its last reader."""
    last_use: dict[int, int] = {}
    for index, node in enumerate(nodes):
        for source in (*node.all_input_nodes, node):
            for key in outputs.get(source, ()):
                last_use[key] = index
    dying: dict[int, list[int]] = {}
    for key, index in last_use.items():
        if key not in outside:
            dying.setdefault(index, []).append(key)
    live: set[int] = set()
    live_bytes = kept_bytes = peak_plain = peak_saving = 0
    for index, node in enumerate(nodes):
        for key in outputs[node]:
            if key not in live and key not in outside and last_use[key] >= index:
                live.add(key)
                live_bytes += size[key]
                kept_bytes += 0 if key in saved else size[key]
        peak_plain = max(peak_plain, live_bytes)
        peak_saving = max(peak_saving, kept_bytes)
        for key in dying.get(index, ()):
            live.discard(key)
            live_bytes -= size[key]
            kept_bytes -= 0 if key in saved else size[key]
    return ForwardLive(float(peak_plain), float(peak_saving))


class _Gradients:
    """Gradient buffers alive during backward; a view's or a sum's gradient is its output's own buffer."""

    def __init__(self) -> None:
        self.buffer_of: dict[fx.Node, int] = {}
        self.size: dict[int, int] = {}
        self.owner: dict[int, fx.Node] = {}
        self.references: dict[int, int] = {}
        self.live_bytes = 0

    def allocate(self, node: fx.Node) -> None:
        buffer = len(self.size)
        self.size[buffer] = node_bytes(node)
        self.owner[buffer] = node
        self.references[buffer] = 0
        self.live_bytes += self.size[buffer]
        self._attach(node, buffer)

    def share(self, node: fx.Node, source: fx.Node) -> None:
        self._attach(source, self.buffer_of[node])

    def release(self, node: fx.Node) -> None:
        buffer = self.buffer_of.pop(node)
        self.references[buffer] -= 1
        if self.references[buffer] == 0:
            self.live_bytes -= self.size[buffer]
            del self.owner[buffer]

    def largest(self) -> tuple[int, fx.Node | None]:
        if not self.owner:
            return 0, None
        buffer = max(self.owner, key=lambda b: self.size[b])
        return self.size[buffer], self.owner[buffer]

    def _attach(self, node: fx.Node, buffer: int) -> None:
        self.buffer_of[node] = buffer
        self.references[buffer] += 1


def backward_steps(
    graph: fx.Graph,
    saved_by: Mapping[int, Sequence[fx.Node]],
    saved: Mapping[int, int],
    names: Mapping[fx.Node, str],
    loss_bytes: tuple[float, float] | None = None,
) -> BackwardSteps:
    """Walk the graph backwards, allocating each input's gradient and freeing what has been used.

    Live at a step: gradients waiting, those being made (a second one is summed into the first), the op's
    workspace, less the saved storages whose last reader in backward has run. ``loss_bytes``: see
    :class:`~autoplan_cost_models.execution.Keeping`.
    """
    needing = differentiable_nodes(graph)
    freed_at = _freed_at(saved_by, saved)
    gradients = _Gradients()
    (output,) = (node for node in graph.nodes if node.op == "output")
    for source in output.all_input_nodes:
        if source in needing and source not in gradients.buffer_of:
            gradients.allocate(source)
    freed = 0
    steps: list[tuple[float, float, str]] = [(float(gradients.live_bytes), 0.0, "")]
    for node in reversed(graph.nodes):
        if node.op == "call_function" and node in gradients.buffer_of:
            extra = _run_backward(node, needing, gradients)
            if loss_bytes is not None and op_name(node) in LOSSES:
                logits = node.all_input_nodes[0]
                elements = sum(tensor.numel() for tensor in outputs_of(logits))
                extra = int(loss_bytes[1] * elements) - node_bytes(logits)
            largest, owner = gradients.largest()
            name = f"gradient of {names[owner]}" if owner is not None else ""
            steps.append((float(gradients.live_bytes + extra - freed), float(largest), name))
            gradients.release(node)
        freed += freed_at.get(node, 0)
    extra_bytes, largest_bytes, largest_names = zip(*steps)
    return BackwardSteps(extra_bytes, largest_bytes, largest_names)


def _run_backward(node: fx.Node, needing: frozenset[fx.Node], gradients: _Gradients) -> int:
    """Make the gradients of the node's inputs; bytes of temporaries that die with this step."""
    temporary = _workspace_bytes(node)
    hands_on = is_free(node) or op_name(node) in ("add", "sub", "copy_to", "reduce_from")
    made: fx.Node | None = None  # an input whose gradient is new
    for source in dict.fromkeys(node.all_input_nodes):
        if source not in needing:
            continue
        is_parameter = source.op == "placeholder" and source.meta.get("kind") == "parameter"
        same_buffer = hands_on and node_bytes(source) == node_bytes(node)
        if is_parameter or source in gradients.buffer_of:
            temporary += 0 if is_parameter and same_buffer else node_bytes(source)
        elif same_buffer:
            gradients.share(node, source)
        elif made is not None and op_name(node) in SUMMING and node_bytes(made) == node_bytes(source):
            gradients.share(made, source)
        else:
            gradients.allocate(source)
            made = source
    return temporary


def _workspace_bytes(node: fx.Node) -> int:
    """Temporaries inside one backward op.

    Cross-entropy holds the gradient of the log-probabilities beside that of the logits; flash
    attention accumulates the gradient of q in fp32 (FlashAttention-2, ``dq_accum``); products of a gathered
    tensor have it whole.
    """
    name = op_name(node)
    if any(node in regathering_products(source) for source in node.all_input_nodes):
        return node_bytes(node.all_input_nodes[0])
    if name in LOSSES and node.all_input_nodes:
        return node_bytes(node.all_input_nodes[0])
    if name == LINEAR_LOSS:
        return loss_workspace_bytes(node)
    if name in ATTENTION:
        return 4 * outputs_of(node.all_input_nodes[0])[0].numel()
    return 0


def _freed_at(saved_by: Mapping[int, Sequence[fx.Node]], saved: Mapping[int, int]) -> dict[fx.Node, int]:
    """A saved storage is freed when the first node (in forward order) that saved it has run backward."""
    freed: dict[fx.Node, int] = {}
    for key, size in saved.items():
        node = saved_by[key][0]
        freed[node] = freed.get(node, 0) + size
    return freed
