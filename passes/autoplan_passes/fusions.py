"""The table of fusions: what is looked for, the op that replaces it, and the conditions; data alone.

Comes in: nothing. Goes out: ``TABLE``, read by :mod:`autoplan_passes.fuse` from top to bottom. Later rows may
look for what earlier ones made (a norm, then the residual added before it).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from autoplan_passes import fused_loss, fused_ops, grouped
from autoplan_passes.calls import Call, first_tensor
from autoplan_passes.match import LAST, Found, Number, OneOf, Op, Out, Pattern, Rows, Skip, Var, op, shape

# Logits that are made at a time: enough for products at full rate, and 256 MiB in single precision.
LOGITS_AT_A_TIME = 2**26
Condition = Callable[[Found, torch.fx.Node], str]


@dataclass(frozen=True)
class Fusion:
    """``kernel`` replaces what fits ``pattern`` by ``function(*arguments)``, where no condition objects.

    ``arguments`` gives operands from a fit and the node that it ends in; a condition gives the reason
    against, or nothing. A result of several tensors is the root first, then ``outs`` in their order.
    ``as_rows`` are tensors given as a matrix.
    """

    kernel: str
    pattern: Pattern
    function: Callable[..., Any]
    arguments: Callable[[Found, torch.fx.Node], tuple[Any, ...]]
    conditions: tuple[Condition, ...] = ()
    outs: tuple[str, ...] = ()
    as_rows: tuple[str, ...] = ()


# --- conditions ------------------------------------------------------------------------------------


def alike(*names: str) -> Condition:
    """The tensors have the shape and the precision of the result."""

    def reason(found: Found, root: torch.fx.Node) -> str:
        for name in names:
            tensor, result = first_tensor(found.tensors[name]), first_tensor(root)
            if tensor.dtype != result.dtype:
                return f"{tensor.dtype} goes in and {result.dtype} comes out"
            if tensor.shape != result.shape:
                return f"{name} is broadcast"
        return ""

    return reason


def one_row(*names: str) -> Condition:
    """Weights have the last dim of the result alone."""

    def reason(found: Found, root: torch.fx.Node) -> str:
        wrong = [name for name in names if shape(found.tensors[name]) != shape(root)[-1:]]
        return f"the {wrong[0]} has several dims" if wrong else ""

    return reason


def no_gradient(*names: str) -> Condition:
    """The kernel gives these tensors no gradient."""

    def reason(found: Found, _root: torch.fx.Node) -> str:
        trained = [name for name in names if found.tensors[name].meta.get("requires_grad", True)]
        return f"{trained[0]} needs a gradient" if trained else ""

    return reason


def _plain_loss(found: Found, root: torch.fx.Node) -> str:
    rows, target = found.tensors["x"], first_tensor(found.tensors["target"])
    if target.is_floating_point() or target.dim() != 1 or len(Call(root).shapes[0]) != 2:
        return "the targets are no class indices, one a row"
    return (
        "" if shape(rows)[-1:] == shape(found.tensors["weight"])[-1:] else "the weight is not the layer's own"
    )


# --- norms -----------------------------------------------------------------------------------------

X, WEIGHT, BIAS, EPS = Var("x"), Var("weight"), Var("bias"), Number("eps")
OPTIONAL_EPS = Number("eps", optional=True)


def _one_dim(value: Any, _node: torch.fx.Node) -> bool:
    return len(value) == 1


def _squares(x: Pattern) -> Pattern:
    return OneOf((op("pow", x, Number(value=2)), op("mul", x, x), op("square", x)))


def _over_root(x: Pattern, mean_square: Pattern) -> Pattern:
    """``x / sqrt(mean_square + eps)``, however it is written."""
    total = op("add", mean_square, EPS)
    inverse = OneOf(
        (
            op("rsqrt", total),
            op("pow", total, Number(value=-0.5)),
            op("reciprocal", op("sqrt", total)),
            op("div", Number(value=1), op("sqrt", total)),
        )
    )
    return OneOf((op("mul", x, inverse), op("div", x, op("sqrt", total))))


RMS_NORM = OneOf(
    (
        op("mul", WEIGHT, _over_root(X, op("mean", _squares(X), dim=LAST, keepdim=True))),
        op("rms_norm", X, Skip(), WEIGHT, OPTIONAL_EPS, normalized_shape=_one_dim),
    )
)
MEAN = op("mean", X, dim=LAST, keepdim=True)
CENTRED = op("sub", X, MEAN)
VARIANCE = OneOf(
    (
        op("mean", _squares(CENTRED), dim=LAST, keepdim=True),
        op("var", X, dim=LAST, keepdim=True, correction=0),
        op("var", X, dim=LAST, keepdim=True, unbiased=False),
    )
)
LAYER_NORM = OneOf(
    (
        op("layer_norm", X, Skip(), WEIGHT, BIAS, OPTIONAL_EPS, normalized_shape=_one_dim),
        op("add", op("mul", WEIGHT, _over_root(CENTRED, VARIANCE)), BIAS),
    )
)


def _eps(found: Found) -> float:
    """As torch takes it where none is given."""
    given = found.numbers.get("eps")
    return torch.finfo(first_tensor(found.tensors["x"]).dtype).eps if given is None else given


def _tensors(*names: str) -> Callable[[Found, torch.fx.Node], tuple[Any, ...]]:
    return lambda found, _root: tuple(found.tensors[name] for name in names)


def _normed(*names: str) -> Callable[[Found, torch.fx.Node], tuple[Any, ...]]:
    return lambda found, _root: (*(found.tensors[name] for name in names), _eps(found))


def _after_sum(norm: str, *weights: Pattern) -> Pattern:
    return Op((norm,), (Out("sum", op("add", X, Var("residual"))), *weights, EPS))


# --- gated activations and rotary positions --------------------------------------------------------

GATE, UP = Var("gate"), Var("up")
SILU = OneOf((op("silu", GATE), op("mul", GATE, op("sigmoid", GATE))))
CUBED = OneOf((op("pow", GATE, Number(value=3)), op("mul", GATE, op("mul", GATE, GATE))))
BENT = op(
    "tanh",
    op("mul", op("add", GATE, op("mul", CUBED, Number(value=0.044715))), Number(value=(2 / torch.pi) ** 0.5)),
)
GELU_TANH = OneOf(
    (
        op("gelu", GATE, approximate="tanh"),
        op("mul", op("mul", GATE, Number(value=0.5)), op("add", BENT, Number(value=1))),
    )
)


def _half_of(value: Any, node: torch.fx.Node) -> bool:
    half = shape(node.all_input_nodes[0])[-1] / 2
    return value == half or value == [half, half]


def _half(index: int) -> Pattern:
    """The first or second half of x along the last dim."""
    pieces = OneOf(
        (
            op("chunk", X, chunks=2, dim=LAST),
            op("split", X, split_size=_half_of, dim=LAST),
            op("split_with_sizes", X, split_sizes=_half_of, dim=LAST),
        )
    )

    def starts(value: Any, node: torch.fx.Node) -> bool:
        return (value or 0) == index * shape(node.all_input_nodes[0])[-1] // 2

    def ends(value: Any, node: torch.fx.Node) -> bool:
        length = shape(node.all_input_nodes[0])[-1]
        return min(length if value is None else value, length) == (index + 1) * length // 2

    cut = op("slice", X, dim=LAST, start=starts, end=ends, step=1)
    return OneOf((cut, Op(("getitem",), (pieces, Number(value=index)))))


SECOND_NEGATED = OneOf((op("neg", _half(1)), op("mul", _half(1), Number(value=-1))))
ROTARY = op(
    "add",
    op("mul", X, Var("cos")),
    op("mul", op("cat", (SECOND_NEGATED, _half(0)), dim=LAST), Var("sin")),
)

# --- the output layer and its loss -----------------------------------------------------------------

LINEAR_LOSS = op("cross_entropy_loss", Rows(op("linear", X, WEIGHT, bias=None)), Var("target"), weight=None)


def _loss_arguments(found: Found, root: torch.fx.Node) -> tuple[Any, ...]:
    """As many rows at a time as their logits allow, a multiple of 128."""
    given = Call(root).arguments
    chunk = max(128, LOGITS_AT_A_TIME // shape(found.tensors["weight"])[0] // 128 * 128)
    told = (given["ignore_index"], given["label_smoothing"], given["reduction"])
    return (*_tensors("x", "weight", "target")(found, root), *told, chunk)


# No kernel, but a product that every release of torch has (``torch._grouped_mm`` came with 2.8).
GROUPED_PRODUCT = "grouped_product"

TABLE: tuple[Fusion, ...] = (
    Fusion(
        GROUPED_PRODUCT,
        op("_grouped_mm", X, WEIGHT, Var("ends")),
        grouped.grouped_product,
        lambda found, _root: (found.tensors["x"], found.tensors["weight"], found.tensors["ends"]),
    ),
    Fusion(
        "linear_cross_entropy",
        LINEAR_LOSS,
        fused_loss.linear_cross_entropy,
        _loss_arguments,
        (_plain_loss,),
        as_rows=("x",),
    ),
    Fusion(
        "layer_norm",
        LAYER_NORM,
        fused_ops.fused_layer_norm,
        _normed("x", "weight", "bias"),
        (alike("x"), one_row("weight", "bias")),
    ),
    Fusion(
        "rms_norm",
        RMS_NORM,
        fused_ops.fused_rms_norm,
        _normed("x", "weight"),
        (alike("x"), one_row("weight")),
    ),
    Fusion(
        "add_rms_norm",
        _after_sum("fused_rms_norm", WEIGHT),
        fused_ops.fused_add_rms_norm,
        _normed("x", "residual", "weight"),
        (alike("x", "residual"),),
        ("sum",),
    ),
    Fusion(
        "add_layer_norm",
        _after_sum("fused_layer_norm", WEIGHT, BIAS),
        fused_ops.fused_add_layer_norm,
        _normed("x", "residual", "weight", "bias"),
        (alike("x", "residual"),),
        ("sum",),
    ),
    Fusion(
        "swiglu",
        op("mul", SILU, UP),
        fused_ops.fused_swiglu,
        _tensors("gate", "up"),
        (alike("gate", "up"),),
    ),
    Fusion(
        "geglu",
        op("mul", op("gelu", GATE, approximate="none"), UP),
        fused_ops.fused_geglu,
        lambda found, root: (*_tensors("gate", "up")(found, root), "none"),
        (alike("gate", "up"),),
    ),
    Fusion(
        "geglu",
        op("mul", GELU_TANH, UP),
        fused_ops.fused_geglu,
        lambda found, root: (*_tensors("gate", "up")(found, root), "tanh"),
        (alike("gate", "up"),),
    ),
    Fusion(
        "rotary",
        ROTARY,
        fused_ops.fused_rotary,
        _tensors("x", "cos", "sin"),
        (alike("x"), no_gradient("cos", "sin")),
    ),
)
KERNELS: tuple[str, ...] = tuple(dict.fromkeys(row.kernel for row in TABLE))
