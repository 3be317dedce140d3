"""Rules of elementwise ops, of reductions and of ops that act along one dim, one line an op.

Roles: ``f`` linear in this input alone, ``a`` linear in all ``a`` together, ``n`` not linear. Partial sums
pass through ``f`` and ``a``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autoplan_passes.calls import Call, first_tensor
from autoplan_passes.dims import ADDEND, NONLINEAR, Form
from autoplan_passes.patterns import along, form_from_names, letters, pointwise, reduction
from autoplan_passes.rows import Choice, Local, Row
from autoplan_passes.states import PARTIAL, REPLICATE, State


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ELEMENTWISE = _words("""
abs acos acosh add addcdiv addcmul asin atan atan2 bitwise_and bitwise_not bitwise_or bitwise_xor
bitwise_left_shift bitwise_right_shift ceil celu clamp clamp_max clamp_min clip cos cosh deg2rad elu eq erf
erfc erfinv exp exp2 expm1 floor floor_divide fmod frac ge gelu gt hardshrink hardsigmoid hardswish hardtanh
heaviside hypot isfinite isinf isnan le leaky_relu lerp log log10 log1p log2 log_sigmoid logaddexp logical_and
logical_not logical_or logical_xor logit lt maximum minimum mish nan_to_num ne pow reciprocal relu relu6
remainder round rsqrt rsub selu sgn sigmoid sign silu sin sinc sinh softplus softshrink sqrt square
tan tanh threshold trunc true_divide xlogy __and__ __or__ __xor__
""")
LINEAR = _words("neg clone alias detach contiguous positive lift_fresh_copy")
# Ops that read a shape and a type: zeros_like, new_zeros, and so on.
FILLS = _words("zeros ones full empty")
# Used for routing or for masks, on small tensors: every rank does all of it.
REPLICATED = _words("""
histc bincount diff unique _unique2 arange zeros ones full empty scalar_tensor linspace randperm eye rand
randn randint rand_like randn_like randint_like bernoulli multinomial nonzero searchsorted bucketize normal
exponential
""")
REDUCTIONS = _words("""
amax amin max min max.dim min.dim argmax argmin any all prod logsumexp var std var_mean norm
linalg_vector_norm
""")
ALONG_ONE_DIM = _words("""
softmax log_softmax _softmax _log_softmax cumprod logcumsumexp sort argsort topk glu cummax
""")


def _sum_roles(call: Call) -> str:
    """Adding a number to a partial sum would add it once per rank."""
    return ADDEND if len(call.shapes) == 2 else NONLINEAR


def _cast_roles(call: Call) -> str:
    """Floats stay partial sums; rounded to bf16 they are as exact as those of a product of bf16."""
    return ADDEND if first_tensor(call.node).is_floating_point() else NONLINEAR


def _zero_fill_roles(call: Call) -> str:
    return "an" if call.arguments.get("value") == 0 else NONLINEAR


def _zero_other_roles(call: Call) -> str:
    return "na" if call.arguments.get("other") == 0 else NONLINEAR


def _dropped_mask(call: Call) -> str:
    """Without a chance to drop, the op itself; else this rank's piece of one process's mask."""
    draws = call.arguments.get("train", True) and call.arguments.get("p", 0.5) > 0
    return "sliced_dropout" if draws else "local"


def _hidden_columns(_call: Call) -> str:
    """Which columns are hidden depends on the rank."""
    return "hide_classes"


def _of_partial(call: Call, _cuts: Sequence[frozenset[State]]) -> Iterable[Choice]:
    """The values do not matter, so a partial sum will do."""
    return [Choice((PARTIAL,), REPLICATE)] if len(call.tensors) == 1 else []


def _new_tensor(call: Call, cuts: Sequence[frozenset[State]]) -> Iterable[Choice]:
    """A tensor of given shape: whole or cut, whatever the state of the tensor it takes its type from."""
    sources = [REPLICATE, PARTIAL, *sorted(cuts[0])]
    return [Choice((s,), target) for s in sources for target in (REPLICATE, *sorted(cuts[1]))]


def _new_sizes(local: Local) -> dict[str, Any]:
    return {"size": list(local.output_shape)}


def _one_dim(call: Call) -> Sequence[int]:
    return [call.dim()]


def _flipped(call: Call) -> Sequence[int]:
    return call.dims("dims")


def _norm_form(call: Call) -> Form:
    """Normalised over the last dims, which are not cut; weight and bias have those dims alone."""
    rank, normalised = len(call.output), len(call.arguments["normalized_shape"])
    names = [f"d{i}" + "!" * (i >= rank - normalised) for i in range(rank)]
    inputs = [names, *([names[rank - normalised :]] * (len(call.shapes) - 1))]
    return form_from_names(call, inputs, names, NONLINEAR * len(inputs))


def _group_norm_form(call: Call) -> Form:
    """Channels are groups of channels; whole groups may be cut."""
    shape, groups = call.output, call.arguments["num_groups"]
    channels = (("groups", "inner"),)
    dims = ((("samples",),) if shape[0] > 1 else ((),)) + channels + ((),) * (len(shape) - 2)
    sizes = {"samples": shape[0], "groups": groups, "inner": shape[1] // groups}
    inputs = (dims, *([channels] * (len(call.shapes) - 1)))
    return Form(inputs, dims, sizes, NONLINEAR * len(inputs), frozenset({"inner"}))


def _local_groups(local: Local) -> dict[str, Any]:
    groups, channels = local.call.arguments["num_groups"], local.call.output[1]
    return {"num_groups": groups * local.output_shape[1] // channels}


_SUM = reduction(linear=True)
_MEAN = reduction(linear=True, averaged=True)
_REDUCE = reduction()
_ALONG = along(_one_dim)

ROWS: Mapping[str, Row] = {
    **{f"aten.{name}": Row(pointwise()) for name in ELEMENTWISE},
    "hide_classes": Row(pointwise(), cut_implementation=_hidden_columns),
    **{f"aten.{name}": Row(pointwise(ADDEND)) for name in LINEAR},
    **{f"aten.{name}_like": Row(pointwise(), factory=_of_partial) for name in FILLS},
    **{f"aten.{name}": Row(None, replicated=True) for name in REPLICATED},
    **{f"aten.new_{name}": Row(None, _new_sizes, factory=_new_tensor) for name in FILLS},
    "aten.add.Tensor": Row(pointwise(_sum_roles)),
    "aten.sub.Tensor": Row(pointwise(_sum_roles)),
    "aten.mul": Row(pointwise("f")),
    "aten.div": Row(pointwise(lambda call: "an"[: len(call.shapes)])),
    "aten.div.Tensor_mode": Row(pointwise()),
    "aten.where.self": Row(pointwise("naa")),
    "aten.where.ScalarOther": Row(pointwise(_zero_other_roles)),
    "aten.where.ScalarSelf": Row(pointwise()),
    "aten.masked_fill.Scalar": Row(pointwise(_zero_fill_roles)),
    "aten.masked_fill.Tensor": Row(pointwise()),
    "aten.broadcast_tensors": Row(pointwise(ADDEND)),
    "aten.copy": Row(pointwise("na")),
    "aten.min.other": Row(pointwise()),
    "aten.max.other": Row(pointwise()),
    "aten._to_copy": Row(pointwise(_cast_roles)),
    "aten.to": Row(pointwise(_cast_roles)),
    "aten.dropout": Row(pointwise(ADDEND), cut_implementation=_dropped_mask),
    "aten.native_dropout": Row(pointwise(ADDEND), cut_implementation=_dropped_mask),
    "aten.sum": Row(_SUM),
    "aten.mean": Row(_MEAN),
    **{f"aten.{name}": Row(_REDUCE) for name in REDUCTIONS},
    **{f"aten.{name}": Row(_ALONG) for name in ALONG_ONE_DIM},
    "aten.cumsum": Row(along(_one_dim, ADDEND)),
    "aten.flip": Row(along(_flipped, ADDEND)),
    "aten.roll": Row(along(lambda call: call.dims("dims"), ADDEND)),
    "aten.tril": Row(along(lambda _: [-2, -1], ADDEND)),
    "aten.triu": Row(along(lambda _: [-2, -1], ADDEND)),
    "aten.prelu": Row(letters("b c ..., c -> b c ...", NONLINEAR)),
    "aten.layer_norm": Row(_norm_form),
    "aten.rms_norm": Row(_norm_form),
    "aten.group_norm": Row(_group_norm_form, _local_groups),
}
