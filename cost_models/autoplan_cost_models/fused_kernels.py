"""What fused ops cost: one kernel each way for norms, gates and rotations, products in chunks for the loss.

Comes in: a node of a fused op. Goes out: its kernels forward and backward. Each tensor is read and written
once, and what the backward needs beside the gradients is what the op keeps (``autoplan_passes.fused_ops``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from torch import fx

from autoplan_cost_models.execution import FUSED_LOGIT_BYTES
from autoplan_cost_models.kernels import Kernel, Kind
from autoplan_cost_models.node_facts import kernel_dtype, node_bytes, op_name, outputs_of, tensor_argument

Kernels = tuple[Kernel, ...]
Costs = tuple[Kind, Kernels, Kernels]
LINEAR_LOSS = "linear_cross_entropy"
# Logits of a chunk, in single precision, that are alive at once in the backward.
LIVE_LOGITS = 2
# Fused ops that write the gradient of two summands once.
SUMMING = ("fused_add_rms_norm", "fused_add_layer_norm")


def fused_costs(
    node: fx.Node, needing: frozenset[fx.Node], logit_bytes: tuple[float, float] = FUSED_LOGIT_BYTES
) -> Costs | None:
    """Kind and kernels of a fused op; None for any other. ``logit_bytes``: see :class:`Execution`."""
    if op_name(node) == LINEAR_LOSS:
        kind, forward, backward = _linear_loss(node, logit_bytes)
    elif op_name(node) in FORMULAS:
        kind, forward, backward = FORMULAS[op_name(node)](node)
    else:
        return None
    return kind, forward, backward if node in needing else ()


def _sources(node: fx.Node) -> float:
    return float(sum(node_bytes(source) for source in node.all_input_nodes))


def _streaming(
    read_again: Callable[[fx.Node], float], written: Callable[[fx.Node], float], launches: int = 1
) -> Callable[[fx.Node], Costs]:
    """An op that reads and writes everything once; backward also reads what it kept, and writes gradients."""

    def costs(node: fx.Node) -> Costs:
        dtype, result = kernel_dtype(node), float(node_bytes(node))
        forward = Kernel("memory", dtype, _sources(node) + result)
        moved = result + read_again(node) + written(node)
        return "memory", (forward,), (Kernel("memory", dtype, moved, launches=launches),)

    return costs


def _argument(*places: int) -> Callable[[fx.Node], float]:
    return lambda node: float(sum(node_bytes(node.all_input_nodes[place]) for place in places))


def _linear_loss(node: fx.Node, logit_bytes: tuple[float, float]) -> Costs:
    """One product forward; backward makes the logits again, then the gradients of rows and weight."""
    rows, weight = tensor_argument(node.args[0]), tensor_argument(node.args[1])
    assert rows is not None and weight is not None
    (count, hidden), classes = rows.shape, weight.shape[0]
    m = float(min(count, logits_chunk(node)))
    chunks, dtype = count / m, kernel_dtype(node.all_input_nodes[0])
    operands = float(rows.numel() + chunks * weight.numel()) * rows.element_size()
    logits = float(count * classes)

    def product(m: float, n: float, k: float, moved: float) -> Kernel:
        return Kernel("grouped_gemm", dtype, operands + moved, 2 * chunks * m * n * k, chunks, m, n, k)

    forward = product(m, classes, hidden, logit_bytes[0] * logits)
    backward = (
        product(m, classes, hidden, logit_bytes[1] / 2 * logits),
        product(m, hidden, classes, logit_bytes[1] / 4 * logits),
        product(classes, hidden, m, logit_bytes[1] / 4 * logits + chunks * 8 * weight.numel()),
    )
    return "gemm", (forward,), backward


def logits_chunk(node: fx.Node) -> int:
    """How many rows of logits a fused loss makes at a time."""
    return int(str(node.args[6]))


def loss_workspace_bytes(node: fx.Node) -> int:
    """Logits of one chunk, and the gradient of the weight in single precision."""
    rows, weight = (outputs_of(node.all_input_nodes[place])[0] for place in (0, 1))
    chunk = min(rows.shape[0], logits_chunk(node))
    return 4 * (LIVE_LOGITS * chunk * weight.shape[0] + math.prod(weight.shape))


_NORM = _streaming(_argument(0, 1), _argument(0, 1), launches=2)
_SUM_NORM = _streaming(_argument(0, 2), _argument(0, 2), launches=2)
_GATED = _streaming(_argument(0, 1), _argument(0, 1))
FORMULAS: Mapping[str, Callable[[fx.Node], Costs]] = {
    "fused_rms_norm": _NORM,
    "fused_layer_norm": _NORM,
    "fused_add_rms_norm": _SUM_NORM,
    "fused_add_layer_norm": _SUM_NORM,
    "fused_swiglu": _GATED,
    "fused_geglu": _GATED,
    "fused_rotary": _streaming(_argument(1, 2), _argument(0)),
}
