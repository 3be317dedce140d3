"""The collectives that the code of a stage issues: its calls and their local graphs in, ordered lists out.

A list depends on the stage alone, so every rank that runs the stage issues the same; ``tests/test_issued.py``
holds it against what gloo ranks really sent. Not in it is what the runtime sends between stages and after the
last micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autoplan.plan import Mesh
from autoplan_codegen.expressions import KEEPING
from autoplan_codegen.stage import GraphKey
from autoplan_passes.candidates import find_differentiable
from autoplan_passes.local_ops import find_fake_mode
from autoplan_passes.shard import REGION_AXES, dry_group
from autoplan_passes.stages import RegionCall, StageProgram
from autoplan_passes.transitions import move_of

_Sent = tuple[str, str, str, int]  # op, kind, axis, bytes
WIDE_BYTES = 4  # gradients travel a ring in single precision or better


@dataclass(frozen=True)
class Issued:
    """One collective: what is sent along which axis, its bytes on one rank, and the op that sends it.

    Bytes are those of the larger side: of the whole tensor of a gather or scatter.
    """

    kind: str
    axis: str
    bytes: int
    region: str
    op: str

    @property
    def sent(self) -> tuple[str, str, int]:
        """What ranks must agree on."""
        return (self.kind, self.axis, self.bytes)


@dataclass(frozen=True)
class StageCollectives:
    """What one stage issues for one micro-batch; what is recomputed is sent again in ``backward``."""

    forward: tuple[Issued, ...] = ()
    backward: tuple[Issued, ...] = ()


@dataclass(frozen=True)
class NodeSends:
    """Kinds and bytes of what one node sends along an axis, forward and backward; ``none`` for nothing.

    ``regathers``: the backward gathers what the forward gathered, unless the forward runs again.
    """

    forward: str
    backward: str
    axis: str
    forward_bytes: int
    backward_bytes: int
    regathers: bool = False

    def without_backward(self) -> NodeSends:
        return NodeSends(self.forward, "none", self.axis, self.forward_bytes, 0)

    @property
    def noted(self) -> tuple[str, str, int, int, str]:
        """As in ``meta["collective"]``, from which costs are read."""
        there, back = self.forward != "none", self.backward != "none"
        return (
            self.forward,
            self.backward,
            self.forward_bytes * there,
            self.backward_bytes * back,
            self.axis,
        )


@dataclass(frozen=True)
class RegionSends:
    """A region's collectives forward, and backward by recompute kind."""

    forward: tuple[_Sent, ...] = ()
    backward: Mapping[str, tuple[_Sent, ...]] = field(default_factory=dict[str, "tuple[_Sent, ...]"])


def stage_collectives(
    programs: Sequence[StageProgram], graphs: Mapping[GraphKey, fx.GraphModule], mesh: Mesh
) -> tuple[StageCollectives, ...]:
    """The collectives of one micro-batch on every stage, in the order in which a rank issues them."""
    used = dict.fromkeys(call.graph_key for program in programs for call in program.calls)
    sends = {key: region_sends(graphs[key], mesh) for key in used}
    return tuple(_of_stage(program, sends) for program in programs)


def _of_stage(program: StageProgram, sends: Mapping[GraphKey, RegionSends]) -> StageCollectives:
    forward = [one for call in program.calls for one in _named(call, sends[call.graph_key].forward)]
    backward: list[Issued] = []
    for call in reversed(program.calls):
        own = sends[call.graph_key]
        backward += _named(call, own.backward[call.recompute])
    return StageCollectives(tuple(forward), tuple(backward))


def _named(call: RegionCall, sent: tuple[_Sent, ...]) -> Iterator[Issued]:
    return (Issued(kind, axis, size, call.region.name, op) for op, kind, axis, size in sent)


def node_sends(node: fx.Node, differentiable: frozenset[fx.Node]) -> list[NodeSends]:
    """What a node sends; collectives by what they are, implementations of ops by what they say."""
    move = move_of(node)
    if move is None:
        noted = node.meta.get("collective", ())
        keeping = node.target in KEEPING
        sends = [
            NodeSends(f, b, axis, int(sent), int(back), keeping and f == "none")
            for f, b, sent, back, axis in noted
        ]
    else:
        size = max(_bytes(node.meta["val"]), _bytes(move.tensor.meta["val"]))
        sends = [NodeSends(*move.sends, move.axis, size, size)]
    return [one.without_backward() if node not in differentiable else one for one in sends]


def _bytes(value: Any) -> int:
    return value.numel() * value.element_size()


def _one_by_one(node: fx.Node, sends: list[NodeSends]) -> list[NodeSends]:
    """A ring as its messages: keys and values go on at all steps but the last, their gradients at all."""
    if not any(one.forward == "ring" for one in sends):
        return sends
    (ring,) = (one for one in sends if one.forward == "ring")
    ways, _ = node.meta["ring"]
    passed = [n.meta["val"] for n in node.all_input_nodes[1:3]]
    held = sum(_bytes(value) for value in passed)
    gradients = sum(value.numel() * max(value.element_size(), WIDE_BYTES) for value in passed)
    there = [NodeSends("all_to_all", "none", ring.axis, held, 0)] * (ways - 1)
    back = [size for _ in range(ways - 1) for size in (held, gradients)] + [gradients]
    back = back if ring.backward != "none" else []
    others = [one for one in sends if one is not ring]
    return [*others, *there, *(NodeSends("none", "all_to_all", ring.axis, 0, size) for size in back)]


def region_sends(graph: fx.GraphModule, mesh: Mesh) -> RegionSends:
    """The collectives of one region for one micro-batch, in the order in which they are issued."""
    nodes = [n for n in graph.graph.nodes if n.op == "call_function"]
    differentiable = find_differentiable(graph.graph)
    sends = {n: _one_by_one(n, node_sends(n, differentiable)) for n in nodes}
    forward = {
        n: [(n.name, one.forward, one.axis, one.forward_bytes) for one in found if one.forward != "none"]
        for n, found in sends.items()
    }
    last = last_saver(graph, mesh) if any(forward.values()) else -1
    again = [one for n in nodes[: last + 1] for one in forward[n]]
    runs_again = {"none": [], "selective": [one for one in again if one[1] == "all_gather"], "full": again}
    backward: dict[str, tuple[_Sent, ...]] = {}
    for recompute, rerun in runs_again.items():
        order: list[_Sent] = []
        for position, node in reversed(list(enumerate(nodes))):
            # Where backward needs the first saved tensor, the forward runs again, up to its last saver.
            order += rerun if position == last else []
            found = [one for one in sends[node] if recompute == "none" or not one.regathers]
            order += [
                (node.name, s.backward, s.axis, s.backward_bytes) for s in found if s.backward != "none"
            ]
        backward[recompute] = tuple(order)
    return RegionSends(tuple(one for n in nodes for one in forward[n]), backward)


def last_saver(graph: fx.GraphModule, mesh: Mesh) -> int:
    """The position among the graph's calls of the last that saves a tensor for backward; -1 for none."""
    differentiable = find_differentiable(graph.graph)
    values: dict[fx.Node, Any] = {}
    now, last = -1, -1

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal last
        last = now
        return tensor

    with dry_mesh(graph, mesh), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                values[node] = _leaf(node.meta["val"], node in differentiable)
            elif node.op == "call_function":
                now += 1
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                target: Callable[..., Any] = node.target  # pyright: ignore[reportAssignmentType] - calls only
                values[node] = target(*args, **kwargs)
    return last


@contextmanager
def dry_mesh(graph: fx.GraphModule, mesh: Mesh, *, last_rank: bool = False) -> Generator[None]:
    """Run local graphs on fake tensors, as the first or the last rank of every axis."""
    with ExitStack() as stack:
        for axis in REGION_AXES:
            size = getattr(mesh, axis)
            stack.enter_context(dry_group(axis, size, rank=size - 1 if last_rank else 0))
        stack.enter_context(find_fake_mode(graph.graph))
        yield


def _leaf(value: Any, differentiable: bool) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    leaf = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return leaf.requires_grad_(differentiable)
