"""What a choice inside a region costs: a rule, a conversion or a stored parameter comes in, seconds go out.

The chip's own times come from the cost model through :class:`LayoutPrices`; what is counted, and how much
of an op each rank does, is decided here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from torch import fx

from autoplan_cost_models.collectives import overlap_adds_s
from autoplan_passes import table_contractions
from autoplan_passes.calls import Call, first_tensor, op_name, tensor_inputs
from autoplan_passes.candidates import FEATURES, FEATURES_AND_TOKENS, Cutting
from autoplan_passes.conversions import Conversion
from autoplan_passes.implementations import implementation_sends
from autoplan_passes.rules import Rule, form_of
from autoplan_passes.shard import tensor_bytes
from autoplan_passes.states import PARTIAL, REPLICATE_PARTIAL_GRADIENT, State

# Weight, gradient, master weight and two moments: what a trained parameter keeps resident.
STATE_BYTES_PER_ELEMENT = 16
MEMORY_S_PER_BYTE = (3e-12, 3e-11, 3e-10, 3e-9, 3e-8, 3e-7)
# Elementwise ops fuse into their neighbours; priced in full they would pull norms onto cut hidden dims.
ELEMENTWISE_WEIGHT = 1e-3
# Below this, moving bytes takes longer than computing on every chip with a profile (lowest: about 80).
COMPUTE_BOUND_FLOPS_PER_BYTE = 50
TIE_BREAK_S = 1e-9
# A whole tensor of zeros round a piece, written and read at about 2 TB/s: it decides between layouts that
# send the same bytes, by adding pieces or by adding padded partial sums.
PADDING_S_PER_BYTE = 1e-12


class LayoutPrices(Protocol):
    """What the cost model says of one chip and one span of the tp axis, in seconds."""

    def operation_s(self, node: fx.Node, fraction: float, /) -> float:
        """Forward and backward of a node of which each rank does ``fraction``."""
        ...

    def collective_s(self, kind: str, sent_bytes: float, /) -> float:
        """One collective; bytes of the largest buffer a rank holds (the whole tensor, but for all_to_all)."""
        ...


@dataclass(frozen=True)
class LayoutSettings:
    """What counts: ``cutting`` says which dims the axis cuts; ``elementwise`` is the share of an elementwise
    op's time that is priced.

    ``memory_s_per_byte`` are the prices of residence, tried in turn until a layout cuts ``cut_share`` of the
    parameter bytes that can be cut; a layout at a raised price may send, forward, ``sent_limit`` times the
    smallest activations of its contractions. What is sent once a step counts one of ``microbatches`` times.
    """

    elementwise: float = ELEMENTWISE_WEIGHT
    memory_s_per_byte: tuple[float, ...] = MEMORY_S_PER_BYTE
    cut_share: float = 0.95
    sent_limit: float = 4.0
    microbatches: int = 8
    cutting: Cutting = FEATURES


# With tokens cut, elementwise work is shared by cutting them; unpriced, norms would run on gathered tensors.
SEQUENCE_SETTINGS = LayoutSettings(elementwise=1.0, cutting=FEATURES_AND_TOKENS)


@dataclass(frozen=True)
class Pricing:
    """Prices of one region graph on ``size`` ranks."""

    size: int
    prices: LayoutPrices
    settings: LayoutSettings
    differentiable: frozenset[fx.Node]

    def rule_s(self, node: fx.Node, rule: Rule) -> float:
        """Computing a node by a rule, with the collectives inside its implementation."""
        if node.op == "placeholder":
            return self._summed_s(node, rule.output)
        if op_name(node) == "getitem":
            return 0.0
        weight = 1.0 if op_name(node) in table_contractions.ROWS else self.settings.elementwise
        seconds = weight * self.prices.operation_s(node, self.share(node, rule)) if weight else 0.0
        for forward, backward, sent, sent_back in implementation_sends(rule.implementation, Call(node)):
            traffic = self._sent_s(forward, sent) + self._sent_s(backward, sent_back)
            seconds += overlap_adds_s(seconds, traffic) if forward == "ring" else traffic
        return seconds

    def _summed_s(self, node: fx.Node, state: State) -> float:
        """A micro-batch's part of the sum, once a step, of the gradient of a parameter stored R*, or held by
        several ranks."""
        if state != REPLICATE_PARTIAL_GRADIENT and state.copies == 1:
            return 0.0
        return self._sent_s("all_reduce", tensor_bytes(node)) / self.settings.microbatches + TIE_BREAK_S

    def share(self, node: fx.Node, rule: Rule) -> float:
        """Part of a node's work that each rank does: of its FLOPs where they bind, else of bytes moved."""
        if not rule.is_cut or rule.implementation == "vocab_embedding":
            return 1.0
        states = [(node, rule.output)]
        if op_name(node) != "aten.embedding":  # a lookup reads only the rows it returns
            states += zip(tensor_inputs(node), rule.inputs)
        whole = sum(tensor_bytes(n) for n, _ in states)
        if self._is_compute_bound(node, whole):
            return self._busiest(node, rule) / max(
                s.ways(self.size) for _, s in [*states, (node, rule.output)]
            )
        return sum(tensor_bytes(n) / s.ways(self.size) for n, s in states) / whole

    def _busiest(self, node: fx.Node, rule: Rule) -> float:
        """What the busiest rank does, in even shares: on a causal ring without zigzag the last does most."""
        uneven = rule.implementation == table_contractions.RING and not rule.output.zigzag
        return 2 - 1 / self.size if uneven and Call(node).arguments["is_causal"] else 1.0

    def _is_compute_bound(self, node: fx.Node, moved_bytes: float) -> bool:
        if op_name(node) in ("aten.scaled_dot_product_attention", table_contractions.RING):
            return True
        form = form_of(node) if op_name(node) in table_contractions.ROWS else None
        return (
            form is not None
            and 2 * math.prod(form.sizes.values()) > COMPUTE_BOUND_FLOPS_PER_BYTE * moved_bytes
        )

    def conversion_s(self, node: fx.Node, step: Conversion) -> float:
        """Forward and backward of one conversion of the whole tensor."""
        total = tensor_bytes(node)
        size = total / self.size if step.forward == "all_to_all" else float(total)
        padded = step.target == PARTIAL and step.source != PARTIAL
        padding_s = PADDING_S_PER_BYTE * total * self.settings.elementwise if padded else 0.0
        return self._sent_s(step.forward, size) + self._sent_s(step.backward, size) + padding_s + TIE_BREAK_S

    def resident_bytes(self, node: fx.Node, state: State) -> float:
        """What a parameter keeps on each rank, with its gradient and optimizer state if it is trained."""
        tensor = first_tensor(node)
        trained = node in self.differentiable
        whole = tensor.numel() * (STATE_BYTES_PER_ELEMENT if trained else tensor.element_size())
        return whole / state.ways(self.size)

    def _sent_s(self, kind: str, sent_bytes: float) -> float:
        return self.prices.collective_s(kind, sent_bytes) if kind != "none" and sent_bytes else 0.0
