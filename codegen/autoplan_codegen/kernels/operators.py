"""An operator's functions in, the operator registered under ``torch.ops.autoplan`` out."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

OPERATORS: dict[str, str] = {}
"""Schema by operator name, of all that are registered here."""

SIXTEEN_BIT = (torch.bfloat16, torch.float16)
_TRITON_DTYPES = (*SIXTEEN_BIT, torch.float32)
_TRITON_DEVICES = ("cuda", "xpu")
LARGEST_ROW = 32768
"""Elements of a row that a program can hold in registers."""


def operator(
    name: str,
    schema: str,
    forward: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    save: Callable[..., Any] | None = None,
    mutates: tuple[str, ...] = (),
) -> Any:
    """Register ``autoplan::name``; ``save(ctx, inputs, output)`` keeps what ``backward`` needs."""
    OPERATORS[name] = name + schema
    if hasattr(torch.ops.autoplan, name):  # a module that is loaded again: a second one would take it away
        return getattr(torch.ops.autoplan, name)
    made = torch.library.custom_op(f"autoplan::{name}", forward, mutates_args=mutates, schema=schema)
    made.register_fake(fake)
    if backward is not None:
        made.register_autograd(backward, setup_context=save)
    return getattr(torch.ops.autoplan, name)


@cache
def has_triton() -> bool:
    """Whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def runs_triton(*tensors: Tensor | None) -> bool:
    """Whether Triton serves these tensors: its device and dtypes, something to do, and not switched off.

    ``AUTOPLAN_KERNELS=torch`` switches Triton off. On the CPU it runs in its interpreter, where
    ``TRITON_INTERPRET=1`` says so.
    """
    given = [tensor for tensor in tensors if tensor is not None]
    if os.environ.get("AUTOPLAN_KERNELS") == "torch" or not has_triton():
        return False
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    devices = ("cpu",) if interpreted else _TRITON_DEVICES
    return all(
        x.device.type in devices
        and x.numel() > 0
        and (not x.is_floating_point() or x.dtype in _TRITON_DTYPES)
        for x in given
    )


def launcher(name: str) -> ModuleType:
    """The module of Triton kernels of that name, imported when it is first used."""
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns where it is not said
    return importlib.import_module(f"autoplan_codegen.kernels.triton.{name}")


def wide(x: Tensor) -> Tensor:
    """16-bit floats as fp32, others as they are: what the operators compute in."""
    return x.float() if x.dtype in SIXTEEN_BIT else x


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in SIXTEEN_BIT else dtype


def none_if_empty(x: Tensor, wanted: bool) -> Tensor | None:
    """Operators cannot return None: an empty tensor stands for it."""
    return x if wanted else None
