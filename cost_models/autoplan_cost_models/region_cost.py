"""What a measured region costs on one rank, for any micro-batch and tp group.

Comes in: :class:`RegionWork` and a hardware profile. Goes out: :class:`RegionCost` (seconds, bytes,
FLOPs), by vector arithmetic alone, in well under a millisecond.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from autoplan.hardware import HardwareProfile
from autoplan_cost_models.collectives import OVERLAP_SLOWDOWN, Links, Span, overlap_adds_s, sent_bytes
from autoplan_cost_models.compute import Speeds
from autoplan_cost_models.execution import EAGER, Execution
from autoplan_cost_models.kernel_table import Floats
from autoplan_cost_models.kernels import Operation
from autoplan_cost_models.layout_prices import NodePrices
from autoplan_cost_models.memory import NamedBytes
from autoplan_cost_models.region_work import ParameterUse, RegionWork, measure_region

__all__ = ["CostModel", "RegionCost", "RegionWork", "measure_region"]


@dataclass(frozen=True)
class CollectiveCost:
    """All collectives of one kind and size in a region, for one micro-batch: seconds, and bytes that one
    device sends. ``again_bytes`` are sent once more where everything is recomputed; what selective recompute
    gathers again takes ``selected_s``."""

    kind: str
    axis: str
    forward_s: float
    backward_s: float
    again_s: float
    forward_bytes: float
    backward_bytes: float
    again_bytes: float
    selected_s: float = 0.0


@dataclass(frozen=True)
class RegionCost:
    """One region on one rank, for one micro-batch.

    ``forward_s`` and ``backward_s`` are compute alone; ``tp_forward_s`` and ``tp_backward_s`` the
    collectives of the axes inside the region: of a ring what shows beside its attention, else all. The
    mappings are keyed by recompute kind: extra backward time (collectives run again included); bytes kept
    per micro-batch in flight (the region's inputs included, its outputs not: they are the next region's
    inputs; ``side_items``, read by every block, apart: a stage counts them once); bytes that live only while
    the region runs.
    Of ``backward_s`` a split backward puts off ``weight_s``, and keeps ``deferred_items`` until then.
    ``model_flops`` is three times the forward contractions of the whole region, causal attention half.
    ``estimated`` names the estimated quantities used.
    """

    forward_s: float
    backward_s: float
    tp_forward_s: float
    tp_backward_s: float
    recompute_s: Mapping[str, float]
    saved_bytes: Mapping[str, float]
    transient_bytes: Mapping[str, float]
    saved_items: Mapping[str, tuple[NamedBytes, ...]]
    transient_items: Mapping[str, tuple[NamedBytes, ...]]
    side_items: tuple[NamedBytes, ...]
    parameters: tuple[ParameterUse, ...]
    buffer_bytes: float
    output_bytes: float
    model_flops: float
    estimated: tuple[str, ...] = ()
    collectives: tuple[CollectiveCost, ...] = ()
    weight_s: float = 0.0
    deferred_items: tuple[NamedBytes, ...] = ()

    @cached_property
    def trainable_numel(self) -> int:
        return sum(use.numel for use in self.parameters if use.trainable)

    def held(self, *, by_expert: bool) -> tuple[float, float]:
        """(bytes, trained elements) of the parameters that are experts' own, or of the others."""
        uses = [use for use in self.parameters if use.by_expert == by_expert]
        return float(sum(use.bytes for use in uses)), float(sum(use.numel for use in uses if use.trainable))

    @cached_property
    def held_bytes(self) -> tuple[float, float]:
        """Bytes of the parameters that all replicas have, and of experts' own."""
        return self.held(by_expert=False)[0], self.held(by_expert=True)[0]

    @cached_property
    def held_trained(self) -> tuple[float, float]:
        """The same in trained elements."""
        return self.held(by_expert=False)[1], self.held(by_expert=True)[1]

    @cached_property
    def parameter_bytes(self) -> float:
        return float(sum(use.bytes for use in self.parameters))


@dataclass(frozen=True)
class CostModel:
    """Prices regions, operations and collectives on one chip and cluster, computing in ``dtype``.

    ``dtype`` is the workload's policy (``bf16``, ``fp32``, ...); each kernel is priced in its own dtype.
    ``execution`` says how the program that runs the plan executes it.
    """

    profile: HardwareProfile
    dtype: str
    execution: Execution = EAGER
    speeds: Speeds = field(init=False, repr=False)
    links: Links = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "speeds", Speeds(self.profile, self.execution.attention))
        object.__setattr__(self, "links", Links(self.profile))

    @property
    def fused_attention(self) -> bool:
        """What ``measure_region`` must be told: whether the chip has a flash kernel."""
        return "flash_attention" in self.profile.kernels

    def region_cost(self, work: RegionWork, micro_batch: int, spans: Mapping[str, Span]) -> RegionCost:
        """Price ``work`` at ``micro_batch`` samples with its collectives on the ``spans`` of their axes.

        Raises BadInputError when the graph is known at another micro-batch only.
        """
        table = work.kernels(micro_batch)
        steps = work.steps_to(micro_batch)
        seconds = self.speeds.seconds(table)
        backward = float(np.sum(seconds[table.is_backward]))
        collectives = self._collectives(work, steps, spans, seconds)
        if self.execution.overlaps_tp:
            collectives = tuple(_in_pieces(one, spans[one.axis].size) for one in collectives)
        again = {kind: float(np.sum(seconds[flags])) for kind, flags in work.run_again.items()}
        again["full"] += sum(one.again_s for one in collectives)
        again["selective"] += sum(one.selected_s for one in collectives)
        saved, transient = work.memory.saved_items(steps), work.memory.transient_items(steps)
        return RegionCost(
            forward_s=float(np.sum(seconds)) - backward,
            backward_s=backward,
            tp_forward_s=sum(one.forward_s for one in collectives),
            tp_backward_s=sum(one.backward_s for one in collectives),
            recompute_s=again,
            saved_bytes={kind: sum(item.bytes for item in items) for kind, items in saved.items()},
            transient_bytes={kind: sum(item.bytes for item in items) for kind, items in transient.items()},
            saved_items=saved,
            transient_items=transient,
            side_items=work.memory.side_items(steps),
            parameters=work.parameters,
            buffer_bytes=work.buffer_bytes,
            output_bytes=work.memory.output_bytes.at(steps),
            model_flops=3.0 * work.whole_flops.at(steps),
            estimated=self._estimated(work, spans),
            collectives=collectives,
            weight_s=float(np.sum(seconds[table.deferrable])),
            deferred_items=work.memory.deferred_items(steps),
        )

    def collective_s(self, kind: str, message_bytes: float, span: Span) -> float:
        """Seconds of one collective; see :meth:`Links.seconds`."""
        return self.links.seconds(kind, message_bytes, span)

    def operation_s(self, operation: Operation, fraction: float = 1.0) -> float:
        """Forward plus backward seconds of one operation when a rank does ``fraction`` of its work."""
        return self.speeds.operation_seconds(operation, fraction)

    def layout_prices(self, span: Span) -> NodePrices:
        """Prices of nodes and collectives on one group, as the layout search asks for them."""
        return NodePrices(self.speeds, self.links, span)

    def _collectives(
        self, work: RegionWork, steps: float, spans: Mapping[str, Span], compute: Floats
    ) -> tuple[CollectiveCost, ...]:
        """``compute``: seconds of every kernel, behind which a ring hides."""
        found: list[CollectiveCost] = []
        for form in work.collectives:
            size, span = form.size.at(steps), spans[form.axis]
            counts = (form.forward, form.backward, form.recomputed)
            one_s, sent = self.links.seconds(form.kind, size, span), sent_bytes(form.kind, size, span.size)
            seconds, amounts = [one_s * n for n in counts], (sent * n for n in counts)
            if form.behind >= 0:
                own, is_backward = work.table.operation == form.behind, work.table.is_backward
                hidden = [float(np.sum(compute[own & flags])) for flags in (~is_backward, is_backward)]
                seconds = [overlap_adds_s(h, s) if s else 0.0 for h, s in zip([*hidden, hidden[0]], seconds)]
            found.append(
                CollectiveCost(form.kind, form.axis, *seconds, *amounts, selected_s=one_s * form.selected)
            )
        return tuple(found)

    def _estimated(self, work: RegionWork, spans: Mapping[str, Span]) -> tuple[str, ...]:
        names = set(self.speeds.estimated(work.table))
        for form in work.collectives:
            names.update(self.links.estimated(form.kind, spans[form.axis]))
        return tuple(sorted(names))


def _in_pieces(cost: CollectiveCost, ranks: int) -> CollectiveCost:
    """A tp collective in as many pieces as ranks beside its product: the first shows, the rest slow it."""
    if cost.axis != "tp":
        return cost
    share = 1 / ranks + (OVERLAP_SLOWDOWN - 1) * (1 - 1 / ranks)
    shown = (share * seconds for seconds in (cost.forward_s, cost.backward_s, cost.again_s))
    return replace(cost, **dict(zip(("forward_s", "backward_s", "again_s"), shown)))
