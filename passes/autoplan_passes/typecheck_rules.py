"""The rules of one op among given states: a node and how its inputs lie in, every rule that may hold out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import fx

from autoplan_passes.calls import Call, is_tensor, shape_of, tensor_inputs
from autoplan_passes.dims import OUTPUT, Form, carry, narrow, place
from autoplan_passes.rules import Facts, Rule, form_of, rules_for
from autoplan_passes.states import REPLICATE, State, divides, shard

MOST_RULES_SHOWN = 4


def possible_rules(
    node: fx.Node, inputs: Sequence[State], size: int, differentiable: frozenset[fx.Node]
) -> tuple[Rule, ...]:
    """The rules of a node on ``size`` ranks among the cuts of ``inputs`` and what can follow from them."""
    if not is_tensor(node):
        return (Rule((REPLICATE,) * len(inputs), REPLICATE),)
    cuts = {n: frozenset([s]) for n, s in zip(tensor_inputs(node), inputs) if s.is_shard}
    shape = shape_of(node)
    orders = [shard(d, zigzag=zigzag) for d in range(len(shape)) for zigzag in (False, True)]
    outputs = {state for state in orders if divides(shape, state, size)}
    form = form_of(node)
    if form is not None:
        outputs |= set(_carried(form, Call(node), cuts, size))
    return rules_for(node, size, Facts(differentiable, {**cuts, node: frozenset(outputs)}, ring=True))


def _carried(form: Form, call: Call, cuts: Mapping[fx.Node, frozenset[State]], size: int) -> Iterator[State]:
    """The output's cuts that follow from those of the inputs, by atoms and by sections."""
    for i, node in enumerate(call.tensors):
        for state in cuts.get(node, ()):
            cut = carry(form, i, state, size)
            if cut is not None and (output := place(form, OUTPUT, cut)) is not None:
                yield output
    parts = form.parts
    if parts is None:
        return
    if parts.whole != OUTPUT:
        whole = call.tensors[parts.whole]
        for state in cuts.get(whole, ()):
            own = narrow(state.sections_of(shape_of(whole)[state.dim]), *parts.pieces[0][1:])
            if state.dim == parts.dim and own is not None and state.copies == 1:
                yield shard(parts.dim, own, state.zigzag)
        return
    sections: list[int] = []
    for i, _, extent in parts.pieces:
        states = cuts.get(call.tensors[i], frozenset())
        sections += next((s.sections_of(extent) for s in states if s.dim == parts.dim), (extent,))
    yield shard(parts.dim, sections)


def value_of(state: State) -> State:
    """How the value alone lies: R* is R."""
    return REPLICATE if state.kind == "R*" else state


def nearest_rules(rules: Sequence[Rule], states: Sequence[State]) -> str:
    """The rules that share most inputs with what was found, for an error."""

    def distance(rule: Rule) -> int:
        return sum(value_of(a) != b for a, b in zip(rule.inputs, states))

    if not rules:
        return "an op that keeps rows apart"
    shown = sorted(rules, key=distance)[:MOST_RULES_SHOWN]
    more = f" or {len(rules) - len(shown)} more" if len(rules) > len(shown) else ""
    return f"inputs as in {' or '.join(map(str, shown))}{more}"
