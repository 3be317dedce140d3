"""Triton's ``jit`` and ``constexpr`` in, the same with types that a checker of Python can follow out."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import triton
import triton.language as tl

if TYPE_CHECKING:
    constexpr: TypeAlias = Any
else:
    constexpr = tl.constexpr


def jit(function: Callable[..., Any]) -> Any:
    """``triton.jit``, whose launches take more than the arguments of the function (``num_warps``)."""
    return triton.jit(function)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter."""
    from triton import knobs  # not an attribute of the package in older Tritons

    return knobs.runtime.interpret
