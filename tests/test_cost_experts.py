"""What expert parallelism costs: measured at two degrees, mixed for others, and by how even the load is."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from captured_models import small_capture
from cost_fixture import profile
from torch import fx

from autoplan.plan import Layout
from autoplan.regions import find_regions, region_graph
from autoplan_cost_models import CostModel, Span
from autoplan_cost_models.between import work_between
from autoplan_cost_models.region_cost import RegionCost
from autoplan_cost_models.region_work import RegionWork, measure_region
from autoplan_passes.experts import expert_layout
from autoplan_passes.shard import dry_groups, shard_region, uneven_experts


@cache
def block() -> dict[int, fx.GraphModule]:
    """A block of 8 experts at two micro-batches."""
    capture = small_capture("deepseek_v3")
    region = next(r for r in find_regions(capture) if r.name == "model.layers.1")
    return {batch: region_graph(capture, region, batch) for batch in (1, 2)}


@cache
def work(ep: int, imbalance: float = 1.0) -> RegionWork:
    """The block, measured on one of ``ep`` ranks."""
    graphs = block()
    layout = Layout("block").replace_axis("ep", expert_layout(graphs[1], ep))
    with uneven_experts(imbalance), dry_groups(layout):
        return measure_region({batch: shard_region(graph, layout) for batch, graph in graphs.items()})


def price(found: RegionWork, ep: int, micro_batch: int = 3) -> RegionCost:
    spans = {"tp": Span(1), "cp": Span(1), "ep": Span(ep)}
    return CostModel(profile(), "bf16").region_cost(found, micro_batch, spans)


def numbers(cost: RegionCost) -> dict[str, float]:
    kinds = ("none", "selective", "full")
    return {
        "forward": cost.forward_s,
        "backward": cost.backward_s,
        "sent": cost.tp_forward_s + cost.tp_backward_s,
        "parameters": cost.parameter_bytes,
        "trained": float(cost.trainable_numel),
        "flops": cost.model_flops,
        **{f"again {kind}": cost.recompute_s[kind] for kind in kinds},
        **{f"saved {kind}": cost.saved_bytes[kind] for kind in kinds},
        **{f"transient {kind}": cost.transient_bytes[kind] for kind in kinds},
    }


@pytest.mark.parametrize("ep", [2, 4, 8])
def test_a_degree_between_two_costs_as_if_measured(ep: int) -> None:
    """Rows a group were once mixed like bytes, as if eight groups of one row were four groups of five."""
    mixed, measured = price(work_between(work(2), work(8), (2, 8), ep), ep), price(work(ep), ep)
    for name, value in numbers(measured).items():
        assert numbers(mixed)[name] == pytest.approx(value, rel=1e-4), name
    assert [use.by_expert for use in mixed.parameters] == [use.by_expert for use in measured.parameters]


def test_more_ranks_hold_less_and_send_more() -> None:
    """Each rank's rows stay: weights shrink, products have more rows a group, and rows travel."""
    costs = {ep: price(work(ep), ep) for ep in (1, 2, 4)}
    experts = [sum(use.bytes for use in costs[ep].parameters if use.by_expert) for ep in (2, 4)]
    assert experts[0] == 2 * experts[1] > 0
    dense = [costs[ep].parameter_bytes - experts[ep // 2 - 1] for ep in (2, 4)]
    assert dense[0] == dense[1]
    assert costs[1].tp_forward_s == 0 < costs[2].tp_forward_s < costs[4].tp_forward_s
    assert costs[4].forward_s < costs[2].forward_s
    table = work(2).table
    grouped = np.concatenate([rows for group, rows in table.groups if group.kind == "grouped_gemm"])
    flops = [sum(work(ep).table.amount("flops")[grouped]) for ep in (2, 4)]
    assert flops[0] == pytest.approx(flops[1])


def test_the_busiest_rank_sets_the_pace() -> None:
    """Uneven routing: one rank gets more rows, for the same model FLOPs."""
    even, uneven = price(work(2), 2), price(work(2, 1.5), 2)
    assert uneven.forward_s > even.forward_s and uneven.backward_s > even.backward_s
    assert uneven.saved_bytes["none"] > even.saved_bytes["none"]
    assert uneven.output_bytes == even.output_bytes
