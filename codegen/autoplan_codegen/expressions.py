"""One op of a region graph in, the Python expression a person would have written for it out.

An op that has no row in the tables below is printed as the call it is, ``aten.name.overload(...)``; the
tables only shorten what means exactly the same.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from autoplan.errors import UnsupportedOpError
from autoplan_codegen.prelude import is_prelude_function
from autoplan_passes import collectives, deferred

OPERATORS: Mapping[str, str] = {
    "aten.add.Tensor": "+",
    "aten.sub.Tensor": "-",
    "aten.mul.Tensor": "*",
    "aten.div.Tensor": "/",
    "aten.add.Scalar": "+",
    "aten.sub.Scalar": "-",
    "aten.mul.Scalar": "*",
    "aten.div.Scalar": "/",
    "aten.matmul.default": "@",
    "aten.pow.Tensor_Scalar": "**",
    "aten.bitwise_and.Tensor": "&",
    "aten.bitwise_or.Tensor": "|",
    "aten.eq.Tensor": "==",
    "aten.eq.Scalar": "==",
    "aten.ne.Tensor": "!=",
    "aten.ne.Scalar": "!=",
    "aten.lt.Tensor": "<",
    "aten.lt.Scalar": "<",
    "aten.le.Tensor": "<=",
    "aten.le.Scalar": "<=",
    "aten.gt.Tensor": ">",
    "aten.gt.Scalar": ">",
    "aten.ge.Tensor": ">=",
    "aten.ge.Scalar": ">=",
}
"""Binary ops printed with an operator (only when they have no further argument, such as ``alpha``)."""

METHODS: Mapping[str, str] = {
    "aten.view.default": "view",
    "aten.reshape.default": "reshape",
    "aten.expand.default": "expand",
    "aten.permute.default": "permute",
    "aten.transpose.int": "transpose",
    "aten.unsqueeze.default": "unsqueeze",
    "aten.squeeze.dim": "squeeze",
    "aten.flatten.using_ints": "flatten",
    "aten.t.default": "t",
}
"""Ops printed as a method of their first argument; a list of sizes is spread out."""

FUNCTIONS: Mapping[str, str] = {
    "aten.linear.default": "F.linear",
    "aten.scaled_dot_product_attention.default": "F.scaled_dot_product_attention",
    "aten.silu.default": "F.silu",
    "aten.gelu.default": "F.gelu",
    "aten.relu.default": "F.relu",
    "aten.dropout.default": "F.dropout",
    "aten.embedding.default": "torch.embedding",
    "aten.layer_norm.default": "torch.layer_norm",
    "aten.softmax.int": "torch.softmax",
    "aten.cat.default": "torch.cat",
    "aten.split.Tensor": "torch.split",
    "aten.chunk.default": "torch.chunk",
    "aten.tanh.default": "torch.tanh",
    "aten.sigmoid.default": "torch.sigmoid",
    "aten.rsqrt.default": "torch.rsqrt",
    "aten.cos.default": "torch.cos",
    "aten.sin.default": "torch.sin",
    "aten.exp.default": "torch.exp",
    "aten.neg.default": "torch.neg",
    "aten.mean.dim": "torch.mean",
    "aten.where.self": "torch.where",
}
"""Ops printed as a function of ``torch`` or ``torch.nn.functional`` with the same argument order."""

KEEPS_WHOLE = "keeps_whole"
KEEPING = (collectives.gathered_linears, deferred.gathered_linears_later)
"""Functions that are told, by an attribute of the region, whether the region is recomputed."""

DEFAULTS: Mapping[str, Any] = {
    "pin_memory": False,
    "layout": torch.strided,
    "memory_format": torch.preserve_format,
}
"""Keyword arguments left out when they have the value torch gives them anyway."""


def render_value(value: Any, names: Mapping[fx.Node, str]) -> str:
    """An argument of an op as Python text."""
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, (list, tuple)):
        items = ", ".join(render_value(item, names) for item in value)
        return f"[{items}]"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, torch.device):
        return "DEVICE"
    if isinstance(value, slice):
        return f"slice({', '.join(render_value(v, names) for v in (value.start, value.stop, value.step))})"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def render(node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    """The expression of one ``call_function`` node; raises :class:`UnsupportedOpError` for what has none."""
    target: Any = node.target
    arguments = [render_value(argument, names) for argument in node.args]
    keywords = {k: v for k, v in node.kwargs.items() if k not in DEFAULTS or v not in (None, DEFAULTS[k])}
    if target is operator.getitem:
        return f"{arguments[0]}[{arguments[1]}]"
    name = str(target) if isinstance(target, OpOverload) else ""
    if name in OPERATORS and len(arguments) == 2 and not keywords:
        return f"{arguments[0]} {OPERATORS[name]} {arguments[1]}"
    rest = [f"{key}={render_value(value, names)}" for key, value in keywords.items()]
    if name in METHODS:
        spread = [item[1:-1] if item.startswith("[") else item for item in arguments[1:]]
        return f"{arguments[0]}.{METHODS[name]}({', '.join(item for item in (*spread, *rest) if item)})"
    if name == "aten.cross_entropy_loss.default":
        return _cross_entropy(node, names)
    if name == "aten.slice.Tensor" and not keywords:
        return _slice(node, names)
    if target in KEEPING:
        rest.append(f"{KEEPS_WHOLE}=self.{KEEPS_WHOLE}")
    return f"{FUNCTIONS.get(name) or call_name(node)}({', '.join(arguments + rest)})"


def call_name(node: fx.Node) -> str:
    """How the node's function is written: ``aten.op.overload``, ``torch.ops.lib.op.overload`` or a name."""
    target: Any = node.target
    if isinstance(target, OpOverload):
        return str(target) if target.namespace == "aten" else f"torch.ops.{target}"
    if callable(target) and is_prelude_function(target):
        return str(target.__name__)
    raise UnsupportedOpError(
        f"Expected an operator of torch in the graph, found {target!r} at node {node.name}; "
        f"it comes from:\n{node.meta.get('stack_trace', '(no source known)')}\n"
        "Keep the module that calls it whole: --opaque MODULE_NAME"
    )


_REDUCTIONS = ("none", "mean", "sum")


def _cross_entropy(node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    # aten.cross_entropy_loss(self, target, weight=None, reduction=1, ignore_index=-100, label_smoothing=0)
    logits, target, weight, reduction, ignore_index, smoothing = (
        *node.args,
        *(None, 1, -100, 0.0)[len(node.args) - 2 :],
    )
    options = [
        f"weight={render_value(weight, names)}" if weight is not None else "",
        f'reduction="{_REDUCTIONS[int(str(reduction))]}"' if reduction != 1 else "",
        f"ignore_index={ignore_index}" if ignore_index != -100 else "",
        f"label_smoothing={smoothing}" if smoothing else "",
    ]
    given = [render_value(logits, names), render_value(target, names), *(o for o in options if o)]
    return f"F.cross_entropy({', '.join(given)})"


def _slice(node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    # aten.slice(self, dim=0, start=None, end=None, step=1)
    source, dim, start, end, step = (*node.args, *(0, None, None, 1)[len(node.args) - 1 :])
    if not isinstance(source, fx.Node) or not isinstance(dim, int):
        return f"{call_name(node)}({', '.join(render_value(a, names) for a in node.args)})"
    begin = "" if start in (None, 0) else render_value(start, names)
    stop = "" if end is None or (isinstance(end, int) and end >= 2**62) else render_value(end, names)
    stride = "" if step == 1 else f":{render_value(step, names)}"
    return f"{names[source]}[{':, ' * (dim % source.meta['val'].dim())}{begin}:{stop}{stride}]"
