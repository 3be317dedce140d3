"""The graph that one rank runs for each layout of a plan: a plan and its model's file in, graphs out.

Nothing is run and no weights are made; the report draws these graphs.
"""

from __future__ import annotations

from pathlib import Path

from torch import fx

from autoplan.plan import Plan
from autoplan.regions import find_regions
from autoplan.runtime.prepare import capture_planned, local_graphs, single_part
from autoplan_passes.stages import split_stages


def layout_graphs(plan: Plan, model: str | Path) -> dict[str, fx.GraphModule]:
    """The local graph of every layout, at the plan's micro-batch, by the layout's name.

    Raises BadPlanError when the file's model is not the plan's.
    """
    part = single_part(plan)
    capture = capture_planned(plan, model, batch=part.micro_batch)
    graphs = local_graphs(capture, split_stages(capture, find_regions(capture), part), plan)
    return {layout or region_class: graph for (region_class, layout), graph in graphs.items()}
