"""A plan and its model in, the proof out that its rewritten full-size graph type-checks: :func:`verify_plan`.

No device, no weights and no process but this one. Every distinct region is checked once on each axis
(``autoplan_passes.typecheck``), then what regions and stages hand to each other, and the collectives that
the ranks of a group must issue alike.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx

from autoplan.capture import Capture
from autoplan.errors import BadPlanError
from autoplan.plan import Layout, Mesh, Part, Plan
from autoplan.regions import Region, find_regions
from autoplan.runtime.issued import (
    RegionSends,
    StageCollectives,
    dry_mesh,
    node_sends,
    region_sends,
    stage_collectives,
)
from autoplan.runtime.local_graphs import GraphPass, finished, local_graph
from autoplan.runtime.prepare import capture_planned, single_part
from autoplan_codegen.stage import GraphKey
from autoplan_passes.candidates import find_differentiable
from autoplan_passes.faults import Fault, TypeFault
from autoplan_passes.fuel import Fuel, fuel_from_environment
from autoplan_passes.shard import REGION_AXES, AxisStep
from autoplan_passes.stages import RegionCall, StageProgram, capture_loss, split_stages
from autoplan_passes.typecheck import Borders, check_placements


@dataclass(frozen=True)
class RegionFault:
    """A fault, the first region that has it, and the axis it is on ("" where it is on none)."""

    region: str
    axis: str
    fault: Fault

    def __str__(self) -> str:
        axis = f" on {self.axis}" if self.axis else ""
        return f"region {self.region}{axis}, op {self.fault}"


@dataclass(frozen=True)
class ClassChecked:
    """One distinct region graph: how many regions run it, its ops on one rank, and what it sends."""

    region: str
    layout: str
    regions: int
    ops: int
    axes: Mapping[str, int]
    forward: Mapping[str, int]
    backward: Mapping[str, int]
    sent_bytes: int


@dataclass(frozen=True)
class VerifyResult:
    """What was checked and what is wrong; ``collectives`` by stage, of one micro-batch."""

    faults: tuple[RegionFault, ...]
    mesh: Mesh
    regions: int
    ops: int
    classes: tuple[ClassChecked, ...]
    collectives: tuple[StageCollectives, ...]
    wall_s: Mapping[str, float]

    @property
    def ok(self) -> bool:
        return not self.faults


def verify_plan(plan: Plan, model: str | Path | None = None) -> VerifyResult:
    """Trace the model at the plan's micro-batch and check the whole plan.

    ``model`` None: the file that the plan names. Raises :class:`BadPlanError` for another model's plan.
    """
    started_s = time.perf_counter()
    capture = capture_planned(plan, model, batch=single_part(plan).micro_batch)
    return verify_capture(capture, find_regions(capture), plan, traced_s=time.perf_counter() - started_s)


def verify_capture(
    capture: Capture,
    regions: Sequence[Region],
    plan: Plan,
    *,
    passes: Sequence[GraphPass] = (),
    traced_s: float = 0.0,
) -> VerifyResult:
    """Check a plan against a capture at its micro-batch; ``passes`` as in :func:`prepare`."""
    started_s = time.perf_counter()
    part = single_part(plan)
    programs = split_stages(capture, regions, part)
    check = _Check(capture, plan, part, programs, tuple(passes))
    faults = tuple(check.faults())
    collectives = () if faults else stage_collectives(programs, check.graphs, part.mesh)
    return VerifyResult(
        faults=faults,
        mesh=part.mesh,
        regions=sum(len(program.calls) for program in programs),
        ops=sum(check.ops(call) for program in programs for call in program.calls),
        classes=tuple(check.classes()),
        collectives=collectives,
        wall_s={"capture": traced_s, "check": time.perf_counter() - started_s},
    )


@dataclass
class _Check:
    """The local graphs of a plan, made once a class, and everything that is asked of them."""

    capture: Capture
    plan: Plan
    part: Part
    programs: tuple[StageProgram, ...]
    passes: tuple[GraphPass, ...]
    fuel: Fuel = field(default_factory=fuel_from_environment)
    graphs: dict[GraphKey, fx.GraphModule] = field(default_factory=dict[GraphKey, fx.GraphModule])

    def __post_init__(self) -> None:
        self.calls: dict[GraphKey, list[RegionCall]] = {}
        for program in self.programs:
            for call in program.calls:
                self.calls.setdefault(call.graph_key, []).append(call)

    def faults(self) -> Iterator[RegionFault]:
        """Regions first: what they hand on is compared only where all of them hold."""
        found = [wrong for calls in self.calls.values() for wrong in self._region_faults(calls[0])]
        yield from found
        if not found:
            yield from _handed_on(self.programs, self.graphs, self.plan, self.part.mesh)
            yield from _stage_faults(self.programs, self.capture)

    def ops(self, call: RegionCall) -> int:
        graph = self.graphs.get(call.graph_key)
        return sum(n.op == "call_function" for n in graph.graph.nodes) if graph else 0

    def classes(self) -> Iterator[ClassChecked]:
        for key, calls in self.calls.items():
            sends = region_sends(self.graphs[key], self.part.mesh) if key in self.graphs else RegionSends()
            backward = sends.backward.get(calls[0].recompute, ())
            yield ClassChecked(
                region=calls[0].region.name,
                layout=calls[0].layout,
                regions=len(calls),
                ops=self.ops(calls[0]),
                axes={axis: one.size for axis, one in self._layout(calls[0]).axes.items()},
                forward=_counted(sends.forward),
                backward=_counted(backward),
                sent_bytes=sum(size for *_, size in (*sends.forward, *backward)),
            )

    def _layout(self, call: RegionCall) -> Layout:
        return self.plan.layouts.get(call.layout) or Layout(call.region.class_id)

    def _region_faults(self, call: RegionCall) -> Iterator[RegionFault]:
        """The first fault on each axis of one region; none after a step that could not be made."""
        name, mesh, axis = call.region.name, self.part.mesh, ""
        for axis, placed in self._layout(call).axes.items():
            if placed.size != getattr(mesh, axis):
                wanted = f"a layout for {axis} {getattr(mesh, axis)}, as in the mesh"
                yield RegionFault(name, axis, Fault(call.layout, wanted, f"{axis} {placed.size}"))
        steps: list[AxisStep] = []
        try:
            local = local_graph(self.capture, call, self.plan, self.passes, steps, self.fuel)
            for step in steps:
                axis = step.axis
                with dry_mesh(step.whole, mesh):
                    check_placements(step.whole, step.local, Borders.of(step.layout, step.axis))
        except BadPlanError as error:
            yield RegionFault(name, "", Fault(call.layout or "side", "a layout that fits", str(error)))
        except TypeFault as error:
            yield RegionFault(name, axis, error.fault)
        else:
            self.graphs[call.graph_key] = finished(local, self.part)
            for fault in _local_faults(self.graphs[call.graph_key], mesh):
                yield RegionFault(name, "", fault)


def _counted(sent: Sequence[tuple[str, str, str, int]]) -> dict[str, int]:
    return dict(Counter(f"{axis} {kind}" for _, kind, axis, _ in sent))


def _local_faults(graph: fx.GraphModule, mesh: Mesh) -> Iterator[Fault]:
    """Shapes that are others on the last rank than on the first; sends that costs do not count."""
    values: dict[fx.Node, Any] = {}
    with dry_mesh(graph, mesh, last_rank=True):
        for node in graph.graph.nodes:
            if node.op != "call_function":
                values[node] = node.meta.get("val")
                continue
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)  # pyright: ignore[reportCallIssue, reportUnknownVariableType] - calls only
            if shapes_of(values[node]) != shapes_of(node.meta["val"]):
                first, last = shapes_of(node.meta["val"]), shapes_of(values[node])
                yield Fault(node.name, f"on the last rank the shape of the first, {first}", str(last))
    differentiable = find_differentiable(graph.graph)
    for node in graph.graph.nodes:
        noted = [
            (f, b, int(sent), int(back), axis) for f, b, sent, back, axis in node.meta.get("collective", ())
        ]
        issued = [one.noted for one in node_sends(node, differentiable)]
        if noted != [one for one in issued if one[2] or one[3]]:
            yield Fault(node.name, f"the costs to count {issued}", str(noted or "nothing"))


def shapes_of(value: Any) -> list[list[int]]:
    """The shape of a tensor, or of each of a list."""
    listed = value if isinstance(value, (tuple, list)) else [value]
    return [list(one.shape) for one in listed if isinstance(one, torch.Tensor)]


def _handed_on(
    programs: Sequence[StageProgram], graphs: Mapping[GraphKey, fx.GraphModule], plan: Plan, mesh: Mesh
) -> Iterator[RegionFault]:
    """Every value that a region takes must lie, on every axis, as the region that made it leaves it."""
    made: dict[str, tuple[str, dict[str, str], Any]] = {}
    for call in (call for program in programs for call in program.calls):
        layout = plan.layouts.get(call.layout) or Layout(call.region.class_id)
        nodes = graphs[call.graph_key].graph.nodes
        entries = [n for n in nodes if n.meta.get("kind") == "input"]
        for name, node in zip(call.region.inputs, entries, strict=True):
            if name not in made:
                continue
            maker, left, value = made[name]
            taken = {axis: layout.on(axis).inputs.get(node.name, "R") for axis in REGION_AXES}
            for axis in REGION_AXES:
                if getattr(mesh, axis) > 1 and taken[axis] != left[axis]:
                    expected = f"{name} as {left[axis]}, as {maker} leaves it"
                    yield RegionFault(call.region.name, axis, Fault(node.name, expected, taken[axis]))
            if _kind_of(value) != _kind_of(node.meta["val"]):
                expected = f"{name} of {_kind_of(value)}, as {maker} leaves it"
                yield RegionFault(
                    call.region.name, "", Fault(node.name, expected, _kind_of(node.meta["val"]))
                )
        given = next(n for n in reversed(nodes) if n.op == "output").args[0]
        for position, (name, node) in enumerate(zip(call.region.outputs, given, strict=True)):
            left = {axis: layout.on(axis).outputs.get(str(position), "R") for axis in REGION_AXES}
            made[name] = (call.region.name, left, node.meta["val"])


def _kind_of(value: Any) -> str:
    return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}" if hasattr(value, "shape") else ""


def _stage_faults(programs: Sequence[StageProgram], capture: Capture) -> Iterator[RegionFault]:
    """Each stage has what its regions read and sends what the next one receives; the last has the loss."""
    for program, following in zip(programs, [*programs[1:], None]):
        held = {*program.receives, *program.user_inputs}
        stage = f"stage {program.index}"
        for call in program.calls:
            for name in call.region.inputs:
                if name not in held:
                    expected = "a value made on this stage, received or of the batch"
                    yield RegionFault(call.region.name, "", Fault(name, expected, f"none on {stage}"))
            held |= set(call.region.outputs)
        wanted = (capture_loss(capture),) if following is None else following.receives
        sent = (program.loss,) if following is None else program.sends
        if sent != wanted or not set(sent) <= held:
            yield RegionFault(stage, "", Fault("sends", ", ".join(wanted), ", ".join(sent) or "nothing"))
