"""The table of conversions between placement states: what is sent, and which function does it.

Two states come in; out comes the chain of :class:`Conversion` that leads from one to the other, each with
the collective of its forward and of its backward. Source: the gradient rule of a placement (the
gradient of R is R, of R* and S(d) is P and S(d), of P is R) applied to each pair of states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, product
from typing import Any

from autoplan_passes import collectives
from autoplan_passes.states import PARTIAL, REPLICATE, REPLICATE_PARTIAL_GRADIENT, State

# (from, to) -> (sent forward, sent backward, function). Every collective moves the whole tensor's bytes.
TABLE: dict[tuple[str, str], tuple[str, str, Callable[..., Any]]] = {
    ("R", "R*"): ("none", "all_reduce", collectives.copy_to),
    ("R", "S"): ("none", "all_gather", collectives.scatter_to),
    ("R", "P"): ("none", "none", collectives.on_first_rank),
    ("R*", "R"): ("none", "none", collectives.once),
    ("R*", "S"): ("none", "none", collectives.slice_of),
    ("R*", "P"): ("none", "none", collectives.first_of),
    ("S", "R"): ("all_gather", "none", collectives.gather_from),
    ("S", "R*"): ("all_gather", "reduce_scatter", collectives.gather_reduce),
    ("S", "S"): ("all_to_all", "all_to_all", collectives.all_to_all),
    ("S", "P"): ("none", "none", collectives.embed_piece),
    ("P", "R"): ("all_reduce", "none", collectives.reduce_from),
    ("P", "S"): ("reduce_scatter", "all_gather", collectives.reduce_scatter),
}
# Relative effort, to choose among chains only; the layout's search uses the chip's own prices.
EFFORT = {"none": 0.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 0.5, "all_reduce": 2.0}
FREE_STEP = 1e-3


@dataclass(frozen=True)
class Conversion:
    """One step from ``source`` to ``target``; ``forward`` and ``backward`` name what is sent."""

    source: State
    target: State
    forward: str
    backward: str
    function: Callable[..., Any]

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Arguments of ``function`` between the tensor and the axis."""
        if self.source.is_shard and self.target.is_shard:
            return (self.source.dim, self.target.dim)
        cut = self.source if self.source.is_shard else self.target
        return (cut.dim,) if cut.is_shard else ()

    def sections(self, shape: Sequence[int]) -> tuple[tuple[int, ...] | bool, ...]:
        """Arguments after the axis, of a tensor of this whole shape: sections of what is cut, and zigzag."""
        cuts = [state for state in (self.source, self.target) if state.is_shard]
        if not any(state.sections or state.zigzag for state in cuts):
            return ()
        sections = (state.sections_of(shape[state.dim]) if state.sections else () for state in cuts)
        return (*sections, *([True] if any(state.zigzag for state in cuts) else []))

    @property
    def effort(self) -> float:
        return EFFORT[self.forward] + EFFORT[self.backward] + FREE_STEP


def conversion(source: State, target: State, differentiable: bool = True) -> Conversion | None:
    """The single step between two states, or None where it takes two, or none is needed."""
    row = TABLE.get((source.kind, target.kind))
    if source == target or row is None:
        return None
    if max(source.copies, target.copies) > 1:  # made where it is needed, of parameters held so
        return None
    both_cut = source.is_shard and target.is_shard
    if both_cut and (source.dim == target.dim or source.zigzag or target.zigzag):
        return None
    forward, backward, function = row
    if not differentiable:
        if not {source.kind, target.kind} <= {"R", "S"}:
            return None
        backward, function = "none", collectives.slice_of if source == REPLICATE else function
    return Conversion(source, target, forward, backward, function)


@lru_cache(maxsize=65536)
def chains(source: State, targets: frozenset[State], differentiable: bool = True) -> tuple[Conversion, ...]:
    """The cheapest set of steps that makes every target from ``source``, in an order that can be run.

    Steps are shared: R and R* from S(d) are one gather and reduce-scatter, then a free step.
    """
    wanted = sorted(targets - {source})
    if not wanted:
        return ()
    hubs = [s for s in (REPLICATE, REPLICATE_PARTIAL_GRADIENT, PARTIAL) if s != source and s not in targets]
    best: tuple[float, tuple[Conversion, ...]] | None = None
    for extra in (subset for n in range(2) for subset in combinations(hubs, n)):
        tree = _cheapest_tree(source, [*wanted, *extra], differentiable)
        if tree and (best is None or tree[0] < best[0]):
            best = tree
    assert best is not None, (source, targets)
    return best[1]


def _cheapest_tree(
    source: State, made: Sequence[State], differentiable: bool
) -> tuple[float, tuple[Conversion, ...]] | None:
    """Every state of ``made`` gets one parent; the cheapest choice without cycles."""
    parents = [
        [step for other in [source, *made] if (step := conversion(other, state, differentiable))]
        for state in made
    ]
    best: tuple[float, tuple[Conversion, ...]] | None = None
    for choice in product(*parents):
        effort = sum(step.effort for step in choice)
        if best is None or effort < best[0]:
            ordered = _runnable_order(source, choice)
            if ordered is not None:
                best = (effort, ordered)
    return best


def _runnable_order(source: State, steps: Sequence[Conversion]) -> tuple[Conversion, ...] | None:
    ready, order, waiting = {source}, list[Conversion](), list(steps)
    while waiting:
        step = next((s for s in waiting if s.source in ready), None)
        if step is None:
            return None
        waiting.remove(step)
        ready.add(step.target)
        order.append(step)
    return tuple(order)
