"""A model's forward runs under this mode while it is traced; what tracing would lose silently is kept.

``no_grad`` becomes explicit ``detach`` nodes, ``autocast`` becomes explicit casts, a custom
``autograd.Function`` is refused by name, and the user's own ``checkpoint`` calls are noted.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Generator
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autoplan.capture import advice
from autoplan.capture.internals import PLAIN_APPLY, disable_torch_function, plain_checkpoint, set_grad_enabled
from autoplan.capture.lowering import row_major
from autoplan.errors import CaptureError

# Which functions autocast runs in low precision and which in fp32:
# https://docs.pytorch.org/docs/stable/amp.html, "CUDA Ops that can autocast to ..." (2.13)
LOW_PRECISION = frozenset(
    [
        "__matmul__",
        "__rmatmul__",
        "addbmm",
        "addmm",
        "addmv",
        "addr",
        "baddbmm",
        "bmm",
        "chain_matmul",
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
        "einsum",
        "linear",
        "matmul",
        "mm",
        "multi_dot",
        "mv",
        "prelu",
        "scaled_dot_product_attention",
    ]
)
FULL_PRECISION = frozenset(
    [
        "__pow__",
        "__rpow__",
        "acos",
        "asin",
        "binary_cross_entropy_with_logits",
        "cosh",
        "cosine_embedding_loss",
        "cdist",
        "cosine_similarity",
        "cross_entropy",
        "cumprod",
        "cumsum",
        "dist",
        "erfinv",
        "exp",
        "expm1",
        "group_norm",
        "hinge_embedding_loss",
        "kl_div",
        "l1_loss",
        "layer_norm",
        "log",
        "log10",
        "log_softmax",
        "log1p",
        "log2",
        "margin_ranking_loss",
        "mse_loss",
        "multilabel_margin_loss",
        "multi_margin_loss",
        "nll_loss",
        "norm",
        "normalize",
        "pdist",
        "poisson_nll_loss",
        "pow",
        "prod",
        "reciprocal",
        "rsqrt",
        "sinh",
        "smooth_l1_loss",
        "soft_margin_loss",
        "softmax",
        "softmin",
        "softplus",
        "sum",
        "renorm",
        "tan",
        "triplet_margin_loss",
    ]
)


class TracingMode(TorchFunctionMode):
    """Sees every torch call of the user's forward, before the tracer does."""

    def __init__(self) -> None:
        super().__init__()
        self.without_grad = False
        self.autocast: list[torch.dtype | None] = []
        self.checkpoints: set[str] = set()

    def state(self) -> tuple[object, ...]:
        """What the graph of a module depends on besides its arguments."""
        return self.without_grad, tuple(self.autocast)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is set_grad_enabled:
            self.without_grad = not args[0]
            with disable_torch_function():
                return set_grad_enabled(args[0])
        if func is torch.Tensor.contiguous and len(args) == 1 and not kwargs and not row_major(args[0]):
            # contiguous() itself leaves no trace where a batch of one makes the strides contiguous
            func, kwargs = torch.Tensor.clone, {"memory_format": torch.contiguous_format}
        if self.autocast and self.autocast[-1] is not None:
            args, kwargs = self._cast(func.__name__, args, kwargs, self.autocast[-1])
        result = func(*args, **kwargs)
        return _detached(result) if self.without_grad else result

    def _cast(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], low: torch.dtype
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if name not in LOW_PRECISION and name not in FULL_PRECISION:
            return args, kwargs
        dtype = low if name in LOW_PRECISION else torch.float32

        def cast(value: Any) -> Any:
            eligible = isinstance(value, torch.Tensor) and value.is_floating_point()
            return value.to(dtype) if eligible and value.dtype not in (dtype, torch.float64) else value

        return pytree.tree_map(cast, args), pytree.tree_map(cast, kwargs)


def _detached(result: Any) -> Any:
    """``result`` cut off from autograd, for what a ``no_grad`` block computes."""
    if isinstance(result, torch.Tensor):
        return result.detach() if result.is_floating_point() else result
    if isinstance(result, tuple | list) and result and all(isinstance(r, torch.Tensor) for r in result):
        return type(result)(map(_detached, result)) if type(result) in (tuple, list) else result
    return result


@contextlib.contextmanager
def watched() -> Generator[TracingMode]:
    """The mode together with the patches that route autocast, checkpoint and custom functions to it."""
    mode = TracingMode()
    with contextlib.ExitStack() as stack:
        for target, name, value in _patches(mode):
            stack.enter_context(mock.patch.object(target, name, value))
        yield mode


def _patches(mode: TracingMode) -> tuple[tuple[Any, str, Any], ...]:
    autocast, inference = torch.amp.autocast_mode.autocast, torch.autograd.grad_mode.inference_mode
    plain_init = autocast.__init__

    def make_autocast(
        self: Any, device_type: str, dtype: Any = None, enabled: bool = True, **kwargs: Any
    ) -> None:
        plain_init(self, device_type, dtype, enabled, **kwargs)
        # torch itself switches cuda autocast off on a machine without cuda
        self.fast_dtype = dtype or self.fast_dtype
        self._enabled = enabled

    def enter_autocast(self: Any) -> Any:
        mode.autocast.append(self.fast_dtype if self._enabled else None)
        return self

    def exit_autocast(self: Any, *_: object) -> None:
        mode.autocast.pop()

    def note_checkpoint() -> None:
        mode.checkpoints.add(advice.caller_of(inspect.currentframe()))

    def checkpoint_generator(*args: Any, **kwargs: Any) -> Any:
        note_checkpoint()
        return plain_checkpoint(*args, **kwargs)

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.startswith("torch.utils.checkpoint"):
            note_checkpoint()
            return args[0](*args[2:])
        if cls.__module__.startswith("torch."):
            return PLAIN_APPLY.__func__(cls, *args, **kwargs)
        where = advice.caller_of(inspect.currentframe())
        raise CaptureError(
            f"{where}: {cls.__name__} is a custom autograd.Function, whose backward a traced graph cannot "
            "keep. Use the torch ops it stands for, or register it with torch.library.custom_op and "
            "register_autograd, or keep the sub-module that calls it whole: --opaque NAME."
        )

    outer: list[bool] = []

    def enter_inference(self: Any) -> None:
        outer.append(mode.without_grad)
        mode.without_grad = mode.without_grad or bool(self.mode)

    def exit_inference(self: Any, *_: object) -> None:
        mode.without_grad = outer.pop()

    return (
        (autocast, "__init__", make_autocast),
        (autocast, "__enter__", enter_autocast),
        (autocast, "__exit__", exit_autocast),
        (inference, "__enter__", enter_inference),
        (inference, "__exit__", exit_inference),
        (torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", checkpoint_generator),
        (torch.autograd.Function, "apply", classmethod(apply)),
    )
