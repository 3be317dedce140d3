"""Structural patterns of FX graphs: a pattern and a node come in, every way in which they fit goes out.

A pattern says what is computed, not how it was written: operands of sums and products come in any order, a
floating-point cast may stand before any operand (``x.float()``), numbers are bound by name, and ``OneOf``
lists different ways to write the same thing. No model and no module is named.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from autoplan_passes.calls import Call, first_tensor, op_name

CASTS = ("aten._to_copy", "aten.to", "aten.type_as")
# Ops that keep the rows of their input in order, where they keep the last dim.
SAME_ROWS = (
    *("aten.view", "aten._unsafe_view", "aten.reshape", "aten.flatten", "aten.contiguous", "aten.clone"),
    *("aten.alias", *CASTS),
)
COMMUTING = ("aten.add", "aten.mul", "aten.maximum", "aten.minimum")


@dataclass(frozen=True)
class Var:
    """Any tensor; the same name is the same tensor everywhere, casts aside."""

    name: str


@dataclass(frozen=True)
class Number:
    """A number: bound to ``name``, or within rounding of ``value``; ``optional``: None will do, and binds
    nothing."""

    name: str = ""
    value: float | None = None
    optional: bool = False


@dataclass(frozen=True)
class Skip:
    """An operand that ``where`` judges, or nobody."""


@dataclass(frozen=True)
class Op:
    """A call of one of ``names``, with these operands; ``where`` says what arguments must be by name.

    A list as operand stands for a list of tensors.
    """

    names: tuple[str, ...]
    operands: tuple[Any, ...]
    where: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class OneOf:
    """Different ways to write one thing; the first that fits is taken."""

    options: tuple[Any, ...]


@dataclass(frozen=True)
class Rows:
    """What the inner pattern makes, its rows merged and kept in order (``view(-1, classes)``)."""

    inner: Any


@dataclass(frozen=True)
class Out:
    """What the inner pattern makes, which others may use: the fused op gives it too, under ``name``."""

    name: str
    inner: Any


Pattern = Var | Number | Skip | Op | OneOf | Rows | Out


@dataclass(frozen=True)
class Found:
    """A fit: what every name is, and the nodes that the pattern covers (casts of what enters apart)."""

    tensors: Mapping[str, fx.Node] = field(default_factory=dict[str, fx.Node])
    numbers: Mapping[str, float] = field(default_factory=dict[str, float])
    outs: Mapping[str, fx.Node] = field(default_factory=dict[str, fx.Node])
    inside: tuple[fx.Node, ...] = ()


def op(names: str, *operands: Any, **where: Any) -> Op:
    """``op("mul", x, y)``: ATen's ``mul``, or any of several names set apart by blanks."""
    return Op(tuple(f"aten.{name}" for name in names.split()), operands, where)


def is_cast(node: object) -> bool:
    """Whether a node changes nothing but the precision of a floating-point tensor."""
    if not isinstance(node, fx.Node) or op_name(node) not in CASTS:
        return False
    source = node.all_input_nodes[0]
    return first_tensor(node).is_floating_point() and first_tensor(source).is_floating_point()


def matches(pattern: Pattern, value: Any, found: Found | None = None) -> Iterator[Found]:
    """Every way in which ``value``, an operand of a node, fits the pattern."""
    found = found or Found()
    if isinstance(pattern, OneOf):
        for option in pattern.options:
            yield from matches(option, value, found)
    elif isinstance(pattern, Number):
        yield from _number(pattern, value, found)
    elif isinstance(pattern, Skip):
        yield found
    elif not isinstance(value, fx.Node):
        return
    elif isinstance(pattern, Var):
        yield from _variable(pattern, value, found)
    elif isinstance(pattern, Rows):
        yield from _rows(pattern, value, found)
    elif isinstance(pattern, Out):
        for inner in matches(pattern.inner, value, found):
            yield replace(inner, outs={**inner.outs, pattern.name: value})
    else:
        yield from _call(pattern, value, found)
        if is_cast(value):
            yield from matches(pattern, value.all_input_nodes[0], _covering(found, value))


def _covering(found: Found, node: fx.Node) -> Found:
    return replace(found, inside=(*found.inside, node))


def _number(pattern: Number, value: Any, found: Found) -> Iterator[Found]:
    if value is None and pattern.optional:
        yield found
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return
    wanted = pattern.value if pattern.value is not None else found.numbers.get(pattern.name)
    if wanted is not None and abs(value - wanted) > 1e-6 * max(1.0, abs(wanted)):
        return
    yield replace(found, numbers={**found.numbers, pattern.name: float(value)}) if pattern.name else found


def _variable(pattern: Var, value: fx.Node, found: Found) -> Iterator[Found]:
    """The tensor before its casts, else the tensor as it is; bound before, the same again."""
    known = found.tensors.get(pattern.name)
    chain = [value]
    while is_cast(chain[-1]):
        chain.append(chain[-1].all_input_nodes[0])
    for node in reversed(chain):
        if known is None or known is node:
            yield replace(found, tensors={**found.tensors, pattern.name: node})


def _rows(pattern: Rows, value: fx.Node, found: Found) -> Iterator[Found]:
    yield from matches(pattern.inner, value, found)
    if op_name(value) in SAME_ROWS:
        source = value.all_input_nodes[0]
        if shape(source)[-1:] == shape(value)[-1:]:
            yield from matches(pattern, source, _covering(found, value))


def _call(pattern: Op, node: fx.Node, found: Found) -> Iterator[Found]:
    if op_name(node) not in pattern.names:
        return
    arguments = Call(node).arguments
    if any(not _is_given(arguments.get(name), wanted, node) for name, wanted in pattern.where.items()):
        return
    given = list(arguments.values())[: len(pattern.operands)]
    if arguments.get("alpha", 1) != 1:
        return
    orders: Iterator[Sequence[Any]] = iter([given])
    if op_name(node) in COMMUTING and len(given) == 2:
        orders = itertools.permutations(given)
    for order in orders:
        yield from _operands(pattern.operands, order, _covering(found, node))


def _operands(patterns: Sequence[Any], values: Sequence[Any], found: Found) -> Iterator[Found]:
    if not patterns:
        yield found
        return
    if len(values) < len(patterns):
        return
    first, value = patterns[0], values[0]
    if isinstance(first, (tuple, list)):
        listed: Sequence[Any] = value if isinstance(value, (tuple, list)) else ()
        options = _operands(first, listed, found) if len(first) == len(listed) else iter(())
    else:
        options = matches(first, value, found)
    for option in options:
        yield from _operands(patterns[1:], values[1:], option)


def _is_given(value: Any, wanted: Any, node: fx.Node) -> bool:
    if wanted == LAST:
        rank = first_tensor(node.all_input_nodes[0]).dim()
        dims = [value] if isinstance(value, int) else list(value or ())
        return [d % rank for d in dims] == [rank - 1]
    return bool(wanted(value, node)) if callable(wanted) else value == wanted


LAST = "the last dim"


def shape(node: fx.Node) -> torch.Size:
    return first_tensor(node).shape
