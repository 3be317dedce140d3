"""One region class measured once: its operations, kernels, collectives, parameters and memory.

Comes in: the class's local graph at two micro-batches. Goes out: :class:`RegionWork`, linear in the
micro-batch, with no graph or tensor left in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from torch import fx

from autoplan.errors import BadInputError
from autoplan_cost_models.execution import EAGER, Execution
from autoplan_cost_models.kernel_table import Flags, KernelTable, check_same_kernels, kernel_table
from autoplan_cost_models.kernels import CONTRACTION_KINDS, CollectiveCall, Operation
from autoplan_cost_models.memory import trace_memory
from autoplan_cost_models.memory_forms import Form, MemoryForms, memory_forms
from autoplan_cost_models.node_facts import node_bytes, outputs_of, placeholder_needs_gradient
from autoplan_cost_models.operations import operations


@dataclass(frozen=True)
class ParameterUse:
    """One parameter as a region uses it, after ep and tp: ``source`` is its qualified name.

    ``by_expert``: the rank has its own experts' alone, whose copies are on fewer ranks than those of others.
    ``summed_over`` are the axes whose ranks hold parts of its gradient, summed once a step.
    """

    source: str
    numel: int
    bytes: int
    trainable: bool
    by_expert: bool = False
    summed_over: tuple[str, ...] = ()


@dataclass(frozen=True)
class CollectiveForm:
    """Equal collectives of a region: their size, and how many run forward, backward and again when
    everything, or what selective recompute does not keep, is recomputed. ``behind`` is the operation that
    computes meanwhile; -1: none does."""

    kind: str
    axis: str
    size: Form
    forward: int
    backward: int
    recomputed: int
    selected: int = 0
    behind: int = -1


@dataclass(frozen=True)
class RegionWork:
    """A region class, measured.

    ``base`` is the micro-batch of ``table`` and ``next_table`` that of one sample more; None when only
    ``base`` is known, and then no other micro-batch can be priced. ``whole_flops`` are the contraction
    FLOPs of one forward of the unsharded region.
    """

    base: int
    operations: tuple[Operation, ...]
    table: KernelTable
    next_table: KernelTable | None
    collectives: tuple[CollectiveForm, ...]
    memory: MemoryForms
    parameters: tuple[ParameterUse, ...]
    buffer_bytes: float
    whole_flops: Form

    def steps_to(self, micro_batch: int) -> float:
        """How many samples ``micro_batch`` is from ``base``; raises BadInputError if that is unknown."""
        if micro_batch != self.base and self.next_table is None:
            raise BadInputError(
                f"micro-batch {micro_batch}: this model was captured at batch {self.base} only and its "
                f"graph is not known to be linear in the batch; type --pin micro_batch={self.base}."
            )
        return float(micro_batch - self.base)

    def kernels(self, micro_batch: int) -> KernelTable:
        steps = self.steps_to(micro_batch)
        return self.table.towards(self.next_table, steps) if self.next_table is not None else self.table

    @cached_property
    def run_again(self) -> Mapping[str, Flags]:
        """Per kernel: whether each recompute kind runs it a second time."""
        stop = self.memory.last_saver
        recomputed = ~self.table.is_backward & (self.table.operation < stop)
        keeps = np.array([operation.selective_keeps for operation in self.operations], dtype=np.bool_)
        return {
            "none": np.zeros_like(recomputed),
            "selective": recomputed & ~keeps[self.table.operation],
            "full": recomputed,
        }


def measure_region(
    graphs: Mapping[int, fx.GraphModule],
    *,
    whole: RegionWork | None = None,
    fused_attention: bool = True,
    execution: Execution = EAGER,
) -> RegionWork:
    """Measure a region class from its local graphs, keyed by micro-batch (1 and 2; or the one known).

    ``whole`` is the same class unsharded (tp = 1), for the model's FLOPs; None: these graphs are whole.
    ``fused_attention``: whether the chip has a flash kernel (``profile.kernels``); ``execution``: how the
    program that runs the plan executes it. Bind collective
    functions to dry groups before the call. Raises BadInputError when the two graphs differ in nodes,
    UnsupportedOpError for a contraction without a FLOPs formula.
    """
    batches = sorted(graphs)[:2]
    found = [operations(graphs[batch], execution) for batch in batches]
    traces = [
        trace_memory(graphs[b], f, fused_attention=fused_attention, keeping=execution.keeping)
        for b, f in zip(batches, found)
    ]
    samples = batches[-1] - batches[0]
    table, next_table = kernel_table(found[0]), None
    if samples:
        check_same_kernels(found[0], found[1])
        next_table = table.towards(kernel_table(found[1]), 1.0 / samples)
    graph = graphs[batches[0]].graph
    work = RegionWork(
        base=batches[0],
        operations=found[0],
        table=table,
        next_table=next_table,
        collectives=_collective_forms(found, samples, traces[0].last_saver),
        memory=memory_forms(traces, samples),
        parameters=_parameters(graph),
        buffer_bytes=_buffer_bytes(graph),
        whole_flops=Form.through([_contraction_flops(group) for group in found], samples),
    )
    return replace(work, whole_flops=whole.whole_flops) if whole is not None else work


def _contraction_flops(found: Sequence[Operation]) -> float:
    return sum(operation.forward_flops for operation in found if operation.kind in CONTRACTION_KINDS)


FormKey = tuple[str, str, Form, int]
MOMENTS = ("forward", "backward", "recomputed", "selected")


def _collective_forms(
    found: Sequence[Sequence[Operation]], samples: int, last_saver: int
) -> tuple[CollectiveForm, ...]:
    """Group calls of equal kind, axis and size; the calls of the two micro-batches correspond by position."""
    counts: Counter[tuple[FormKey, str]] = Counter()
    for index, same in enumerate(zip(*found)):
        for call in zip(*(operation.forward_collectives for operation in same)):
            key = _form_key(call, samples, index)
            counts[key, "forward"] += 1
            again = index < last_saver and not same[0].regathers
            counts[key, "recomputed"] += again
            counts[key, "selected"] += again and not same[0].selective_keeps
        for call in zip(*(operation.backward_collectives for operation in same)):
            counts[_form_key(call, samples, index), "backward"] += 1
    return tuple(
        CollectiveForm(*key[:3], *(counts[key, when] for when in MOMENTS), behind=key[3])
        for key in dict.fromkeys(key for key, _ in counts)
    )


def _form_key(call: Sequence[CollectiveCall], samples: int, operation: int) -> FormKey:
    size = Form.through([one.bytes for one in call], samples)
    return call[0].kind, call[0].axis, size, operation if call[0].overlapped else -1


def _parameters(graph: fx.Graph) -> tuple[ParameterUse, ...]:
    """Each parameter once, by qualified name."""
    uses: dict[str, ParameterUse] = {}
    for node in graph.nodes:
        if node.op == "placeholder" and node.meta.get("kind") == "parameter":
            source = str(node.meta.get("source", node.name))
            (tensor,) = outputs_of(node)
            trainable = placeholder_needs_gradient(node)
            states: Mapping[str, str] = node.meta.get("states", {})
            by_expert = states.get("ep", "R").startswith("S")
            summed = tuple(axis for axis, state in states.items() if _is_summed(state))
            size = tensor.numel() * tensor.element_size()
            uses[source] = ParameterUse(source, tensor.numel(), size, trainable, by_expert, summed)
    return tuple(uses.values())


def _is_summed(state: str) -> bool:
    """Whether ranks hold the same of a parameter, each with a part of its gradient: ``R*``, ``S(0)x2``."""
    return state == "R*" or ")x" in state


def _buffer_bytes(graph: fx.Graph) -> float:
    kinds = ("buffer", "constant")
    return float(
        sum(node_bytes(n) for n in graph.nodes if n.op == "placeholder" and n.meta.get("kind") in kinds)
    )
