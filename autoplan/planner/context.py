"""Context parallelism: a region class and how attention runs on cp come in, its layout on cp goes out.

Every sample's tokens are cut over the ranks of cp: between regions always, inside as the layout's program
finds it cheapest. Parameters stay whole, their gradients are summed with those of the replicas, and a loss
leaves its region as a partial sum. Attention alone needs the tokens of other ranks:

``ulysses``  tokens cut in order; queries, keys and values go to the ranks by heads, and the output comes back
``ring``     keys and values travel round a ring; causal models cut tokens in zigzag, so that work is even
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from autoplan.plan import Layout
from autoplan.planner.boundaries import GraphOf, token_boundaries
from autoplan.planner.layout import Boundary, LayoutPrices, LayoutSettings, choose_layout
from autoplan.regions import Region
from autoplan_passes.attention import attention_heads, attention_outputs, head_degrees, is_causal
from autoplan_passes.candidates import Cutting, find_differentiable
from autoplan_passes.dim_kinds import Kinds
from autoplan_passes.shifted_loss import keep_all_positions
from autoplan_passes.states import PARTIAL, REPLICATE, REPLICATE_PARTIAL_GRADIENT

ULYSSES, RING = "ulysses", "ring"
BY_HEADS = Cutting(features=False, tokens=True, heads=True)
ROUND_A_RING = Cutting(features=False, tokens=True, ring=True)


@dataclass
class Context:
    """Layouts on cp of one model's region classes; what they share is worked out once.

    ``kinds`` of live tensors and ``graph_of`` a class at micro-batch ``batch`` are those of
    :func:`autoplan.planner.boundaries.mark_dims`; ``loss`` is the name of the model's loss.
    """

    kinds: Mapping[str, Kinds]
    regions: Sequence[Region]
    graph_of: GraphOf
    batch: int
    loss: str
    _borders: dict[tuple[int, str], dict[str, Boundary]] = field(
        default_factory=dict[tuple[int, str], dict[str, Boundary]]
    )

    def layout(self, class_id: str, cp: int, kind: str, prices: LayoutPrices) -> Layout:
        """The cheapest layout of a class on ``cp`` ranks."""
        graph = keep_all_positions(self.graph_of(class_id))
        differentiable = find_differentiable(graph.graph)
        whole = {
            node.name: REPLICATE_PARTIAL_GRADIENT if node in differentiable else REPLICATE
            for node in graph.graph.nodes
            if node.meta.get("kind") == "parameter"
        }
        settings = LayoutSettings(1.0, (0.0,), cutting=self._cutting(kind))
        border = self.boundaries(cp, kind)[class_id]
        return choose_layout(
            graph, cp, prices, pinned_parameters=whole, settings=settings, axis="cp", boundary=border
        )

    def boundaries(self, cp: int, kind: str) -> dict[str, Boundary]:
        """What crosses the boundary of every region class: tokens cut, the loss partial."""
        if (cp, kind) not in self._borders:
            zigzag = self._cutting(kind).zigzag
            found = token_boundaries(self.kinds, self.regions, self.graph_of, self.batch, cp, zigzag=zigzag)
            for region in self.regions:
                if self.loss in region.outputs:
                    border, place = found[region.class_id], region.outputs.index(self.loss)
                    outputs = {**border.outputs, place: PARTIAL}
                    found[region.class_id] = replace(border, outputs=outputs)
            self._borders[cp, kind] = found
        return self._borders[cp, kind]

    def degrees(self, kind: str, most: int) -> list[int]:
        """Degrees up to ``most`` that attention may run on by this kind."""
        return [cp for cp in range(1, most + 1) if self.suits(kind, cp)]

    def suits(self, kind: str, cp: int, tp: int = 1) -> bool:
        """Whether ``cp`` ranks can share the tokens at every attention op, and its heads beside ``tp``.

        Heads go to tp before cp; fewer kv heads than cp ranks are repeated.
        """
        if cp == 1 or not self._heads:
            return cp == 1
        return (kind == RING or self._suits_heads(cp, tp)) and self._cuts_attention(kind, cp)

    def _suits_heads(self, cp: int, tp: int) -> bool:
        return all(
            cp * tp in head_degrees(q, kv) and (kv % (cp * tp) == 0 or cp % kv == 0) for q, kv in self._heads
        )

    def _cuts_attention(self, kind: str, cp: int) -> bool:
        borders = self.boundaries(cp, kind)
        return all(
            any(state.is_shard for state in borders[name].inputs.values()) for name in self._with_attention
        )

    @cached_property
    def _heads(self) -> set[tuple[int, int]]:
        """(query heads, kv heads) of the attention ops."""
        graphs = (self.graph_of(name) for name in self._with_attention)
        return {(q, kv) for graph in graphs for _, q, kv in attention_heads(graph)}

    @cached_property
    def _with_attention(self) -> list[str]:
        classes = dict.fromkeys(region.class_id for region in self.regions)
        return [name for name in classes if attention_outputs(self.graph_of(name).graph)]

    def _cutting(self, kind: str) -> Cutting:
        if kind == ULYSSES:
            return BY_HEADS
        causal = any(is_causal(self.graph_of(name).graph) for name in self._with_attention)
        return replace(ROUND_A_RING, zigzag=causal)


def joined(first: Layout, second: Layout) -> Layout:
    """Two layouts of one region class on different axes as one; both sets of collectives are sent."""
    return replace(
        second,
        axes={**first.axes, **second.axes},
        collectives_forward=_summed(first.collectives_forward, second.collectives_forward),
        collectives_backward=_summed(first.collectives_backward, second.collectives_backward),
        collective_bytes_forward=first.collective_bytes_forward + second.collective_bytes_forward,
        collective_bytes_backward=first.collective_bytes_backward + second.collective_bytes_backward,
        replicated_ops=tuple(sorted({*first.replicated_ops, *second.replicated_ops})),
    )


def _summed(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
    return dict(Counter(first) + Counter(second))
