"""Rules of the collectives that an earlier axis left in a local graph, one line a function.

They only move or add up tensors, so they are linear, and a later axis cuts the dims they leave alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from autoplan_passes.calls import Call
from autoplan_passes.dims import ADDEND, Dims, Form
from autoplan_passes.patterns import form_from_names, pointwise
from autoplan_passes.rows import Row

SAME_SHAPE = ("copy_to", "reduce_from", "once", "first_of", "on_first_rank")
ALONG_A_DIM = ("gather_from", "gather_reduce", "reduce_scatter", "scatter_to", "slice_of", "embed_piece")


def _along_form(call: Call) -> Form:
    """The dim that is gathered or cut is not cut again; the others pass."""
    dim = call.dim()
    names = [f"d{i}" + "!" * (i == dim) for i in range(len(call.output))]
    return form_from_names(call, [names], names, ADDEND)


def _all_to_all_form(call: Call) -> Form | None:
    """The ranks' share moves from the inside of ``to_dim`` to the outside of ``from_dim``."""
    if call.arguments.get("sections") or call.arguments.get("to_sections"):
        return None
    source, target = call.dim("from_dim"), call.dim("to_dim")
    given, made = call.shapes[0], call.output
    sizes = {f"d{i}": min(a, b) for i, (a, b) in enumerate(zip(given, made))}
    sizes["ranks"] = given[target] // made[target]

    def dims(shared: int) -> Dims:
        named: list[tuple[str, ...]] = [(f"d{i}",) if sizes[f"d{i}"] > 1 else () for i in range(len(given))]
        named[shared] = ("ranks", *named[shared])
        return tuple(named)

    return Form((dims(target),), dims(source), sizes, ADDEND, frozenset({"ranks"}))


ROWS: Mapping[str, Row] = {
    **{name: Row(pointwise(ADDEND)) for name in SAME_SHAPE},
    **{name: Row(_along_form) for name in ALONG_A_DIM},
    "all_to_all": Row(_all_to_all_form),
}
