"""What each collective does to a placement: a function of ``collectives`` in, its effect both ways out.

Written from what the functions do, not from the table that chooses them (``conversions.py``): the type check
of a rewritten graph is a second opinion. ``tests/test_typecheck.py`` holds the two against each other;
``tests/test_shard.py`` proves every conversion on ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from autoplan_passes import collectives
from autoplan_passes.states import State, shard


@dataclass(frozen=True)
class Transition:
    """Kinds (``R S P``) of the value before and after, and of the gradient that arrives and is passed on.

    ``sends`` names what the network does, forward and backward.
    """

    before: str
    after: str
    arrives: str
    passes: str
    sends: tuple[str, str]


TRANSITIONS: Mapping[Callable[..., Any], Transition] = {
    collectives.copy_to: Transition("R", "R", "P", "R", ("none", "all_reduce")),
    collectives.reduce_from: Transition("P", "R", "R", "R", ("all_reduce", "none")),
    collectives.gather_from: Transition("S", "R", "R", "S", ("all_gather", "none")),
    collectives.gather_reduce: Transition("S", "R", "P", "S", ("all_gather", "reduce_scatter")),
    collectives.scatter_to: Transition("R", "S", "S", "R", ("none", "all_gather")),
    collectives.slice_of: Transition("R", "S", "S", "P", ("none", "none")),
    collectives.reduce_scatter: Transition("P", "S", "S", "R", ("reduce_scatter", "all_gather")),
    collectives.all_to_all: Transition("S", "S", "S", "S", ("all_to_all", "all_to_all")),
    collectives.once: Transition("R", "R", "R", "P", ("none", "none")),
    collectives.on_first_rank: Transition("R", "P", "R", "R", ("none", "none")),
    collectives.first_of: Transition("R", "P", "R", "P", ("none", "none")),
    collectives.embed_piece: Transition("S", "P", "R", "S", ("none", "none")),
}


@dataclass(frozen=True)
class Move:
    """One collective of a graph: its tensor, and how it lies before and after.

    ``arrives`` is how the gradient of the result must lie, ``passes`` how that of the tensor comes out.
    """

    node: fx.Node
    tensor: fx.Node
    axis: str
    before: State
    after: State
    arrives: State
    passes: State
    sends: tuple[str, str]


def move_of(node: fx.Node) -> Move | None:
    """The collective that a node is, or None for an op.

    Its arguments are ``tensor, dims..., axis, sections..., zigzag``.
    """
    transition = TRANSITIONS.get(node.target) if callable(node.target) else None
    if transition is None:
        return None
    tensor, *rest = node.args
    at = next((i for i, argument in enumerate(rest) if isinstance(argument, str)), None)
    if at is None or not isinstance(tensor, fx.Node):
        return None
    dims = [int(str(d)) for d in rest[:at]] or [-1]
    sections = [_sizes(value) for value in rest[at + 1 :] if not isinstance(value, bool)]
    first, last = (sections[0], sections[-1]) if sections else ((), ())

    zigzag = any(value is True for value in rest[at + 1 :])

    def state(kind: str, dim: int, own: tuple[int, ...]) -> State:
        return shard(dim, own, zigzag) if kind == "S" else State(kind)

    before, passes = (state(k, dims[0], first) for k in (transition.before, transition.passes))
    after, arrives = (state(k, dims[-1], last) for k in (transition.after, transition.arrives))
    return Move(node, tensor, str(rest[at]), before, after, arrives, passes, transition.sends)


def _sizes(value: Any) -> tuple[int, ...]:
    listed: list[Any] = list(value) if isinstance(value, (tuple, list)) else []  # pyright: ignore[reportUnknownArgumentType] - arguments of a node
    return tuple(int(size) for size in listed)
