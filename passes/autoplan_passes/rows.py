"""One row of a rule table: how an op's dims correspond, and how its sizes change on local tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from autoplan_passes.calls import Call
from autoplan_passes.dims import Form, Shape
from autoplan_passes.states import State


@dataclass(frozen=True)
class Choice:
    """States of every tensor occurrence of a call and of its output."""

    inputs: tuple[State, ...]
    output: State
    implementation: str = "local"


@dataclass(frozen=True)
class Local:
    """What is known when an op is rewritten for one rank: local shapes, states and the axis size."""

    call: Call
    inputs: tuple[State, ...]
    output: State
    shapes: tuple[Shape, ...]
    output_shape: Shape
    ways: int


def _local(_call: Call) -> str:
    return "local"


def _nothing(*_: Any) -> Iterable[Choice]:
    return ()


@dataclass(frozen=True)
class Row:
    """``form``: the dims. ``sizes``: new values of named arguments, from local shapes.

    ``special``: choices beyond the Form, by a sharded implementation. ``factory``: choices of ops whose
    output's shape alone depends on the input. ``cut_implementation``: what runs when cut by the Form.
    """

    form: Callable[[Call], Form | None] | None
    sizes: Callable[[Local], dict[str, Any]] | None = None
    special: Callable[[Call, int], Iterable[Choice]] = _nothing
    factory: Callable[[Call, Sequence[frozenset[State]]], Iterable[Choice]] = _nothing
    cut_implementation: Callable[[Call], str] = _local
    replicated: bool = False
