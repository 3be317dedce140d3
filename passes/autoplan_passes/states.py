"""Placement states of a tensor on one mesh axis: what each rank holds, and how its gradient lies.

A differentiable tensor is in one of four states on an axis of size t:

====== ======================= ================
state  value                   gradient
====== ======================= ================
R      replicated              replicated
R*     replicated              partial (sum over ranks)
S(d)   cut along dim d         cut along dim d
P      partial (sum over ranks) replicated
====== ======================= ================

Tensors without gradient are R or S(d); cutting them is free.

A cut may respect sections: ``S(0:64+32+32)`` cuts each of three consecutive sections of dim 0 into t
equal pieces, and a rank holds its piece of every section, joined. So a fused query-key-value or
gate-up weight is cut and its parts stay together. The sections named repeat until the dim is full:
``S(0:16)`` cuts every run of 16, so tokens merged with samples are cut inside each sample, however many
samples there are. Plain ``S(0)`` is one section.

``Z(1)`` is S(1) cut in zigzag: of 2t equal pieces of each section a rank holds piece r and its mirror image
2t - 1 - r, so that causal attention is as much work on every rank.

``S(1)x2`` is cut in t / 2 pieces, each held by 2 neighbours: key-value heads fewer than the ranks. Their
gradients are partial sums over those neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, order=True)
class State:
    """``kind`` in ``R R* S P``; ``dim`` the tensor dim of S, else -1; ``sections`` global sizes, repeated;
    ``zigzag`` for the order of pieces of Z; ``copies`` neighbours hold the same piece."""

    kind: str
    dim: int = -1
    sections: tuple[int, ...] = ()
    zigzag: bool = False
    copies: int = 1

    def __str__(self) -> str:
        if self.kind != "S":
            return self.kind
        sections = ":" + "+".join(map(str, self.sections)) if self.sections else ""
        copies = f"x{self.copies}" if self.copies > 1 else ""
        return f"{'Z' if self.zigzag else 'S'}({self.dim}{sections}){copies}"

    @property
    def is_shard(self) -> bool:
        return self.kind == "S"

    def ways(self, size: int) -> int:
        """In how many pieces ``size`` ranks hold the tensor."""
        return size // self.copies if self.is_shard else 1

    def sections_of(self, length: int) -> tuple[int, ...]:
        """The sections of a whole dim of ``length``; () where they do not fill it."""
        if not self.sections:
            return (length,)
        repeats, rest = divmod(length, sum(self.sections))
        return () if rest else self.sections * repeats

    def fitted(self, shape: Sequence[int]) -> State:
        """The same cut of a tensor of this shape, plain where one section is the whole dim."""
        whole = self.is_shard and self.dim < len(shape) and self.sections == (shape[self.dim],)
        return State("S", self.dim, zigzag=self.zigzag, copies=self.copies) if whole else self


REPLICATE = State("R")
REPLICATE_PARTIAL_GRADIENT = State("R*")
PARTIAL = State("P")


def shard(dim: int, sections: Sequence[int] = (), zigzag: bool = False, copies: int = 1) -> State:
    """S(dim), or Z(dim), by the sections of the whole dim; one section or none is the plain cut."""
    return State("S", dim, _period(tuple(sections)) if len(sections) > 1 else (), zigzag, copies)


def _period(sections: tuple[int, ...]) -> tuple[int, ...]:
    """``(16, 16, 16) -> (16,)``: the shortest beginning that, repeated, is all of it."""
    count = len(sections)
    lengths = (n for n in range(1, count) if count % n == 0)
    return next((sections[:n] for n in lengths if sections[:n] * (count // n) == sections), sections)


def at_experts(chain: int) -> State:
    """``E(k)``: rows where the experts of the region's k-th chain are (:mod:`autoplan_passes.experts`)."""
    return State(f"E({chain})")


def is_at_experts(state: State) -> bool:
    """Whether rows in this state are at their experts."""
    return state.kind.startswith("E(")


def parse_state(text: str) -> State:
    """``"S(1)" -> State("S", 1)``, ``"S(0:64+32)"``, ``"S(0)x2"``, ``"R*"``; inverse of ``str``."""
    if not text.startswith(("S(", "Z(")):
        return State(text)
    cut, _, copies = text[2:].partition(")")
    dim, _, sections = cut.partition(":")
    sizes = tuple(int(size) for size in sections.split("+")) if sections else ()
    return State("S", int(dim), _period(sizes), text.startswith("Z"), int(copies[1:] or 1))


def local_shape(shape: Sequence[int], state: State, size: int) -> tuple[int, ...]:
    """Shape held by one of ``size`` ranks of a tensor whose global shape is ``shape``."""
    if not state.is_shard:
        return tuple(shape)
    return tuple(n // state.ways(size) if d == state.dim else n for d, n in enumerate(shape))


def divides(shape: Sequence[int], state: State, size: int) -> bool:
    """Whether every section of the cut dim splits into ``size`` equal, non-empty pieces."""
    if not state.is_shard:
        return True
    if size % state.copies:
        return False
    sections, pieces = state.sections_of(shape[state.dim]), state.ways(size) * (2 if state.zigzag else 1)
    return bool(sections) and all(n >= pieces and n % pieces == 0 for n in sections)


def cut_tensor(full: torch.Tensor, state: State, rank: int, size: int) -> torch.Tensor:
    """What ``rank`` of ``size`` holds of ``full``: a piece of every section for S, else all of it."""
    if not state.is_shard or size == 1:
        return full
    rank, size = rank // state.copies, state.ways(size)
    held = (rank, 2 * size - 1 - rank) if state.zigzag else (rank,)
    sections = full.split(state.sections_of(full.shape[state.dim]), dim=state.dim)
    pieces = (part.chunk(size * len(held), dim=state.dim) for part in sections)
    return torch.cat([part[i] for part in pieces for i in held], dim=state.dim)


def join_tensors(pieces: Sequence[torch.Tensor], state: State) -> torch.Tensor:
    """The full tensor from every rank's piece (inverse of :func:`cut_tensor`; R takes the first)."""
    if not state.is_shard or len(pieces) == 1:
        return pieces[0]
    pieces = pieces[:: state.copies]
    turns = 2 if state.zigzag else 1  # the second half of every section comes in reverse order of ranks
    sections = state.sections_of(len(pieces) * pieces[0].shape[state.dim])
    sizes = [n // len(pieces) // turns for n in sections for _ in range(turns)]
    by_rank = [piece.split(sizes, dim=state.dim) for piece in pieces]
    joined = [part[::-1] if i % turns else part for i, part in enumerate(zip(*by_rank))]
    return torch.cat([piece for part in joined for piece in part], dim=state.dim)
