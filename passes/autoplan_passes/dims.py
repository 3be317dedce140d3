"""One way to say how an op's dims correspond: every tensor dim is a product of named atoms.

Shapes, or a pattern such as ``"... i, o i -> ... o"``, come in; a :class:`Form` goes out, through which a cut
of any tensor of the op is carried to all its other tensors. A dim that a view splits or merges is
several atoms, outermost first; an atom that a tensor lacks is broadcast or contracted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autoplan_passes.states import State, shard

Dims = tuple[tuple[str, ...], ...]
Shape = tuple[int, ...]
# Atom, its sections, whether in zigzag, how many neighbours hold the same piece.
Cut = tuple[str, tuple[int, ...], bool, int]

FACTOR, ADDEND, NONLINEAR = "f", "a", "n"
OUTPUT = -1


@dataclass(frozen=True)
class Parts:
    """Tensors that are consecutive pieces ``(tensor, start, length)`` of dim ``dim`` of tensor ``whole``.

    A tensor is named by its position among the inputs, or ``OUTPUT``. The dim is cut by sections that no
    piece divides.
    """

    whole: int
    dim: int
    pieces: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Form:
    """How the dims of an op's tensor inputs and its output correspond.

    ``roles`` says of each input whether the op is linear in it by itself (factor), linear in all addends
    together, or not linear. ``blocked`` atoms may not be cut. Atoms missing from the output are summed
    over, or averaged if ``averaged``. ``sizes`` has the size of every atom.
    """

    inputs: tuple[Dims, ...]
    output: Dims
    sizes: Mapping[str, int]
    roles: str
    blocked: frozenset[str] = frozenset()
    averaged: bool = False
    parts: Parts | None = None
    contracted: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        outside = {atom for dims in self.inputs for dim in dims for atom in dim}
        inside = {atom for dim in self.output for atom in dim}
        object.__setattr__(self, "contracted", frozenset(outside - inside))

    def dims_of(self, tensor: int) -> Dims:
        return self.output if tensor == OUTPUT else self.inputs[tensor]


def carry(form: Form, tensor: int, state: State, ways: int) -> Cut | None:
    """The atom that ``state`` of ``tensor`` cuts, its sections, order and copies; None where none fits."""
    dims = form.dims_of(tensor)
    if state.dim >= len(dims):
        return None
    dim, sizes = dims[state.dim], form.sizes
    total = math.prod(sizes[atom] for atom in dim)
    sections = state.sections_of(total)
    if not sections:
        return None
    if ways % state.copies:
        return None
    pieces = state.ways(ways) * (2 if state.zigzag else 1)
    for position, atom in enumerate(dim):
        outer = math.prod(sizes[a] for a in dim[:position])
        inner = math.prod(sizes[a] for a in dim[position + 1 :])
        own = _atom_sections(sections, outer, inner)
        if own and all(n % pieces == 0 for n in own) and atom not in form.blocked:
            return atom, own if len(own) > 1 else (), state.zigzag, state.copies
    return None


def _atom_sections(sections: Sequence[int], outer: int, inner: int) -> tuple[int, ...] | None:
    """Sections of one atom, from those of its dim: ``outer`` equal repeats of multiples of ``inner``."""
    count, rest = divmod(len(sections), outer)
    repeat = tuple(sections[:count])
    if rest or repeat * outer != tuple(sections) or any(n % inner for n in repeat):
        return None
    return tuple(n // inner for n in repeat)


def place(form: Form, tensor: int, cut: Cut) -> State | None:
    """The state that ``cut`` gives ``tensor``; None where the tensor lacks the atom."""
    atom, own, zigzag, copies = cut
    for index, dim in enumerate(form.dims_of(tensor)):
        if atom in dim:
            position = dim.index(atom)
            outer = math.prod(form.sizes[a] for a in dim[:position])
            inner = math.prod(form.sizes[a] for a in dim[position + 1 :])
            return shard(index, tuple(n * inner for n in own or (form.sizes[atom],)) * outer, zigzag, copies)
    return None


def narrow(sections: Sequence[int], start: int, length: int) -> tuple[int, ...] | None:
    """The sections that make up ``[start, start + length)`` exactly, or None where it divides one."""
    inside: list[int] = []
    offset = 0
    for size in sections:
        if start <= offset and offset + size <= start + length:
            inside.append(size)
        elif offset < start + length and start < offset + size:
            return None
        offset += size
    return tuple(inside) if inside else None


Factor = tuple[int, int]


def _factors(shape: Sequence[int]) -> Iterator[Factor]:
    return ((d, n) for d, n in enumerate(shape) if n > 1)


@dataclass
class _Side:
    """The dims of one side of a reshape, consumed outermost first; ``now`` is what is left of one."""

    shape: Sequence[int]
    atoms: list[list[str]] = field(init=False)

    def __post_init__(self) -> None:
        self.atoms = [[] for _ in self.shape]
        self._rest = _factors(self.shape)
        self.now = next(self._rest, None)

    def take(self, atom: str, size: int) -> None:
        """Give the dim at hand an atom, and go on to what is left of it or to the next dim."""
        assert self.now is not None
        dim, n = self.now
        self.atoms[dim].append(atom)
        self.now = (dim, n // size) if n > size else next(self._rest, None)


def match_views(
    source: Sequence[int], target: Sequence[int]
) -> tuple[Dims, Dims, dict[str, int], frozenset[str]]:
    """Atoms of a reshape from ``source`` to ``target``, in row-major order; what does not match is blocked.

    ``(6, 8) -> (2, 3, 8)`` splits dim 0 into two atoms; in ``(6, 4) -> (4, 6)`` the outermost common
    factor 2 is an atom and the rest of both is blocked.
    """
    left, right = _Side(source), _Side(target)
    sizes: dict[str, int] = {}
    blocked: set[str] = set()
    while left.now and right.now:
        common = math.gcd(left.now[1], right.now[1])
        if common > 1:
            atom = f"v{len(sizes)}"
            sizes[atom] = common
            left.take(atom, common)
            right.take(atom, common)
        else:
            _skip_unmatched(left, right, sizes, blocked)
    return tuple(map(tuple, left.atoms)), tuple(map(tuple, right.atoms)), sizes, frozenset(blocked)


def _skip_unmatched(left: _Side, right: _Side, sizes: dict[str, int], blocked: set[str]) -> None:
    """Give each side blocked atoms until both have covered the same number of elements."""
    done = {"left": 1, "right": 1}
    while True:
        name, side = ("left", left) if done["left"] <= done["right"] else ("right", right)
        assert side.now is not None
        atom, size = f"u{len(sizes)}", side.now[1]
        sizes[atom] = size
        blocked.add(atom)
        side.take(atom, size)
        done[name] *= size
        if done["left"] == done["right"]:
            return
