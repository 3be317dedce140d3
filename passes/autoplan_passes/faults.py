"""What a type check finds wrong: a node and what was expected in, a :class:`TypeFault` with its line out."""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch._subclasses import fake_tensor

from autoplan.errors import AutoplanError, BadPlanError


@dataclass(frozen=True)
class Fault:
    """The first op that does not type-check.

    ``path`` are the ops that a partial sum came by, from where it arose; ``where`` is the user's line.
    """

    op: str
    expected: str
    found: str
    path: tuple[str, ...] = ()
    where: str = ""

    def __str__(self) -> str:
        came = f", by way of {', '.join(self.path)}" if self.path and self.path != (self.op,) else ""
        line = f" {self.where}" if self.where else ""
        return f"{self.op}: expected {self.expected}; found {self.found}{came}.{line}"


class TypeFault(AutoplanError):
    """Carries a :class:`Fault` out of the walk."""

    exit_code = 1

    def __init__(self, fault: Fault) -> None:
        super().__init__(str(fault))
        self.fault = fault


def fault_at(node: fx.Node, expected: str, found: str, path: Sequence[str] = ()) -> TypeFault:
    """A fault at a node of the rank's graph, with the line of the user's model that it stems from."""
    return TypeFault(Fault(node.name, expected, found, tuple(dict.fromkeys(path)), _where(node)))


def _where(node: fx.Node) -> str:
    lines = [line.strip() for line in str(node.meta.get("stack_trace") or "").splitlines()]
    files = [line for line in lines if line.startswith("File ")]
    return files[-1] if files else ""


@contextmanager
def located(node: fx.Node) -> Generator[None]:
    """What an op refuses becomes a fault at its node."""
    try:
        yield
    except BadPlanError as error:
        found = str(error).partition(" The layout is")[0]
        raise fault_at(node, "local tensors that fit the op", found) from error


@contextmanager
def quiet() -> Generator[None]:
    """Ops that do not fit are faults, told once: torch would log each with its own traceback."""
    logger = logging.getLogger(fake_tensor.__name__)
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def call_text(
    node: fx.Node, args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
) -> str:
    """``linear.default(x_0, p_weight)``, with other arguments where they are given."""
    name = getattr(node.target, "__name__", str(node.target))
    named = (node.kwargs if kwargs is None else kwargs).items()
    given = [*(node.args if args is None else args), *(f"{key}={value}" for key, value in named)]
    return f"{name}({', '.join(map(str, given))})"
