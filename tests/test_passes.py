"""What every pass leaves: a graph that lints, runs and prints, and stage code that torch can compile."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from run_fixture import HandPlans
from torch import fx
from torch._dynamo.utils import counters

from autoplan.capture import capture_model, load_model_source
from autoplan.plan import Mesh
from autoplan.runtime.check import Checker
from autoplan.runtime.forked import run_ranks
from autoplan.runtime.issued import dry_mesh
from autoplan.runtime.local_graphs import local_graph
from autoplan.runtime.parallel import ParallelModel
from autoplan.runtime.ranks import join_ranks
from autoplan_passes.shard import AxisStep
from autoplan_passes.split_backward import defer_weight_gradients
from autoplan_passes.stages import split_stages

MODEL = Path(__file__).parent / "models" / "tiny_gpt.py"
MESHES: dict[str, dict[str, Any]] = {
    "one rank": {},
    "tp": {"tp": 2},
    "sequence parallel": {"tp": 2, "sp": True},
}


@pytest.fixture(scope="module")
def made() -> tuple[HandPlans, Checker]:
    plans = HandPlans(capture_model(MODEL, dtype="fp64"), "gpt")
    return plans, Checker(load_model_source(MODEL), plans.plan())


@pytest.mark.parametrize("name", MESHES)
def test_graphs_lint_run_and_print(name: str, made: tuple[HandPlans, Checker]) -> None:
    """A graph that no one can run or read between two passes hides which of them broke it."""
    plans, checker = made
    plan = plans.plan(**MESHES[name])
    part = plan.parts[0]
    capture, regions = checker.traced(part.micro_batch)
    (program,) = split_stages(capture, regions, part)
    for call in {call.graph_key: call for call in program.calls}.values():
        steps: list[AxisStep] = []
        local = local_graph(capture, call, plan, checker.passes, steps)
        assert steps[-1].local is local
        for graph in [*(step.whole for step in steps), local, defer_weight_gradients(local)]:
            assert_sound(graph, part.mesh)


def assert_sound(graph: fx.GraphModule, mesh: Mesh) -> None:
    """It lints, prints as Python, and what is printed gives what its nodes say, on fake tensors."""
    graph.graph.lint()
    graph.recompile()
    compile(graph.code, "the graph as printed", "exec")
    values = [n.meta["val"] for n in graph.graph.nodes if n.op == "placeholder"]
    with dry_mesh(graph, mesh):
        outputs = graph(*values)
    wanted = [n.meta["val"].shape for n in graph.graph.output_node().all_input_nodes]
    assert [value.shape for value in outputs] == wanted


@dataclass
class Step:
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    graphs: int


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by dynamo
def test_compiled_stages_give_the_same_numbers(made: tuple[HandPlans, Checker]) -> None:
    """A stage with its collectives, through ``torch.compile(backend="aot_eager")``: not one bit differs."""
    plans, checker = made
    program = checker.prepare(plans.plan(tp=2, micro_batch=8))

    def body(compiled: bool, rank: int) -> Step:
        torch.set_default_dtype(torch.float64)
        parallel = ParallelModel(program, checker.model, join_ranks(program.part.mesh))
        for stage in parallel.stages.values():
            if compiled:
                stage.compile(backend="aot_eager")
        loss = parallel.step(checker.batch)
        return Step(loss, parallel.gradients(), counters["stats"]["unique_graphs"])

    plain = run_ranks(2, lambda rank: body(False, rank))
    compiled = run_ranks(2, lambda rank: body(True, rank))
    for one, other in zip(plain, compiled):
        assert other.graphs >= 1
        assert torch.equal(one.loss, other.loss)
        assert all(torch.equal(gradient, other.gradients[name]) for name, gradient in one.gradients.items())
