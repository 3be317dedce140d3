"""Rules of fused ops, one line an op: norms over the last dim, gated activations, rotary positions.

The fused output layer and loss are with the other contractions in ``table_contractions.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from autoplan_passes.calls import Call
from autoplan_passes.dims import NONLINEAR, Form
from autoplan_passes.patterns import form_from_names, pointwise, pointwise_form
from autoplan_passes.rows import Row


def _norm_form(rows: int) -> Callable[[Call], Form]:
    """``rows`` inputs of the output's shape, then weights of its last dim, which is not cut."""

    def form_of(call: Call) -> Form:
        names = [f"d{i}" for i in range(len(call.output) - 1)] + ["last!"]
        inputs = [names] * rows + [names[-1:]] * (len(call.shapes) - rows)
        return form_from_names(call, inputs, names, NONLINEAR * len(inputs))

    return form_of


def _rotary_form(call: Call) -> Form:
    """Linear in what is turned; its halves meet, so the last dim is not cut."""
    form = pointwise_form(call, "fnn")
    return replace(form, blocked=frozenset({f"d{len(call.output) - 1}"}))


ROWS: Mapping[str, Row] = {
    "fused_rms_norm": Row(_norm_form(1)),
    "fused_layer_norm": Row(_norm_form(1)),
    "fused_add_rms_norm": Row(_norm_form(2)),
    "fused_add_layer_norm": Row(_norm_form(2)),
    "fused_swiglu": Row(pointwise("nf")),
    "fused_geglu": Row(pointwise("nf")),
    "fused_rotary": Row(_rotary_form),
}
