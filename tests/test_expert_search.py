"""The search over expert-parallel degrees: what is legal, what it keeps and sends, and its bound."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
from captured_models import small_capture
from cost_fixture import profile

from autoplan.errors import BadInputError
from autoplan.plan import Mesh
from autoplan.planner.expert_space import with_experts
from autoplan.planner.model_costs import ModelCosts
from autoplan.planner.space import Candidate, Inside, Pins, parse_pins
from autoplan_cost_models import CostModel


@cache
def costs() -> ModelCosts:
    return ModelCosts(small_capture("deepseek_v3"), CostModel(profile(), "fp32"), lambda _: None)


def test_degrees_divide_experts_and_replicas() -> None:
    """Experts that do not divide leave ranks without any; a degree above dp has no ranks to send to."""
    assert costs().expert_degrees == [1, 2, 4, 8]
    found = [Candidate(Mesh(dp=dp, tp=tp), 1, 8, 0) for dp, tp in ((1, 1), (2, 1), (6, 1), (16, 2))]
    made = with_experts(found, costs().expert_degrees, Pins(), 8)
    degrees = [(1, 1), (2, 1), (2, 2), (6, 1), (6, 2), (16, 1), (16, 4), (16, 8)]
    assert [(c.mesh.dp, c.mesh.ep) for c in made] == degrees
    assert [c.mesh.ep for c in with_experts(found, [1, 2, 4, 8], parse_pins(["ep=2"]), 8)] == [2, 2, 2]
    with pytest.raises(BadInputError, match=r"ep=4: .*\(1, 2, 4, 8\).*\(1, 2, 6\)"):
        with_experts(found[:3], [1, 2, 4, 8], Pins(ep=4), 8)


def test_a_model_without_experts_has_one_degree() -> None:
    """A pin that would change nothing is refused, not ignored."""
    plain = ModelCosts(small_capture("llama3_8b"), CostModel(profile(), "fp32"), lambda _: None)
    assert plain.expert_degrees == [1]
    with pytest.raises(BadInputError, match="ep=2"):
        with_experts([Candidate(Mesh(dp=2), 1, 8, 0)], plain.expert_degrees, Pins(ep=2), 8)


@pytest.mark.parametrize("tp", [1, 2])
def test_layouts_at_every_degree(tp: int) -> None:
    """A degree between two is priced from them, but runs a layout of its own size; dense blocks have one."""
    held: list[float] = []
    for ep in costs().expert_degrees:
        inside = Inside(tp=tp, ep=ep)
        layouts = costs().layouts(inside, 2)
        blocks = [layout for layout in layouts.values() if layout.on("ep").size > 1]
        assert {layout.on("ep").size for layout in blocks} == ({ep} if ep > 1 else set())
        assert all(layout.collectives_forward["all_to_all"] == 3 for layout in blocks)
        everything = [costs().cost(region.class_id, inside, 2) for region in costs().regions]
        held.append(sum(cost.held(by_expert=True)[0] for cost in everything))
        assert dataclasses.replace(inside, ep=1) == inside or any(c.tp_forward_s > 0 for c in everything)
    assert held[0] == 0 < held[3]
    assert held[1] == 2 * held[2] == 4 * held[3]
