"""Which tensors between regions an axis cuts along their tokens: a capture's regions in, boundaries out.

What each dim counts is followed from the user's inputs through the graph of every region class, once a class.
A tensor that regions of several classes make or read crosses all their boundaries in one state; where one of
them cannot have it cut, it stays replicated for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from autoplan.capture.program import Capture
from autoplan.planner.layout import Boundary
from autoplan.regions import Region
from autoplan_passes.calls import Call, is_tensor, op_name, output_nodes, shape_of
from autoplan_passes.candidates import find_differentiable
from autoplan_passes.dim_kinds import (
    BATCH,
    FEATURE,
    MIXED,
    TOKEN,
    TOKENS,
    Kinds,
    find_dim_kinds,
    token_state,
)
from autoplan_passes.states import State

CASTS = ("aten._to_copy", "aten.to", "aten.clone", "aten.contiguous", "aten.alias")
CONVOLUTIONS = ("aten.conv1d", "aten.conv2d", "aten.conv3d", "aten.convolution")
GraphOf = Callable[[str], fx.GraphModule]


def mark_dims(capture: Capture, regions: Sequence[Region], graph_of: GraphOf, batch: int) -> dict[str, Kinds]:
    """Give the inputs of every class's graph their ``meta["dims"]``; returns the kinds of live tensors.

    ``graph_of`` gives the graph of a class at micro-batch ``batch``.
    """
    kinds = {n.name: _user_kinds(n, capture) for n in capture.graph.nodes if n.meta.get("kind") == "input"}
    known: dict[tuple[str, tuple[Kinds, ...]], tuple[Kinds, ...]] = {}
    marked: set[str] = set()
    for region in regions:
        given = tuple(kinds[name] for name in region.inputs)
        key = (region.class_id, given)
        if key not in known:
            graph = graph_of(region.class_id)
            before = _mark(graph, given, batch)
            known[key] = tuple(_output_kinds(graph))
            if region.class_id in marked:
                _mark(graph, before, batch)
            marked.add(region.class_id)
        kinds |= dict(zip(region.outputs, known[key]))
    return kinds


def _mark(graph: fx.GraphModule, given: Sequence[Kinds], batch: int) -> list[Kinds]:
    """Set the kinds of the graph's inputs; returns those before."""
    inputs = [n for n in graph.graph.nodes if n.meta.get("kind") == "input"]
    before = [n.meta.get("dims", ()) for n in inputs]
    for node, kinds in zip(inputs, given):
        node.meta |= {"dims": kinds, "batch": batch}
    return before


def _output_kinds(graph: fx.GraphModule) -> list[Kinds]:
    found = find_dim_kinds(graph.graph)
    return [found.get(node, ()) for node in output_nodes(graph.graph)]


def _user_kinds(node: fx.Node, capture: Capture) -> Kinds:
    """Samples by how the batch grows; features are what a convolution contracts, else the last of floats."""
    if not is_tensor(node):
        return ()
    shape = shape_of(node)
    growth = capture.batch_form.shapes.get(node.name, (0,) * len(shape))
    kinds = [_counted(n, g, capture.batch) for n, g in zip(shape, growth)]
    if not capture.batch_form.known and shape and shape[0] == capture.batch:
        kinds[0] = BATCH
    value = node.meta["val"]
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        channels = 1 if _is_convolved(node) else len(shape) - 1 if 1 < len(shape) < 4 else 0
        if channels and kinds[channels] == TOKEN:
            kinds[channels] = FEATURE
    return tuple(kinds)


def _counted(size: int, growth: int, batch: int) -> str:
    if not growth:
        return TOKEN
    if size != growth * batch:
        return MIXED
    return BATCH if growth == 1 else TOKENS


def _is_convolved(node: fx.Node) -> bool:
    readers = list(node.users)
    for reader in readers:
        if op_name(reader) in CASTS:
            readers.extend(reader.users)
    return any(op_name(r) in CONVOLUTIONS and len(Call(r).shapes[0]) == len(shape_of(node)) for r in readers)


def token_boundaries(
    kinds: Mapping[str, Kinds],
    regions: Sequence[Region],
    graph_of: GraphOf,
    batch: int,
    ways: int,
    *,
    before: int = 1,
    zigzag: bool = False,
) -> dict[str, Boundary]:
    """For every region class: what gradients flow through crosses its boundary cut along its tokens.

    ``kinds`` come from :func:`mark_dims`; ``graph_of`` gives the whole graph of a class at micro-batch
    ``batch``. ``ways`` is the size of the axis; ``before`` how many ranks share the tokens already (earlier
    axes). ``zigzag`` cuts them in that order.
    """
    slots = _Slots()
    crossing = {class_id: _crossing(graph_of(class_id)) for class_id in _classes(regions)}
    for region in regions:
        names = [*region.inputs, *region.outputs]
        for name, (side, position, node) in zip(names, crossing[region.class_id]):
            ranks = (ways, before)
            state = None if node is None else _state(kinds[name], shape_of(node), batch, ranks, zigzag)
            slots.join(name, (region.class_id, side, position), state)
    return {class_id: _boundary(graph_of(class_id), class_id, slots) for class_id in _classes(regions)}


def _crossing(graph: fx.GraphModule) -> list[tuple[str, int, fx.Node | None]]:
    """The places where tensors enter and leave, with the node there if gradients flow through it."""
    differentiable = find_differentiable(graph.graph)
    inputs = [n for n in graph.graph.nodes if n.meta.get("kind") == "input"]
    places = [("in", inputs), ("out", output_nodes(graph.graph))]
    return [
        (side, position, node if node in differentiable else None)
        for side, nodes in places
        for position, node in enumerate(nodes)
    ]


def _classes(regions: Sequence[Region]) -> list[str]:
    return list(dict.fromkeys(region.class_id for region in regions))


def _state(
    kinds: Kinds, shape: Sequence[int], batch: int, ranks: tuple[int, int], zigzag: bool
) -> State | None:
    """The cut of a tensor over ``ranks[0]``, whose tokens earlier axes have divided by ``ranks[1]``."""
    ways, before = ranks
    cut = token_state(kinds, shape, batch, ways * before, zigzag)
    if cut is None or before == 1:
        return cut
    local = [n // before if d == cut.dim else n for d, n in enumerate(shape)]
    return token_state(kinds, local, batch, ways, zigzag)


def _boundary(graph: fx.GraphModule, class_id: str, slots: _Slots) -> Boundary:
    inputs = [n.name for n in graph.graph.nodes if n.meta.get("kind") == "input"]
    arriving = {name: slots.state_of((class_id, "in", i)) for i, name in enumerate(inputs)}
    leaving = {i: slots.state_of((class_id, "out", i)) for i in range(len(output_nodes(graph.graph)))}
    return Boundary(
        {name: state for name, state in arriving.items() if state is not None},
        {i: state for i, state in leaving.items() if state is not None},
    )


Slot = tuple[str, str, int]


@dataclass
class _Slots:
    """Live tensors and the places where classes take and give them; what is joined has one state."""

    parents: dict[object, object] = field(default_factory=dict[object, object])
    states: dict[object, set[State | None]] = field(default_factory=dict[object, "set[State | None]"])

    def join(self, tensor: str, slot: Slot, state: State | None) -> None:
        first, second = self._root(tensor), self._root(slot)
        joined = self.states.pop(first, set()) | self.states.pop(second, set()) | {state}
        self.parents[second] = first
        self.states[first] = joined

    def state_of(self, slot: Slot) -> State | None:
        """The state that all agree on, or None."""
        found = self.states[self._root(slot)]
        return next(iter(found)) if len(found) == 1 else None

    def _root(self, item: object) -> object:
        while item in self.parents and self.parents[item] != item:
            item = self.parents[item]
        return item
