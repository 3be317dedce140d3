"""Pipeline stages: a capture, its regions and one part of a plan in, one :class:`StageProgram` a stage out.

A stage takes consecutive regions whole. What flows in and out of it follows from the regions alone:

* user inputs go to the stages that read them (labels only to the stage with the loss);
* a value of an earlier stage is received from the neighbour and, where a later stage needs it too,
  passed on;
* a value that depends on no parameter (a mask, a rope table) is not sent: the ops that make it are copied
  to every stage that reads it, as one *side region* run before the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autoplan.capture.program import Capture
from autoplan.errors import BadPlanError
from autoplan.plan import Part, RegionPlan
from autoplan.regions import Region

SIDE = "side"


@dataclass(frozen=True)
class RegionCall:
    """One region as a stage runs it; ``layout`` is a key of ``Plan.layouts``, ``""`` for none."""

    region: Region
    layout: str = ""
    recompute: str = "none"

    @property
    def is_side(self) -> bool:
        """Whether the call makes masks and tables here that an earlier stage makes too."""
        return self.region.name.startswith(f"{SIDE}.") and not self.region.parameters and not self.layout

    @property
    def graph_key(self) -> tuple[str, str]:
        """Calls with equal keys run the same local graph."""
        return (self.region.class_id, self.layout)


@dataclass(frozen=True)
class StageProgram:
    """What one stage runs, in order, and what crosses its borders.

    ``user_inputs`` are the capture's input placeholders that this stage reads; ``receives`` and
    ``sends`` the values (names of capture nodes) exchanged with the neighbours, both sides in the
    same order; ``loss`` is the loss value's name on the last stage, else ``""``.
    """

    index: int
    count: int
    calls: tuple[RegionCall, ...]
    user_inputs: tuple[str, ...]
    receives: tuple[str, ...]
    sends: tuple[str, ...]
    loss: str = ""

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1


def split_stages(capture: Capture, regions: Sequence[Region], part: Part) -> tuple[StageProgram, ...]:
    """Cut the regions into the stages of ``part``.

    Raises :class:`BadPlanError` where the plan's regions are not the model's, in order, each once.
    """
    _check_regions(regions, part)
    by_name = {region.name: region for region in regions}
    calls = [[_call(by_name, entry) for entry in stage.regions] for stage in part.stages]
    nodes = {node.name: node for node in capture.graph.nodes}
    position = {name: index for index, name in enumerate(nodes)}
    user_inputs = {node.name for node in capture.graph.nodes if node.meta.get("kind") == "input"}
    producer = {name: s for s, stage in enumerate(calls) for call in stage for name in call.region.outputs}

    sides = [_side_call(nodes, index, _foreign(stage, user_inputs)) for index, stage in enumerate(calls)]
    staged = [[*([side] if side else []), *stage] for side, stage in zip(sides, calls)]
    wanted = [_foreign(stage, user_inputs) for stage in staged]
    received = _received(wanted, producer, position)
    loss = capture_loss(capture)
    return tuple(
        StageProgram(
            index=index,
            count=len(staged),
            calls=tuple(stage),
            user_inputs=_read_inputs(stage, user_inputs, position),
            receives=received[index],
            sends=received[index + 1] if index + 1 < len(staged) else (),
            loss=loss if index + 1 == len(staged) else "",
        )
        for index, stage in enumerate(staged)
    )


def capture_loss(capture: Capture) -> str:
    """The name of the node that is the capture's output, the scalar loss."""
    output = next(node for node in reversed(capture.graph.nodes) if node.op == "output")
    return output.all_input_nodes[0].name


def _check_regions(regions: Sequence[Region], part: Part) -> None:
    have = [region.name for region in regions]
    planned = [entry.region for stage in part.stages for entry in stage.regions]
    if planned == have:
        return
    wrong = next((pair for pair in zip(planned, have) if pair[0] != pair[1]), None)
    detail = (
        f"region {wrong[0]!r} of the plan stands where the model has {wrong[1]!r}"
        if wrong
        else f"the plan has {len(planned)} regions, the model {len(have)}"
    )
    raise BadPlanError(
        "The plan belongs to another model: expected every region of the model once and in order, "
        f"but {detail}.\nSearch again for this model: autoplan search MODEL.py"
    )


def _call(by_name: Mapping[str, Region], entry: RegionPlan) -> RegionCall:
    return RegionCall(by_name[entry.region], entry.layout, entry.recompute)


def _foreign(calls: Iterable[RegionCall], user_inputs: set[str]) -> tuple[str, ...]:
    """Values that the calls read but neither make themselves nor find among the user's inputs."""
    made: set[str] = set()
    foreign: dict[str, None] = {}
    for call in calls:
        for name in call.region.inputs:
            if name not in made and name not in user_inputs:
                foreign[name] = None
        made.update(call.region.outputs)
    return tuple(foreign)


def _side_call(nodes: Mapping[str, fx.Node], stage: int, foreign: Iterable[str]) -> RegionCall | None:
    """The side region of one stage: the chains of every parameter-free value made elsewhere."""
    chains = {name: parameter_free_chain(nodes[name]) for name in foreign}
    outputs = tuple(name for name, chain in chains.items() if chain)
    if not outputs:
        return None
    wanted = {node for name in outputs for node in chains[name] or ()}
    chain = [node for node in nodes.values() if node in wanted]
    leaves = {leaf: None for node in chain for leaf in node.all_input_nodes if leaf.op == "placeholder"}
    inputs = tuple(leaf.name for leaf in leaves if leaf.meta["kind"] == "input")
    name = f"{SIDE}.{stage}"
    region = Region(
        name=name,
        module_class="Side",
        class_id=name,
        nodes=tuple(node.name for node in chain),
        inputs=inputs,
        side_inputs=(),
        outputs=outputs,
        parameters=(),
        buffers=tuple(
            str(leaf.meta["source"])
            for kind in ("buffer", "constant")
            for leaf in leaves
            if leaf.meta["kind"] == kind
        ),
    )
    return RegionCall(region)


def parameter_free_chain(node: fx.Node) -> tuple[fx.Node, ...] | None:
    """All ops that make ``node``, or None where one reads a parameter or draws random numbers.

    (A random value must be the same on every stage that reads it, so it is sent.)
    """
    chain: dict[fx.Node, None] = {}
    pending = [node]
    while pending:
        current = pending.pop()
        if current.op == "placeholder":
            if current.meta["kind"] == "parameter":
                return None
            continue
        if current in chain:
            continue
        if is_random(current):
            return None
        chain[current] = None
        pending.extend(current.all_input_nodes)
    return tuple(chain)


def is_random(node: fx.Node) -> bool:
    """True for ops that draw from the random number generator (``dropout``, ``rand``, ``bernoulli``...)."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags


def _received(
    wanted: Sequence[tuple[str, ...]], producer: Mapping[str, int], position: Mapping[str, int]
) -> list[tuple[str, ...]]:
    """What each stage receives: all values made before it that it or a later stage wants."""
    received: list[tuple[str, ...]] = []
    for stage in range(len(wanted)):
        names = {name for later in wanted[stage:] for name in later if producer[name] < stage}
        received.append(tuple(sorted(names, key=position.__getitem__)))
    return received


def _read_inputs(
    calls: Sequence[RegionCall], user_inputs: set[str], position: Mapping[str, int]
) -> tuple[str, ...]:
    read = {name for call in calls for name in call.region.inputs if name in user_inputs}
    return tuple(sorted(read, key=position.__getitem__))
