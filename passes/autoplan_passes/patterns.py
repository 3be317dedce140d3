"""Building blocks of the rule tables: patterns of letters and common shapes of ops become Forms.

A pattern names the dims of every tensor of an op: ``"... i, o i, +o -> ... o"``. ``...`` are any leading
dims, aligned from the right; a letter with ``!`` may not be cut; an input that starts with ``+`` is added
to the result. A dim of size 1 where others are larger is broadcast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from autoplan_passes.calls import Call
from autoplan_passes.dims import ADDEND, FACTOR, NONLINEAR, Dims, Form, Parts, Shape

FormOf = Callable[[Call], "Form | None"]


def letters(pattern: str, roles: str = FACTOR) -> FormOf:
    """The Form of an op whose inputs fit ``pattern``; trailing inputs may be missing."""
    left, right = pattern.split("->")
    inputs = [text.replace("+", " ").split() for text in left.split(",")]
    added = [text.strip().startswith("+") for text in left.split(",")]

    def form_of(call: Call) -> Form | None:
        if len(call.shapes) > len(inputs):
            return None
        named = [_name_dims(tokens, shape) for tokens, shape in zip(inputs, call.shapes)]
        result = _name_dims(right.split(), call.output)
        if result is None or any(names is None for names in named):
            return None
        own = "".join(ADDEND if plus else roles for plus, _ in zip(added, call.shapes))
        return form_from_names(call, [names or [] for names in named], result, own)

    return form_of


def _name_dims(tokens: Sequence[str], shape: Shape) -> list[str] | None:
    """One name a dim; the dims of ``...`` are named by their distance from the last of them."""
    at = next((i for i, token in enumerate(tokens) if token.startswith("...")), None)
    if at is None:
        return list(tokens) if len(tokens) == len(shape) else None
    rest = len(shape) - (len(tokens) - 1)
    mark = "!" if tokens[at].endswith("!") else ""
    if rest < 0:
        return None
    return [*tokens[:at], *(f"~{rest - 1 - i}{mark}" for i in range(rest)), *tokens[at + 1 :]]


def form_from_names(call: Call, inputs: Sequence[Sequence[str]], output: Sequence[str], roles: str) -> Form:
    """Equal names correspond; a name with ``!``, or with two sizes above 1, may not be cut."""
    sizes: dict[str, int] = {}
    blocked: set[str] = set()
    pairs = list(zip([*inputs, output], [*call.shapes, call.output]))
    for name, size in ((name, size) for names, shape in pairs for name, size in zip(names, shape)):
        letter = name.rstrip("!")
        known = sizes.get(letter, 1)
        if name.endswith("!") or (known > 1 and size > 1 and known != size):
            blocked.add(letter)
        sizes[letter] = max(size, known)
    dims = [
        tuple(
            (n.rstrip("!"),) if size > 1 and size == sizes[n.rstrip("!")] else ()
            for n, size in zip(names, shape)
        )
        for names, shape in pairs
    ]
    return Form(tuple(dims[:-1]), dims[-1], sizes, roles, frozenset(blocked))


def pointwise_form(call: Call, roles: str) -> Form:
    """Every output dim is an atom, found in the inputs that are not broadcast along it."""
    rank = len(call.output)
    sizes = {f"d{i}": n for i, n in enumerate(call.output)}

    def dims(shape: Shape) -> Dims:
        shift = rank - len(shape)
        return tuple(
            (f"d{i + shift}",) if n > 1 and n == call.output[i + shift] else () for i, n in enumerate(shape)
        )

    return Form(tuple(dims(s) for s in call.shapes), dims(call.output), sizes, roles)


def pointwise(roles: str | Callable[[Call], str] = NONLINEAR) -> FormOf:
    """Broadcasting elementwise op; one role for all inputs, one for each, or worked out from the call."""

    def form_of(call: Call) -> Form | None:
        own = roles(call) if callable(roles) else roles
        own = own * len(call.shapes) if len(own) == 1 else own[: len(call.shapes)]
        if any(len(shape) > len(call.output) for shape in call.shapes):
            return None
        return pointwise_form(call, own)

    return form_of


def along(blocked_dims: Callable[[Call], Sequence[int]], roles: str = NONLINEAR) -> FormOf:
    """Tensors of equal rank, dims kept in place; the op acts along the blocked dims."""

    def form_of(call: Call) -> Form | None:
        rank = len(call.output)
        stop = {d % max(rank, 1) for d in blocked_dims(call)}
        names = [f"d{i}" + "!" * (i in stop) for i in range(rank)]
        if any(len(shape) not in (0, rank) for shape in call.shapes):
            return None
        own = roles if len(roles) == len(call.shapes) else roles[0] + NONLINEAR * (len(call.shapes) - 1)
        return form_from_names(call, [names[: len(shape)] for shape in call.shapes], names, own)

    return form_of


def reduction(linear: bool = False, averaged: bool = False, dim_name: str = "dim") -> FormOf:
    """Dims reduced away; where the op is linear, cutting one of them gives a partial sum."""

    def form_of(call: Call) -> Form:
        rank = len(call.shapes[0])
        reduced = set(call.dims(dim_name))
        names = [f"d{i}" for i in range(rank)]
        sizes = dict(zip(names, call.shapes[0]))
        source = tuple((n,) if sizes[n] > 1 else () for n in names)
        kept = [source[i] for i in range(rank) if i not in reduced]
        same_rank = len(call.output) == rank and rank > 0
        output = [() if i in reduced else source[i] for i in range(rank)] if same_rank else kept
        stop = frozenset() if linear else frozenset(names[i] for i in reduced)
        return Form((source,), tuple(output), sizes, ADDEND if linear else NONLINEAR, stop, averaged)

    return form_of


def parts_form(call: Call, parts: Parts, roles: str) -> Form | None:
    """Pieces of one dim of a whole: the other dims pass, the dim itself is cut by whole sections."""
    base = along(lambda _: [parts.dim], roles)(call)
    return None if base is None else replace(base, parts=parts)
