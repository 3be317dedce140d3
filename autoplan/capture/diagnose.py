"""What the exporter raised comes in; a :class:`CaptureError` that says what to type next goes out."""

from __future__ import annotations

import linecache
import re
from types import TracebackType
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autoplan.capture import advice
from autoplan.errors import CaptureError

STATIC_SIZES = (
    "work on all of it with a static size: torch.where(mask, a, b) or a product with the mask; for experts, "
    "loop over every expert (not only those hit) or use a grouped matmul"
)
# what is on the user's line -> (what it is, how to rewrite it)
REWRITES: tuple[tuple[str, str, str], ...] = (
    (
        r"\.nonzero\(|argwhere\(|\.unique|masked_select|bincount",
        "a size that depends on values",
        STATIC_SIZES,
    ),
    (
        r"torch\.where\([^,()]*\)|where\(\s*\w+(\[[^\]]*\])?\s*\)",
        "a size that depends on values",
        STATIC_SIZES,
    ),
    (
        r"\.item\(|\.tolist\(|\bint\(|\bfloat\(|\bbool\(",
        "a Python number read from a tensor",
        "keep it a tensor",
    ),
    (r"\.numpy\(|np\.", "numpy", "use the torch function of the same name"),
    (
        r"^\s*(if|elif|while|assert)\b",
        "a branch on a tensor's value",
        "compute both sides and torch.where(condition, a, b)",
    ),
    (
        r"\b(if|and|or|not)\b",
        "a branch on a tensor's value",
        "compute both sides and torch.where(condition, a, b)",
    ),
    (r"^\s*for\b|range\(", "a loop whose length depends on values", STATIC_SIZES),
    (r"\[[^\]]*[a-z_]\w*[^\]]*\]", "an index whose size depends on values", STATIC_SIZES),
)
DATA_DEPENDENT = (
    "GuardOnDataDependentSymNode",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "UserError",
)
DATA_DEPENDENT_TEXT = (
    "data-dependent",
    "only integer tensors of a single element",
    "numpy() is not supported",
    "Cannot convert symbols",
    "unbacked",
)
NO_FAKE_TEXT = (
    "no fake impl",
    "There was no fake",
    "UnsupportedOperatorException",
    "meta kernel",
    "data pointer",
)


def capture_error(error: Exception, source: str, model: nn.Module) -> CaptureError:
    """The error in the user's words: file:line, the code there, the op, the rewrite and the way round."""
    where = advice.user_frame(error, source)
    code = code_at(where)
    shown = f": `{code}`" if code else ""
    text = f"{type(error).__name__} {error}"
    way_round = _way_round(opaque_name(error, model))
    if any(t in text for t in NO_FAKE_TEXT):
        return CaptureError(
            f"{where}{shown}: the op {_op_name(error)} cannot be traced: it has no fake implementation. "
            f"Add one with @torch.library.register_fake.{way_round}"
        )
    if type(error).__name__ in DATA_DEPENDENT or any(t in text for t in DATA_DEPENDENT_TEXT):
        what, rewrite = _rewrite(code)
        op = _op_name(error)
        return CaptureError(
            f"{where}{shown}: {what}{f' ({op})' if op else ''}; the graph would change with the data. "
            f"Rewrite it: {rewrite}.{way_round}"
        )
    hint = advice.device_hint(error)
    return CaptureError(
        f"{where}{shown}: forward failed while it was traced: {advice.one_line(error)}."
        + (f" {hint}" if hint else way_round)
    )


def _way_round(name: str) -> str:
    """The hint to keep a sub-module whole; none for code of the whole model."""
    return f" Or keep the sub-module whole: --opaque '{name}'." if name else ""


def is_data_dependent(error: BaseException) -> bool:
    """Whether tracing stopped because Python code looked at a tensor's value."""
    text = f"{type(error).__name__} {error}"
    return type(error).__name__ in DATA_DEPENDENT or any(t in text for t in DATA_DEPENDENT_TEXT)


def code_at(where: str) -> str:
    file, _, line = where.rpartition(":")
    return linecache.getline(file, int(line)).strip() if line.isdigit() else ""


def _rewrite(code: str) -> tuple[str, str]:
    for pattern, what, rewrite in REWRITES:
        if re.search(pattern, code):
            return what, rewrite
    return "a choice that depends on a tensor's value", STATIC_SIZES


def _op_name(error: BaseException) -> str:
    func: Any = getattr(error, "func", None)
    if func is not None:
        return str(func)
    found = re.search(r"\b(aten|[a-z_]\w*)(::|\.)([a-z_]\w*)\b", str(error))
    return found.group(0) if found and found.group(2) == "::" else ""


def opaque_name(error: BaseException, model: nn.Module) -> str:
    """The innermost sub-module whose forward was running, numbers in its path as ``*`` where it repeats."""
    names = {id(module): name for name, module in model.named_modules()}
    innermost = ""
    current: BaseException | None = error
    while current is not None and not innermost:
        innermost = _innermost_module(current.__traceback__, names)
        current = current.__cause__ or current.__context__
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", innermost)


def _innermost_module(traceback: TracebackType | None, names: dict[int, str]) -> str:
    found = ""
    while traceback is not None:
        frame = traceback.tb_frame
        module = frame.f_locals.get("self")
        own = isinstance(module, nn.Module) and not type(module).__module__.startswith("torch.")
        if own and names.get(id(module)):
            found = names[id(module)]
        traceback = traceback.tb_next
    return found


def value_readers(graph: fx.Graph, source: str) -> CaptureError | None:
    """The error for a graph that carries sizes or numbers read from tensors, if it does."""
    for node in graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            symbolic = isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) or (
                isinstance(value, torch.Tensor) and any(isinstance(d, torch.SymInt) for d in value.shape)
            )
            if symbolic:
                return _symbolic_error(node, source)
    return None


def _symbolic_error(node: fx.Node, source: str) -> CaptureError:
    where = user_line(node, source)
    code = code_at(where)
    what, rewrite = _rewrite(code)
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    name = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", stack[-1][0]) if stack else ""
    return CaptureError(
        f"{where}{f': `{code}`' if code else ''}: {what} ({node.target}); "
        "the graph would change with the data. "
        f"Rewrite it: {rewrite}.{_way_round(name)}"
    )


def user_line(node: fx.Node, source: str) -> str:
    """``file:line`` of the user's code that made the node, from its stack trace."""
    lines = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [f"{file}:{line}" for file, line in lines if "/torch/" not in file]
    return own[-1] if own else source
