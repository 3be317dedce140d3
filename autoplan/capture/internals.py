"""What capture needs of torch beyond its public names, in one place; each entry says what it is for."""

# pyright: reportPrivateUsage=false
# torch has no public name for these; a torch release that moves one breaks here and nowhere else.

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch import nn
from torch._ops import OpOverload
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental import proxy_tensor
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import _disable_current_modes

__all__ = [
    "PLAIN_APPLY",
    "PLAIN_CALL",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "constants_up_to",
    "disable_current_modes",
    "disable_torch_function",
    "factories",
    "is_composite",
    "plain_checkpoint",
    "schema_of",
    "set_grad_enabled",
    "tensor_tables",
]

# the functions that torch.device("meta") redirects: torch.empty, torch.ones, ...
factories = _device_constructors
# pops every dispatch mode (fakes, proxies) while code runs for real
disable_current_modes = _disable_current_modes
# no torch function mode sees what runs inside
disable_torch_function = torch._C.DisableTorchFunction
# what torch.no_grad and its kind call, as torch function modes see it
set_grad_enabled = torch._C._set_grad_enabled
# the generator behind checkpoint(use_reentrant=False), looked up by name at each call
plain_checkpoint = torch.utils.checkpoint._checkpoint_without_reentrant_generator
# torch.autograd.Function.apply and nn.Module.__call__ as they are when nothing is traced
PLAIN_APPLY: Any = torch.autograd.Function.__dict__["apply"]
PLAIN_CALL: Any = nn.Module._wrapped_call_impl


@contextlib.contextmanager
def constants_up_to(numel: int) -> Generator[None]:
    """Tracing follows the values of constants of up to so many elements (torch: 1)."""
    with contextlib.ExitStack() as stack:
        for module in (fake_tensor, proxy_tensor):
            stack.enter_context(mock.patch.object(module, "CONSTANT_NUMEL_LIMIT", numel))
        yield


def schema_of(op: OpOverload) -> Any:
    """The op's schema: name, arguments, returns and which of them alias."""
    return op._schema


def is_composite(op: OpOverload) -> bool:
    """Whether the op is made of other ops (``CompositeImplicitAutograd``)."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


def tensor_tables(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The module's own dicts of parameters and buffers, to be changed in place."""
    return module._parameters, module._buffers
