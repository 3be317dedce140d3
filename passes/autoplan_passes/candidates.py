"""Which tensors carry gradients and which cuts of each are worth considering: a region graph comes in.

Out goes :class:`~autoplan_passes.rules.Facts`. Which dims an axis may cut is said by :class:`Cutting`: cuts
of features start at the dims of parameters, cuts of tokens and samples at the activations that count
them (:mod:`autoplan_passes.dim_kinds`); both are carried through the graph by the ops' Forms, both ways.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import fx

from autoplan_passes.attention import attention_outputs
from autoplan_passes.calls import Call, is_tensor, op_name, shape_of
from autoplan_passes.dim_kinds import (
    BATCH,
    FEATURE,
    TOKEN,
    TOKENS,
    atom_kinds,
    batch_size,
    find_dim_kinds,
)
from autoplan_passes.dims import OUTPUT, Form, carry, narrow, place
from autoplan_passes.rules import Facts, form_of
from autoplan_passes.states import State, divides, shard
from autoplan_passes.table_contractions import few_heads
from autoplan_passes.table_pointwise import FILLS

NO_GRADIENT_OPS = frozenset(
    ["aten.detach", *(f"aten.{x}_like" for x in FILLS), *(f"aten.new_{x}" for x in FILLS)]
)
MAX_SWEEPS = 8


@dataclass(frozen=True)
class Cutting:
    """Which dims an axis may cut: those of parameters and what they make (``features``), the tokens of each
    sample (``tokens``, in ``zigzag`` or straight), the samples of a micro-batch (``batch``), the ``heads`` of
    attention. With ``ring`` attention may pass keys and values round the axis.

    Parameters are stored whole along tokens and samples, and altogether where features are not cut.
    """

    features: bool = True
    tokens: bool = False
    batch: bool = False
    zigzag: bool = False
    ring: bool = False
    heads: bool = False

    def allows(self, kind: str) -> bool:
        """Whether an atom of this kind may be cut; merged samples and tokens follow what was cut of them."""
        allowed = {BATCH: self.batch, TOKEN: self.tokens, TOKENS: self.tokens or self.batch}
        return allowed.get(kind, self.features or self.heads)


FEATURES = Cutting()
FEATURES_AND_TOKENS = Cutting(tokens=True)
TOKENS_ALONE = Cutting(features=False, tokens=True)


def find_facts(
    graph: fx.Graph,
    size: int,
    seeds: Mapping[fx.Node, State] | None = None,
    cutting: Cutting = FEATURES,
) -> Facts:
    """Differentiable nodes and candidate cuts of a region graph; ``seeds`` adds states of parameters."""
    differentiable = find_differentiable(graph)
    if size == 1:
        return Facts(differentiable)
    active = find_active(graph, differentiable)
    spread = _Spread(graph, size, active, cutting)
    for node in graph.nodes:
        is_parameter = node.meta.get("kind") == "parameter"
        if cutting.features and is_parameter and len(shape_of(node)) > 1:
            spread.add_all(node, (shard(d) for d in range(len(shape_of(node)))))
        elif not is_parameter and node in active:
            spread.add_all(node, spread.counted_cuts(node))
    for node in attention_outputs(graph) if cutting.heads else ():
        spread.add_all(node, [shard(len(shape_of(node)) - 3)])
    for node, state in (seeds or {}).items():
        spread.add_all(node, [state] if state.is_shard else [])
    spread.run()
    cuts = {node: frozenset(states) for node, states in spread.cuts.items()}
    lent = {node: frozenset(states) for node, states in spread.lent.items()}
    return Facts(differentiable, cuts, lent, cutting.ring)


def find_differentiable(graph: fx.Graph) -> frozenset[fx.Node]:
    """Nodes whose gradient is needed: trainable parameters, activations, and what depends on them."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if not is_tensor(node) or not any_floating(node) or op_name(node) in NO_GRADIENT_OPS:
            continue
        if node.op == "placeholder":
            trainable = node.meta.get("trainable", True) and node.meta.get("requires_grad", True)
            if trainable and node.meta.get("kind") in ("parameter", "input"):
                found.add(node)
        elif any(n in found for n in node.all_input_nodes):
            found.add(node)
    return frozenset(found)


def any_floating(node: fx.Node) -> bool:
    value = node.meta["val"]
    tensors = [value] if isinstance(value, torch.Tensor) else value
    return any(isinstance(v, torch.Tensor) and v.is_floating_point() for v in tensors)


def find_active(graph: fx.Graph, differentiable: frozenset[fx.Node]) -> frozenset[fx.Node]:
    """Nodes that depend on a parameter or a differentiable input; the rest are constants of the step."""
    active: set[fx.Node] = set()
    for node in graph.nodes:
        is_source = node in differentiable or node.meta.get("kind") == "parameter"
        if is_tensor(node) and (is_source or any(n in active for n in node.all_input_nodes)):
            active.add(node)
    return frozenset(active)


@dataclass
class _Spread:
    """Carries cuts from tensor to tensor until nothing is new."""

    graph: fx.Graph
    size: int
    active: frozenset[fx.Node]
    cutting: Cutting
    cuts: dict[fx.Node, set[State]] = field(default_factory=dict[fx.Node, set[State]])
    lent: dict[fx.Node, set[State]] = field(default_factory=dict[fx.Node, set[State]])

    def __post_init__(self) -> None:
        self.calls = {n: Call(n) for n in self.graph.nodes if n.op == "call_function" and n in self.active}
        self.forms = {n: form for n in self.calls if (form := form_of(n)) is not None}
        self.kinds, self.batch = find_dim_kinds(self.graph), batch_size(self.graph)
        self.atoms = {
            n: atom_kinds(form, self.calls[n], self.kinds, self.batch) for n, form in self.forms.items()
        }
        self.grew = False

    def counted_cuts(self, node: fx.Node) -> Iterator[State]:
        """Cuts along the tokens and samples that a tensor counts; tokens merged with samples inside each."""
        for dim, (kind, size) in enumerate(zip(self.kinds[node], shape_of(node))):
            if kind == TOKENS and self.cutting.tokens:
                inside = State("S", dim, (size // self.batch,), self.cutting.zigzag)
                yield inside.fitted(shape_of(node))
            elif kind == TOKEN and self.cutting.tokens:
                yield shard(dim, zigzag=self.cutting.zigzag)
            elif kind == BATCH and self.cutting.batch:
                yield shard(dim)

    def add_all(self, node: fx.Node, states: Iterator[State] | list[State]) -> None:
        known = self.cuts.setdefault(node, set())
        for state in states:
            if state not in known and divides(shape_of(node), state, self.size):
                known.add(state)
                self.grew = True

    def run(self) -> None:
        nodes = list(self.forms)
        for _ in range(MAX_SWEEPS):
            self.grew = False
            for node in nodes:
                self._spread(node)
            for node in reversed(nodes):
                self._spread(node)
                self._propose_sections(node)
            for node in self.graph.nodes:
                if node.op == "placeholder" and node in self.active:
                    self._propose_sections(node)
            if not self.grew:
                return

    def _spread(self, node: fx.Node) -> None:
        """Carry the cuts of each tensor of one op to its other tensors."""
        form, call = self.forms[node], self.calls[node]
        tensors = [*enumerate(call.tensors), (OUTPUT, node)]
        atoms = self.atoms[node]
        found = {
            cut
            for i, tensor in tensors
            for state in self.cuts.get(tensor, ())
            if (cut := carry(form, i, state, self.size)) is not None
            and self.cutting.allows(atoms.get(cut[0], FEATURE))
        }
        for cut in found:
            of_features = atoms.get(cut[0], FEATURE) == FEATURE
            for i, tensor in tensors:
                state = place(form, i, cut)
                if state is None or (of_features and self._stays_whole(tensor)):
                    continue
                self.add_all(tensor, [state])
                if not of_features:
                    self.lent.setdefault(tensor, set()).add(state)
        self._spread_grouped_heads(form, call)
        self._spread_parts(form, call)

    def _stays_whole(self, tensor: fx.Node) -> bool:
        """Parameters of an axis that cuts no features: heads alone are moved, not made in pieces."""
        return not self.cutting.features and tensor.meta.get("kind") == "parameter"

    def _spread_grouped_heads(self, form: Form, call: Call) -> None:
        """Too few kv heads to cut: query heads may be cut inside every group of them, or one kv head be
        repeated for several ranks."""
        kv, group = form.sizes.get("kv", 1), form.sizes.get("group", 1)
        if self.cutting.heads and group > 1 and kv < self.size and self.size % kv == 0:
            for tensor in (call.tensors[0], call.node):
                self.add_all(tensor, [shard(len(shape_of(tensor)) - 3)])
        if group > 1 and kv % self.size and group % self.size == 0:
            state = place(form, 0, ("group", (), False, 1))
            self.add_all(call.tensors[0], [state] if state else [])
        if self.cutting.features and group > 1:
            for choice in few_heads(call, self.size):
                states = zip((*call.tensors, call.node), (*choice.inputs, choice.output))
                for tensor, wanted in states:
                    self.add_all(tensor, [wanted] if wanted.is_shard else [])

    def _spread_parts(self, form: Form, call: Call) -> None:
        """A whole's sections give its pieces theirs, and joined pieces give the whole its sections."""
        parts = form.parts
        if parts is None:
            return
        nodes = {OUTPUT: call.node, **dict(enumerate(call.tensors))}
        whole = nodes[parts.whole]
        length = shape_of(whole)[parts.dim]
        for state in list(self.cuts.get(whole, ())):
            if state.dim != parts.dim or state.copies > 1:
                continue
            for tensor, start, extent in parts.pieces:
                own = narrow(state.sections_of(length), start, extent)
                if own is not None:
                    self.add_all(nodes[tensor], [shard(parts.dim, own, state.zigzag)])
        if parts.whole == OUTPUT:
            cuts = [s for tensor in call.tensors for s in self._plain(tensor) if s.dim == parts.dim]
            extents = [extent for _, _, extent in parts.pieces]
            self.add_all(whole, [shard(parts.dim, extents, zigzag) for zigzag in {s.zigzag for s in cuts}])

    def _plain(self, tensor: fx.Node) -> list[State]:
        """The cuts in which every rank holds a piece of its own."""
        return [state for state in self.cuts.get(tensor, ()) if state.copies == 1]

    def _propose_sections(self, whole: fx.Node) -> None:
        """Sections of a tensor whose users take pieces of one dim and want the pieces cut."""
        bounds: dict[int, set[int]] = {}
        wanted_cuts: set[tuple[int, bool]] = set()
        for user in whole.users:
            parts = self.forms[user].parts if user in self.forms else None
            if parts is None or parts.whole == OUTPUT:
                continue
            _, start, extent = parts.pieces[0]
            wanted = [s for s in self._plain(user) if s.dim == parts.dim]
            sections = max((s.sections_of(extent) for s in wanted), key=len, default=())
            ends = bounds.setdefault(parts.dim, {0, shape_of(whole)[parts.dim]})
            ends |= {start, start + extent} | {start + sum(sections[:i]) for i in range(len(sections))}
            wanted_cuts |= {(parts.dim, state.zigzag) for state in wanted}
        for dim, zigzag in wanted_cuts:
            marks = sorted(bounds[dim])
            self.add_all(whole, [shard(dim, [b - a for a, b in pairwise(marks)], zigzag)])
