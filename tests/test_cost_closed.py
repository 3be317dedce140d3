"""Closed-form step times against the events, and what frameworks do their own way against plain counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cost_fixture import profile, quantity, region_graph_of
from torch import nn
from torch.nn import functional as F

from autoplan_cost_models.closed_form import steps_s
from autoplan_cost_models.compute import Speeds
from autoplan_cost_models.execution import Execution
from autoplan_cost_models.operations import operations
from autoplan_cost_models.schedule import simulate

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (4, 2), (4, 8), (8, 64)])
def test_closed_form_is_never_above_the_events_and_exact_for_equal_stages(
    stages: int, microbatches: int
) -> None:
    chance = np.random.default_rng(0)
    forward, backward = chance.uniform(0.5, 1.5, (2, 16, stages))
    forward[0], backward[0] = 1.0, 2.0
    told = steps_s("1f1b", forward, backward, microbatches, once_s=0.5)
    for plan, step_s in enumerate(told):
        events = simulate("1f1b", list(forward[plan]), list(backward[plan]), microbatches).makespan_s + 0.5
        assert step_s <= events * (1 + 1e-9)
        assert step_s == pytest.approx(events, rel=1e-9 if plan == 0 else 0.25)


def test_a_step_waits_for_the_slowest_device() -> None:
    """Expected largest of n standard normal values: 1.42 for 8 (tables), times the variation."""
    speeds = Speeds(profile(variation=quantity(0.015)))
    assert speeds.slowest_of(1) == 1.0
    assert speeds.slowest_of(8) == pytest.approx(1 + 0.015 * 1.42, abs=5e-4)


def test_sustained_rates_slow_products_and_nothing_else() -> None:
    whole, half = Speeds(profile()), Speeds(profile(sustained={"bf16": quantity(0.5)}))
    size = np.array([4096.0])
    assert half.product_rate("bf16", size, size, size) == whole.product_rate("bf16", size, size, size) / 2
    assert half.pass_seconds(1e9) == whole.pass_seconds(1e9)


class Chain(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.silu(x) * y + x


def test_a_fused_chain_reads_its_inputs_and_writes_its_output_once() -> None:
    """Three tensors of 4 x 6 floats forward: 288 bytes; eager runs three ops of their own."""
    graph = region_graph_of(Chain(), torch.randn(4, 6), torch.randn(4, 6))
    eager = operations(graph)
    fused = operations(graph, Execution(fuses_pointwise=True))
    assert sum(op.forward_bytes for op in fused) == 3 * 96
    assert sum(op.forward_bytes for op in eager) == (2 + 3 + 3) * 96
    assert sum(op.backward_bytes for op in fused) < sum(op.backward_bytes for op in eager)


def test_linear_layers_of_one_input_add_up_one_gradient_where_they_are_fused() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.q(x), self.k(x)

    graph = region_graph_of(Both(), torch.randn(4, 6))
    assert operations(graph)[-1].backward_bytes == 3 * 96
    assert operations(graph, Execution(fuses_pointwise=True))[-1].backward_bytes == 0


def test_linear_layers_multiply_in_another_dtype_but_for_the_output_layer() -> None:
    eight = Execution(linear_dtype="fp8")
    (linear, *_) = operations(region_graph_of(nn.Linear(6, 6), torch.randn(4, 6)), eight)
    assert {kernel.dtype for kernel in linear.forward} == {"fp8"}

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.out(x), torch.zeros(4, dtype=torch.long))

    (linear, *_) = operations(region_graph_of(Head(), torch.randn(4, 6)), eight)
    assert {kernel.dtype for kernel in linear.forward} == {"fp32"}
