"""How one parameter lies on all axes inside a region: a text such as ``S(0)@ep S(1)`` comes in and goes out.

A state without ``@axis`` is that of ``tp``; axes on which the parameter is whole are left out; ``R`` is whole
on all of them, ``R*`` whole with a gradient that is summed once a step. Pieces are cut in the order of
``ORDER``, each from the piece before. ``S(0) padded(50257:50304)``: rows of zeros follow the model's 50257.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from autoplan_passes.states import REPLICATE, State, cut_tensor, join_tensors, parse_state

# The axes on which parameters are cut, outermost first.
ORDER = ("ep", "tp")
PADDED = "padded("


@dataclass(frozen=True)
class Placement:
    """``states``: (axis, S or R*) for each axis on which the parameter is not R, in ``ORDER``.

    ``padded``: how many rows the model's parameter has, and how many are cut; () where they are the same.
    """

    states: tuple[tuple[str, State], ...] = ()
    padded: tuple[int, ...] = ()

    def __str__(self) -> str:
        parts = [str(state) if axis == "tp" else f"{state}@{axis}" for axis, state in self.states] or ["R"]
        parts += [f"{PADDED}{self.padded[0]}:{self.padded[1]})"] if self.padded else []
        return " ".join(parts)

    def on(self, axis: str) -> State:
        """The state on one axis."""
        return dict(self.states).get(axis, REPLICATE)

    @property
    def by_expert(self) -> bool:
        """Whether a rank holds its own experts' alone, used on the tokens of every rank of ``ep``."""
        return self.on("ep").is_shard

    def cut(self, whole: torch.Tensor, places: Mapping[str, tuple[int, int]]) -> torch.Tensor:
        """The piece of the rank whose (number, size) on each axis ``places`` gives."""
        piece = whole
        if self.padded:
            added = whole.new_zeros([self.padded[1] - self.padded[0], *whole.shape[1:]])
            piece = torch.cat([whole, added])
        for axis, state in self.states:
            piece = cut_tensor(piece, state, *places[axis])
        return piece

    def join(
        self, piece: torch.Tensor, gather: Callable[[torch.Tensor, str], Sequence[torch.Tensor]]
    ) -> torch.Tensor:
        """The whole parameter; ``gather(piece, axis)`` gives the pieces of all ranks of an axis."""
        for axis, state in reversed(self.states):
            if state.is_shard:
                piece = join_tensors(gather(piece, axis), state)
        return piece[: self.padded[0]] if self.padded else piece


def parse_placement(text: str) -> Placement:
    """Inverse of ``str``."""
    parts = [part.partition("@") for part in text.split() if not part.startswith(PADDED)]
    padded = [part.removeprefix(PADDED)[:-1].split(":") for part in text.split() if part.startswith(PADDED)]
    states = {axis or "tp": parse_state(state) for state, _, axis in parts}
    return place_on(states, tuple(int(rows) for rows in padded[0]) if padded else ())


def place_on(states: Mapping[str, State], padded: tuple[int, ...] = ()) -> Placement:
    """A placement from the state on every axis."""
    used = tuple((axis, states[axis]) for axis in ORDER if states.get(axis, REPLICATE) != REPLICATE)
    return Placement(used, padded)
