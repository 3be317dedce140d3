"""A model and its captured graph in, the same two as ``check`` compares them out: no dropout, one precision.

Two runs can only be compared digit by digit if neither draws random numbers, and in fp64 only if no op of
the model drops back to fp32 (norms and rotary tables of many models say ``.to(torch.float32)``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autoplan.capture.program import Capture
from autoplan.capture.values import run_on_fakes
from autoplan.errors import BadInputError
from autoplan_passes.grouped import grouped_product
from autoplan_passes.stages import is_random

# Rows, weights, ends of the groups; it has no fp64.
GROUPED_MM = torch._grouped_mm  # pyright: ignore[reportPrivateUsage] - it has no other name
DROPOUT_MODULES = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
PROBABILITIES = ("p", "dropout_p", "dropout")
DROPOUTS = frozenset(
    {
        F.dropout,
        F.dropout1d,
        F.dropout2d,
        F.dropout3d,
        F.alpha_dropout,
        F.feature_alpha_dropout,
        torch.dropout,
    }
)


def without_dropout(graph: fx.GraphModule) -> fx.GraphModule:
    """Set every dropout probability of a region graph to 0; refuses other random ops."""
    for node in graph.graph.nodes:
        if node.op == "call_function" and is_random(node) and not _set_probability(node):
            raise BadInputError(
                f"`check` needs a forward without random numbers, but the model calls {node.target} here:\n"
                f"{_where(node)}\nMake them in example_inputs and pass them in."
            )
    return graph


def _set_probability(node: fx.Node) -> bool:
    """Zero the probability argument of a dropout op; False where the op has none."""
    target: Any = node.target
    names = [argument.name for argument in target._schema.arguments]
    found = next((name for name in names if name in PROBABILITIES), None)
    if found is None:
        return False
    place = names.index(found)
    if place < len(node.args):
        node.update_arg(place, 0.0)
    else:
        node.update_kwarg(found, 0.0)
    return True


def _where(node: fx.Node) -> str:
    lines = [line for line in str(node.meta.get("stack_trace") or "").splitlines() if line.strip()]
    return "\n".join(lines[-2:]) or "(no source known)"


def in_double(capture: Capture) -> Capture:
    """The capture with every fp32 value and cast lifted to fp64 (in place; node names stay)."""
    with _double_by_default():
        for node in capture.graph.nodes:
            if node.op == "placeholder":
                node.meta["val"] = _lifted(node.meta["val"])
            elif node.op == "call_function":
                args, kwargs = pytree.tree_map(_lifted, (node.args, dict(node.kwargs)))
                node.args, node.kwargs = args, kwargs
                if node.target is torch.ops.aten._grouped_mm.default:
                    node.target, node.args, node.kwargs = grouped_product, (*args, *kwargs.values()), {}
                node.meta["val"] = run_on_fakes(node)
    constants = {name: _lifted(value) for name, value in capture.constants.items()}
    return replace(capture, constants=constants)


def _lifted(value: Any) -> Any:
    if value is torch.float32:
        return torch.float64
    if isinstance(value, torch.Tensor) and value.dtype is torch.float32:
        return value.double()
    return value


@contextlib.contextmanager
def _double_by_default() -> Generator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def eager_exactly(model: nn.Module, dtype: torch.dtype) -> Generator[None]:
    """Run ``model`` without dropout and, in fp64, without falling back to fp32."""
    for module in model.modules():
        if isinstance(module, DROPOUT_MODULES):
            module.p = 0.0
        elif isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    with contextlib.ExitStack() as modes:
        modes.enter_context(_NoDropout())
        if dtype is torch.float64:
            modes.enter_context(_double_by_default())
            modes.enter_context(_Double())
        yield


class _NoDropout(TorchFunctionMode):
    """Functional dropout returns its input; attention drops nothing."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func in DROPOUTS:
            return args[0] if args else options["input"]
        if func is F.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                options["dropout_p"] = 0.0
        return func(*args, **options)


class _Double(TorchFunctionMode):
    """Whatever asks for fp32 gets fp64."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        if func is GROUPED_MM:
            return grouped_product(
                *(value for value in (*args, *(kwargs or {}).values()) if value is not None)
            )
        lifted_args, options = pytree.tree_map(_lift_dtype, (args, dict(kwargs or {})))
        return func(*lifted_args, **options)


def _lift_dtype(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
