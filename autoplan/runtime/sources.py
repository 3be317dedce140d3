"""Tensors that lie in files or on ranks in, any box of what is made from them out, reading that box alone.

A :class:`Source` stands for a tensor in ``torch.cat``, ``stack``, ``chunk``, ``split``, ``transpose`` and in
``squeeze``: code that converts weights runs on sources as it is. Any other operation reads its inputs whole.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Box = tuple[slice, ...]


class Source(ABC):
    """A tensor of a known shape whose boxes can be read."""

    shape: torch.Size

    @abstractmethod
    def read(self, box: Box) -> torch.Tensor:
        """The values inside the box: a slice with start and stop for every dim."""

    def whole(self) -> torch.Tensor:
        """All values."""
        return self.read(tuple(slice(0, size) for size in self.shape))

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return len(self.shape)

    def contiguous(self) -> Source:
        return self

    def squeeze(self, dim: int) -> Source:
        assert self.shape[dim] == 1, "others are not asked for"
        return Squeezed(self, dim)

    def __getattr__(self, name: str) -> Callable[..., Source]:
        """Any other method of tensors: on the whole tensor."""
        if name.startswith("__") or not hasattr(torch.Tensor, name):
            raise AttributeError(name)
        return lambda *args, **kwargs: _computed(getattr(torch.Tensor, name), (self, *args), kwargs)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        return _FUNCTIONS.get(func, lambda *a, **k: _computed(func, a, k))(*args, **(kwargs or {}))


@dataclass
class Held(Source):
    """A tensor that is there."""

    tensor: torch.Tensor

    def __post_init__(self) -> None:
        self.shape = self.tensor.shape

    def read(self, box: Box) -> torch.Tensor:
        return self.tensor[box]


@dataclass
class Joined(Source):
    """Parts one after the other along ``axis``."""

    parts: Sequence[Source]
    axis: int

    def __post_init__(self) -> None:
        shape = list(self.parts[0].shape)
        shape[self.axis] = sum(part.shape[self.axis] for part in self.parts)
        self.shape = torch.Size(shape)

    def read(self, box: Box) -> torch.Tensor:
        wanted, at = box[self.axis], 0
        found: list[torch.Tensor] = []
        for part in self.parts:
            size = part.shape[self.axis]
            start, stop = max(wanted.start - at, 0), min(wanted.stop - at, size)
            if start < stop:
                found.append(part.read((*box[: self.axis], slice(start, stop), *box[self.axis + 1 :])))
            at += size
        return torch.cat(found, self.axis) if len(found) != 1 else found[0]


@dataclass
class Stacked(Source):
    """Parts of one shape, one for every index of a new dim ``axis``."""

    parts: Sequence[Source]
    axis: int

    def __post_init__(self) -> None:
        shape = list(self.parts[0].shape)
        self.shape = torch.Size([*shape[: self.axis], len(self.parts), *shape[self.axis :]])

    def read(self, box: Box) -> torch.Tensor:
        inside = (*box[: self.axis], *box[self.axis + 1 :])
        return torch.stack([part.read(inside) for part in self.parts[box[self.axis]]], self.axis)


@dataclass
class Part(Source):
    """``length`` indices of the dim ``axis``, from ``start``."""

    of: Source
    axis: int
    start: int
    length: int

    def __post_init__(self) -> None:
        shape = list(self.of.shape)
        shape[self.axis] = self.length
        self.shape = torch.Size(shape)

    def read(self, box: Box) -> torch.Tensor:
        held = box[self.axis]
        moved = slice(held.start + self.start, held.stop + self.start)
        return self.of.read((*box[: self.axis], moved, *box[self.axis + 1 :]))


@dataclass
class Squeezed(Source):
    """Without the dim ``axis``, whose size is 1."""

    of: Source
    axis: int

    def __post_init__(self) -> None:
        self.axis %= len(self.of.shape)
        self.shape = torch.Size([*self.of.shape[: self.axis], *self.of.shape[self.axis + 1 :]])

    def read(self, box: Box) -> torch.Tensor:
        return self.of.read((*box[: self.axis], slice(0, 1), *box[self.axis :])).squeeze(self.axis)


@dataclass
class Transposed(Source):
    """Two dims changed places."""

    of: Source
    one: int
    other: int

    def __post_init__(self) -> None:
        self.shape = torch.Size(self._swapped(self.of.shape))

    def read(self, box: Box) -> torch.Tensor:
        return self.of.read(tuple(self._swapped(box))).transpose(self.one, self.other)

    def _swapped(self, values: Sequence[Any]) -> list[Any]:
        swapped = list(values)
        swapped[self.one], swapped[self.other] = values[self.other], values[self.one]
        return swapped


def _chunk(source: Source, chunks: int, dim: int = 0) -> list[Source]:
    return _split(source, -(-source.shape[dim] // chunks), dim)


def _split(source: Source, size: int | Sequence[int], dim: int = 0) -> list[Source]:
    total = source.shape[dim]
    lengths = [min(size, total - at) for at in range(0, total, size)] if isinstance(size, int) else size
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return [Part(source, dim % len(source.shape), at, length) for at, length in zip(starts, lengths)]


def _transpose(source: Source, dim0: int, dim1: int) -> Source:
    return Transposed(source, dim0, dim1)


def _cat(tensors: Sequence[Source], dim: int = 0) -> Source:
    parts = [_source(part) for part in tensors]
    return Joined(parts, dim % len(parts[0].shape))


def _stack(tensors: Sequence[Source], dim: int = 0) -> Source:
    parts = [_source(part) for part in tensors]
    return Stacked(parts, dim % (len(parts[0].shape) + 1))


def _source(value: Any) -> Source:
    return Held(value) if isinstance(value, torch.Tensor) else value


def _computed(function: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """What an operation on whole tensors gives, as sources."""

    def read(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(read(one) for one in value)
        return value.whole() if isinstance(value, Source) else value

    def hold(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [hold(one) for one in value]
        return _source(value)

    return hold(function(*read(tuple(args)), **{name: read(one) for name, one in kwargs.items()}))


_FUNCTIONS: Mapping[Any, Callable[..., Any]] = {
    torch.cat: _cat,
    torch.stack: _stack,
    torch.chunk: _chunk,
    torch.split: _split,
    torch.transpose: _transpose,
}
