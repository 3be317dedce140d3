"""Rules of ops that read or write by index: the dims that are not indexed may be cut.

Indices carry no gradient, so they are replicated, or cut with the positions they give.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from autoplan_passes.calls import Call, shape_of
from autoplan_passes.dims import ADDEND, NONLINEAR, Form
from autoplan_passes.patterns import along, form_from_names
from autoplan_passes.rows import Row


def _index_names(call: Call) -> tuple[list[str], list[str], list[list[str]], list[str]] | None:
    """Names of the indexed tensor's dims, of the result's, of each index's, and of the common index dims."""
    indices: list[Any] = list(call.arguments["indices"])
    tensor_rank = len(call.shapes[0])
    used = [d for d, index in enumerate(indices) if isinstance(index, fx.Node)]
    shapes = [shape_of(indices[d]) for d in used]
    if any(
        index.meta["val"].dtype.is_floating_point or str(index.meta["val"].dtype) == "torch.bool"
        for d in used
        for index in [indices[d]]
    ):
        return None
    rank = max(len(shape) for shape in shapes)
    common = [f"i{k}" for k in range(rank)]
    source = [f"d{d}" + "!" * (d in used) for d in range(tensor_rank)]
    adjacent = used == list(range(used[0], used[-1] + 1))
    at = used[0] if adjacent else 0
    rest = [name for d, name in enumerate(source) if d not in used]
    result = [*rest[:at], *common, *rest[at:]]
    return source, result, [common[rank - len(shape) :] for shape in shapes], common


def _index_form(call: Call) -> Form | None:
    """``tensor[i, j]``: rows that the indices pick; the other dims pass."""
    names = _index_names(call)
    if names is None:
        return None
    source, result, indices, _ = names
    return form_from_names(call, [source, *indices], result, ADDEND + NONLINEAR * len(indices))


def _index_put_form(call: Call) -> Form | None:
    """``tensor[i] = values``: the tensor's other dims pass; positions are not cut."""
    names = _index_names(call)
    if names is None or len(call.shapes) < 3:
        return None
    source, written, indices, common = names
    stopped = [[f"{name}!" for name in index] for index in indices]
    values = [f"{name}!" if name in common else name for name in written]
    value_rank = len(call.shapes[-1])
    roles = ADDEND + NONLINEAR * len(indices) + ADDEND
    return form_from_names(call, [source, *stopped, values[len(values) - value_rank :]], source, roles)


def _index_select_form(call: Call) -> Form:
    dim = call.dim(default=0)
    source = [f"d{i}" + "!" * (i == dim) for i in range(len(call.shapes[0]))]
    return form_from_names(
        call, [source, ["i"]], ["i" if i == dim else n for i, n in enumerate(source)], ADDEND + NONLINEAR
    )


def _one_dim(call: Call) -> list[int]:
    return [call.dim(default=0)]


ROWS: Mapping[str, Row] = {
    "aten.index": Row(_index_form),
    "aten.index_put": Row(_index_put_form),
    "aten.index_select": Row(_index_select_form),
    "aten.gather": Row(along(_one_dim, ADDEND + NONLINEAR)),
    "aten.scatter.value": Row(along(_one_dim)),
    "aten.scatter.src": Row(along(_one_dim, ADDEND + NONLINEAR + ADDEND)),
    "aten.scatter_add": Row(along(_one_dim, ADDEND + NONLINEAR + ADDEND)),
    "aten.slice_scatter": Row(along(_one_dim, ADDEND + ADDEND)),
    "aten.one_hot": Row(None, replicated=True),
}
