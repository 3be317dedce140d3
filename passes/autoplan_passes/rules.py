"""The ways an op can run on one mesh axis: a node comes in, its legal :class:`Rule` records go out.

The tables of the op families (``table_*.py``) give each op a :class:`~autoplan_passes.dims.Form`; the rules
follow from it by the gradient rule: where the output is cut and an input is not, that input's gradient
is partial, so the input is R*. Partial values go only through ops that are linear in them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from autoplan_passes import (
    table_collectives,
    table_contractions,
    table_dims,
    table_experts,
    table_fused,
    table_indexing,
    table_pointwise,
)
from autoplan_passes.calls import Call, first_tensor, op_name, overload_name, shape_of, tensor_inputs
from autoplan_passes.dims import ADDEND, FACTOR, OUTPUT, Cut, Form, carry, narrow, place
from autoplan_passes.rows import Choice, Row
from autoplan_passes.states import PARTIAL, REPLICATE, REPLICATE_PARTIAL_GRADIENT, State, divides, shard
from autoplan_passes.table_contractions import RING

ROWS: dict[str, Row] = {
    **table_pointwise.ROWS,
    **table_contractions.ROWS,
    **table_dims.ROWS,
    **table_indexing.ROWS,
    **table_collectives.ROWS,
    **table_experts.ROWS,
    **table_fused.ROWS,
}


@dataclass(frozen=True)
class Rule:
    """One way to run a node: states of its distinct tensor inputs, of its output, and what computes it.

    ``inputs`` follow the tensor-valued ``all_input_nodes``. ``implementation`` is ``local`` (the op itself
    on local tensors) or one that :mod:`autoplan_passes.implementations` knows.
    """

    inputs: tuple[State, ...]
    output: State
    implementation: str = "local"

    def __str__(self) -> str:
        text = f"{','.join(map(str, self.inputs))}->{self.output}"
        return text if self.implementation == "local" else f"{text} {self.implementation}"

    @property
    def is_cut(self) -> bool:
        return self.output.is_shard or any(state.is_shard for state in self.inputs)


@dataclass(frozen=True)
class Facts:
    """What is known of the tensors of one graph on an axis.

    ``differentiable`` holds the nodes through which gradients flow; ``cuts`` the S states worth considering
    of each node (absent: none); ``lent`` those that follow the tokens or samples of other tensors, in which
    no parameter is stored. ``ring``: attention may pass keys and values round the axis. See
    :func:`autoplan_passes.candidates.find_facts`.
    """

    differentiable: frozenset[fx.Node] = frozenset()
    cuts: Mapping[fx.Node, frozenset[State]] = field(default_factory=dict[fx.Node, frozenset[State]])
    lent: Mapping[fx.Node, frozenset[State]] = field(default_factory=dict[fx.Node, frozenset[State]])

    ring: bool = False

    def stored_cuts(self, parameter: fx.Node) -> list[State]:
        """The S states in which a parameter may be stored."""
        return sorted(self.cuts.get(parameter, frozenset()) - self.lent.get(parameter, frozenset()))


def row_of(node: fx.Node) -> Row | None:
    """The table row of a node's op, the overload's own before the op's."""
    return ROWS.get(overload_name(node)) or ROWS.get(op_name(node))


def form_of(node: fx.Node) -> Form | None:
    row = row_of(node)
    return row.form(Call(node)) if row is not None and row.form is not None else None


def plain_facts(node: fx.Node, size: int) -> Facts:
    """For one node alone: floating tensors are differentiable, every dim that divides may be cut."""
    nodes = [node, *tensor_inputs(node)]
    floating = frozenset(n for n in nodes if first_tensor(n).is_floating_point())
    cuts = {
        n: frozenset(s for d in range(len(shape_of(n))) if divides(shape_of(n), s := shard(d), size))
        for n in nodes
    }
    return Facts(floating, cuts)


def rules_for(node: fx.Node, size: int, facts: Facts | None = None) -> tuple[Rule, ...]:
    """Every legal rule of a node on an axis of ``size`` ranks; the first one is all R.

    An op without a row has that one rule: it runs replicated.
    """
    known = facts or plain_facts(node, size)
    inputs = tensor_inputs(node)
    replicated = Rule((REPLICATE,) * len(inputs), REPLICATE)
    row = row_of(node)
    if row is None or size == 1:
        return (replicated,)
    found = {replicated: None}
    for choice in _choices(row, Call(node), size, known):
        rule = _fold(choice, Call(node).tensors, inputs, node, known)
        if rule is not None and (rule.implementation != RING or _may_ring(Call(node), known)):
            found[rule] = None
    return tuple(found)


def _may_ring(call: Call, facts: Facts) -> bool:
    """Masks that are trained get no gradient from a ring."""
    return facts.ring and not any(mask in facts.differentiable for mask in call.tensors[3:])


def _choices(row: Row, call: Call, size: int, facts: Facts) -> Iterator[Choice]:
    """States of every tensor occurrence, before folding repeats and tensors without gradient."""
    count = len(call.tensors)
    yield Choice((REPLICATE_PARTIAL_GRADIENT,) * count, REPLICATE_PARTIAL_GRADIENT)
    form = row.form(call) if row.form is not None else None
    if form is not None:
        yield from _partial_choices(form, count)
        for cut in sorted(_possible_cuts(form, call, size, facts)):
            yield from _cut_choices(form, cut, row.cut_implementation(call), count)
        yield from _parts_choices(form, call, size, facts)
    for choice in row.special(call, size):
        yield choice
    for choice in row.factory(call, [facts.cuts.get(n, frozenset()) for n in (*call.tensors, call.node)]):
        yield choice


def _partial_choices(form: Form, count: int) -> Iterator[Choice]:
    """Output P: all addends P together with exactly one factor, if there are factors."""
    addends = [i for i, role in enumerate(form.roles) if role == ADDEND]
    factors = [i for i, role in enumerate(form.roles) if role == FACTOR]
    for chosen in [[*addends, factor] for factor in factors] or ([addends] if addends else []):
        states = [PARTIAL if i in chosen else REPLICATE_PARTIAL_GRADIENT for i in range(count)]
        yield Choice(tuple(states), PARTIAL)


def _possible_cuts(form: Form, call: Call, size: int, facts: Facts) -> set[Cut]:
    tensors = [*enumerate(call.tensors), (OUTPUT, call.node)]
    states = ((i, state) for i, node in tensors for state in facts.cuts.get(node, frozenset()))
    return {cut for i, state in states if (cut := carry(form, i, state, size)) is not None}


def _cut_choices(form: Form, cut: Cut, implementation: str, count: int) -> Iterator[Choice]:
    """Tensors with the atom are cut; the others are R*, or P where they are added to a partial output.

    Pieces that several ranks hold are neither summed up nor drawn for.
    """
    placed = [place(form, i, cut) for i in range(count)]
    output = place(form, OUTPUT, cut)
    if cut[-1] > 1 and (output is None or implementation != "local"):
        return
    missing = REPLICATE_PARTIAL_GRADIENT
    states = [state or missing for state in placed]
    if output is not None:
        yield Choice(tuple(states), output, implementation)
        return
    for i, role in enumerate(form.roles):
        if placed[i] is None and role == ADDEND:
            states[i] = PARTIAL
    yield Choice(tuple(states), PARTIAL, "average_of_parts" if form.averaged else implementation)


def _parts_choices(form: Form, call: Call, size: int, facts: Facts) -> Iterator[Choice]:
    """A dim made of pieces, cut by sections that no piece divides: each piece by its own sections."""
    parts = form.parts
    if parts is None:
        return
    whole = call.node if parts.whole == OUTPUT else call.tensors[parts.whole]
    length = shape_of(whole)[parts.dim]
    for state in sorted(facts.cuts.get(whole, frozenset())):
        if state.dim != parts.dim or state.copies > 1:
            continue
        states = {parts.whole: state}
        for tensor, start, extent in parts.pieces:
            own = narrow(state.sections_of(length), start, extent)
            if own is not None:
                states[tensor] = shard(parts.dim, own, state.zigzag)
        if len(states) == len(parts.pieces) + 1:
            inputs = tuple(states[i] for i in range(len(call.tensors)))
            yield Choice(inputs, states[OUTPUT])


def _fold(
    choice: Choice, occurrences: Sequence[fx.Node], inputs: Sequence[fx.Node], node: fx.Node, facts: Facts
) -> Rule | None:
    """A Rule of distinct inputs; None where a repeated input would need two states, or a state is illegal."""
    states: dict[fx.Node, State] = {}
    for tensor, wanted in zip(occurrences, choice.inputs):
        state = wanted
        if tensor not in facts.differentiable:
            if state == PARTIAL:
                return None
            state = REPLICATE if state == REPLICATE_PARTIAL_GRADIENT else state
        if states.setdefault(tensor, state) != state:
            return None
    output = choice.output
    if node not in facts.differentiable:
        if output == PARTIAL:
            return None
        output = REPLICATE if output == REPLICATE_PARTIAL_GRADIENT else output
    known = [*states.items(), (node, output)]
    if any(state.is_shard and state not in facts.cuts.get(tensor, frozenset()) for tensor, state in known):
        return None
    return Rule(tuple(states[n] for n in inputs), output, choice.implementation)
