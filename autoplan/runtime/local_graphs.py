"""The graph one rank runs for every region of a plan: a capture and its stages in, local graphs out.

A plan has one part here. The passes run in this order: the caller's own, the sharding pass axis by axis, and
what the backward and the schedule ask for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import fx

from autoplan.capture.program import Capture
from autoplan.errors import BadPlanError
from autoplan.plan import AxisLayout, Layout, Part, Plan
from autoplan.regions import region_graph
from autoplan.schedules import splits_backward
from autoplan_codegen.stage import GraphKey
from autoplan_passes.calls import output_nodes, shape_of
from autoplan_passes.fuel import Fuel
from autoplan_passes.fuse import fused_region
from autoplan_passes.regather import regather
from autoplan_passes.shard import AxisStep, shard_region
from autoplan_passes.split_backward import defer_weight_gradients
from autoplan_passes.stages import RegionCall, StageProgram

GraphPass = Callable[[fx.GraphModule], fx.GraphModule]


def local_shapes(
    programs: Sequence[StageProgram], graphs: Mapping[GraphKey, fx.GraphModule]
) -> dict[str, tuple[int, ...]]:
    """What one rank has of every value that a region makes, as the region's local graph leaves it."""
    found: dict[str, tuple[int, ...]] = {}
    for call in (call for program in programs for call in program.calls):
        made = output_nodes(graphs[call.graph_key].graph)
        found |= {name: shape_of(node) for name, node in zip(call.region.outputs, made)}
    return found


def local_graphs(
    capture: Capture,
    programs: Sequence[StageProgram],
    plan: Plan,
    passes: Sequence[GraphPass] = (),
    fuel: Fuel | None = None,
) -> dict[GraphKey, fx.GraphModule]:
    """The graph one rank runs for every distinct (region class, layout) of the plan."""
    calls: dict[GraphKey, RegionCall] = {}
    for program in programs:
        for call in program.calls:
            calls.setdefault(call.graph_key, call)
    part = plan.parts[0]
    return {
        key: finished(local_graph(capture, call, plan, passes, fuel=fuel), part)
        for key, call in calls.items()
    }


def local_graph(
    capture: Capture,
    call: RegionCall,
    plan: Plan,
    passes: Sequence[GraphPass] = (),
    steps: list[AxisStep] | None = None,
    fuel: Fuel | None = None,
) -> fx.GraphModule:
    """The graph one rank runs for a region, before what :func:`finished` does to it.

    ``steps`` receives the graphs before and after each axis; ``fuel`` says how many rewrites are left.
    """
    part = plan.parts[0]
    graph = region_graph(capture, call.region, part.micro_batch)
    if call.layout and call.layout not in plan.layouts:
        raise BadPlanError(
            f"Region {call.region.name} uses the layout {call.layout!r}, which the plan does not hold "
            f"(it has {', '.join(plan.layouts) or 'none'}). Search again: autoplan search MODEL.py"
        )
    layout = plan.layouts.get(call.layout) or Layout(call.region.class_id)
    graph = fused_region(graph, layout.kernels)
    for rewrite in passes:
        graph = rewrite(graph)
    if capture.dtype != plan.workload.dtype:
        for axis, placed in layout.axes.items():
            layout = layout.replace_axis(axis, with_casts_of(graph, placed))
    return shard_region(graph, layout, steps, fuel)


def finished(local: fx.GraphModule, part: Part) -> fx.GraphModule:
    """The local graph as the part's schedule wants it."""
    local = regather(local)
    return defer_weight_gradients(local) if splits_backward(part.schedule) else local


def with_casts_of(graph: fx.GraphModule, layout: AxisLayout) -> AxisLayout:
    """The layout for a graph traced in another dtype: its casts are others, each runs as its input lies."""
    rules = {name: rule for name, rule in layout.rules.items() if not _is_cast(name)}
    placed = {**layout.inputs, **layout.parameters}
    for node in graph.graph.nodes:
        if node.op == "call_function" and _is_cast(node.name):
            state = placed.get(node.all_input_nodes[0].name, "R")
            state = state if state.startswith("S") else "R"
            rules[node.name] = f"{state}->{state}"
        if node.name in rules:
            placed[node.name] = rules[node.name].partition("->")[2].partition(" ")[0]
    return replace(layout, rules=rules)


def _is_cast(name: str) -> bool:
    return re.fullmatch(r"_?to_copy(_\d+)?", name) is not None
