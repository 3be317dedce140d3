"""What each dim of each tensor counts: a region graph comes in, the kinds of all dims of its tensors go out.

A dim counts samples (``batch``), the tokens of a sample (``token``: positions, patches, pixels), both merged
into one (``tokens``, samples outermost), or anything else (``feature``). Kinds start at the region's inputs
(``meta["dims"]`` and ``meta["batch"]``, or a guess from their shapes) and are carried through the ops by the
atoms of their Forms, so no position of any dim is assumed inside a region.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import fx

from autoplan_passes.calls import Call, first_tensor, is_tensor, shape_of
from autoplan_passes.dims import Form
from autoplan_passes.rules import form_of
from autoplan_passes.states import State, divides

BATCH, TOKEN, TOKENS, FEATURE, MIXED = "batch", "token", "tokens", "feature", "mixed"
Kinds = tuple[str, ...]
# Where inputs disagree about an atom (a position table added to tokens), the first of these holds.
STRENGTH = (BATCH, TOKENS, TOKEN, FEATURE)


def find_dim_kinds(graph: fx.Graph) -> dict[fx.Node, Kinds]:
    """The kind of every dim of every tensor; parameters, buffers and constants count features."""
    found: dict[fx.Node, Kinds] = {}
    batch = batch_size(graph)
    for node in graph.nodes:
        if not is_tensor(node):
            continue
        if node.meta.get("kind") == "input":
            found[node] = input_kinds(node, batch)
        elif node.op == "call_function":
            found[node] = _result_kinds(node, found, batch)
        else:
            found[node] = (FEATURE,) * len(shape_of(node))
    return found


def batch_size(graph: fx.Graph) -> int:
    """Samples in the graph: as an input's ``meta["batch"]`` says, or dim 0 of the first."""
    inputs = [n for n in graph.nodes if n.meta.get("kind") == "input" and is_tensor(n) and shape_of(n)]
    known = [n.meta["batch"] for n in inputs if "batch" in n.meta]
    return known[0] if known else shape_of(inputs[0])[0] if inputs else 1


def input_kinds(node: fx.Node, batch: int) -> Kinds:
    """As ``meta["dims"]`` says; else samples first, features last (in a floating tensor), tokens between."""
    if "dims" in node.meta:
        return node.meta["dims"]
    shape = shape_of(node)
    features = 1 if len(shape) > 1 and first_tensor(node).is_floating_point() else 0
    kinds = [TOKEN] * (len(shape) - features) + [FEATURE] * features
    if shape and shape[0] == batch:
        kinds[0] = BATCH
    return tuple(kinds)


def token_state(
    kinds: Kinds, shape: Sequence[int], batch: int, ways: int, zigzag: bool = False
) -> State | None:
    """The one cut of a tensor along its tokens, inside each of ``batch`` samples; None where there is none.

    A tensor with two dims of tokens (scores, images) is not cut.
    """
    dims = [d for d, kind in enumerate(kinds) if kind in (TOKEN, TOKENS) and shape[d] > 1]
    if len(dims) != 1:
        return None
    (dim,) = dims
    inside = (shape[dim] // batch,) if kinds[dim] == TOKENS else ()
    state = State("S", dim, inside, zigzag).fitted(shape)
    return state if divides(shape, state, ways) else None


def atom_kinds(form: Form, call: Call, found: Mapping[fx.Node, Kinds], batch: int) -> dict[str, str]:
    """The kind of each atom that some input knows; a dim of mixed kind says nothing of its atoms."""
    known: dict[str, str] = {}
    for dims, node in zip(form.inputs, call.tensors):
        for dim, kind in zip(dims, found.get(node, ())):
            if kind == MIXED:
                continue
            for atom, own in zip(dim, _split(kind, [form.sizes[atom] for atom in dim], batch)):
                known[atom] = min(own, known.get(atom, own), key=STRENGTH.index)
    return known


def _split(kind: str, sizes: Sequence[int], batch: int) -> list[str]:
    """Kinds of the atoms of one dim: merged tokens are samples outermost, where the sizes show it."""
    if kind != TOKENS:
        return [kind] * len(sizes)
    at = next((i for i in range(len(sizes) + 1) if math.prod(sizes[:i]) == batch), None)
    return [TOKENS] * len(sizes) if not at or at == len(sizes) else [BATCH] * at + [TOKEN] * (len(sizes) - at)


def _result_kinds(node: fx.Node, found: Mapping[fx.Node, Kinds], batch: int) -> Kinds:
    call, shape = Call(node), shape_of(node)
    form = form_of(node)
    if form is None:
        return tuple(_in_place(call, None, d, found) for d in range(len(shape)))
    atoms = atom_kinds(form, call, found, batch)
    kinds: list[str] = []
    for d, dim in enumerate(form.output):
        known = {atoms[atom] for atom in dim if atom in atoms}
        kinds.append(_merged(known) if known else _in_place(call, form, d, found))
    return tuple(kinds)


def _merged(kinds: set[str]) -> str:
    if len(kinds) == 1:
        return next(iter(kinds))
    return TOKENS if kinds <= {BATCH, TOKEN, TOKENS} else MIXED


def _in_place(call: Call, form: Form | None, dim: int, found: Mapping[fx.Node, Kinds]) -> str:
    """Of a dim that is made, not carried (a convolution's, a concatenation's): what it counts in the inputs.

    Such ops leave their dims where they are.
    """
    if call.output[dim] == 1:
        return FEATURE
    for i, node in enumerate(call.tensors):
        shape = call.shapes[i]
        moved = form is not None and any(form.inputs[i][dim : dim + 1]) and call.output[dim] == shape[dim]
        same_place = len(shape) == len(call.output) and shape[dim] > 1 and not moved
        if same_place and found.get(node, (FEATURE,) * len(shape))[dim] != FEATURE:
            return found[node][dim]
    return FEATURE
