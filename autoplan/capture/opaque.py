"""Sub-modules to keep whole."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import nn


@contextlib.contextmanager
def kept_whole(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    yield
