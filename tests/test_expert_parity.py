"""Expert-parallel runs equal one process, in fp64: gradients to 1e-9, whatever the routing."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from run_fixture import HandPlans
from torch.utils._python_dispatch import TorchDispatchMode

from autoplan.capture import capture_model, load_model_source
from autoplan.runtime.check import Checker
from autoplan.runtime.exact import eager_exactly
from autoplan.runtime.forked import run_ranks
from autoplan.runtime.parallel import ParallelModel
from autoplan.runtime.prepare import RunProgram, trace_and_prepare
from autoplan.runtime.ranks import join_ranks

MODELS = Path(__file__).parent / "models"
CASES: dict[str, dict[str, Any]] = {
    "ep2": {"dp": 2, "ep": 2},
    "ep2 of dp4": {"dp": 4, "ep": 2, "micro_batch": 1},
    "ep4": {"dp": 4, "ep": 4, "micro_batch": 1},
    "expert tp": {"dp": 2, "ep": 2, "tp": 2},
    "on stages": {"pp": 2, "dp": 2, "ep": 2},
    "recomputed": {"dp": 2, "ep": 2, "recompute": ("full", "selective")},
    "ZeRO-1": {"dp": 4, "ep": 2, "zero": 1, "micro_batch": 1},
    "ZeRO-1 of no copies": {"dp": 2, "ep": 2, "zero": 1},
    "ZeRO-2": {"dp": 4, "ep": 2, "zero": 2, "micro_batch": 1},
    "ZeRO-3": {"dp": 4, "ep": 2, "zero": 3, "micro_batch": 1, "recompute": ("full",)},
    "ZeRO-3 of no copies": {"dp": 2, "ep": 2, "zero": 3},
    "tokens of a sample on several ranks": {"dp": 2, "ep": 2, "cp": 2},
    "tokens shared on tp": {"dp": 2, "ep": 2, "tp": 2, "sp": True},
    "all": {"pp": 2, "dp": 2, "ep": 2, "tp": 2, "recompute": ("none", "full")},
}


@cache
def setting(model: str) -> tuple[HandPlans, Checker]:
    path = MODELS / f"{model}.py"
    plans = HandPlans(capture_model(path, dtype="fp64"), model)
    return plans, Checker(load_model_source(path), plans.plan(), timeout_s=60)


def assert_parity(model: str, degrees: Mapping[str, Any]) -> None:
    plans, checker = setting(model)
    result = checker.check(plans.plan(**degrees))
    assert result.ok, f"{result.layout} {result.recompute}: {result}"
    assert result.dtype == "fp64", result.notes


LATENT = ("ep2", "expert tp", "on stages", "ZeRO-3", "all")


@pytest.mark.parametrize(
    ("model", "case"),
    [*(("tiny_mixtral", case) for case in CASES), *(("tiny_deepseek", case) for case in LATENT)],
)
def test_expert_parallel_equals_one_process(model: str, case: str) -> None:
    """Expert gradients were twice too large with two expert-parallel ranks; Adam hides it."""
    assert_parity(model, CASES[case])


STEPS, SAMPLES, FORCE = 20, 8, 100.0
EARLY, LATE = torch.tensor([FORCE, FORCE, 0, 0]), torch.tensor([0, 0, FORCE, FORCE])


def forced_batch(step: int) -> dict[str, torch.Tensor]:
    """Every rank's tokens to experts of its own, then all to the first two, then all to the last two."""
    generator = torch.Generator().manual_seed(step)
    late = torch.arange(SAMPLES) >= (SAMPLES // 2, SAMPLES, 0)[step % 3]
    given = {"x": (SAMPLES, 6, 16), "target": (SAMPLES, 6, 8)}
    made = {
        name: torch.rand(shape, dtype=torch.float64, generator=generator) for name, shape in given.items()
    }
    return {**made, "forced": torch.where(late[:, None], LATE, EARLY).double()}


class Sent(TorchDispatchMode):
    """The collectives that this process issues, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@cache
def forced() -> tuple[torch.nn.Module, HandPlans]:
    path = MODELS / "forced_experts.py"
    torch.manual_seed(0)
    model = load_model_source(path).build().double()
    return model, HandPlans(capture_model(path, dtype="fp64"), "forced_experts", global_batch=SAMPLES)


def program_of(degrees: Mapping[str, Any]) -> RunProgram:
    model, plans = forced()
    return trace_and_prepare(model, plans.plan(**degrees), example_inputs=forced_batch(0))


def trained_alone() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and the state after all steps of plain SGD in one process."""

    def body(rank: int) -> tuple[list[float], dict[str, torch.Tensor]]:
        model, losses = forced()[0], list[float]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(STEPS):
            optimizer.zero_grad()
            with eager_exactly(model, torch.float64):
                loss = model(**forced_batch(step))
            loss.backward()
            losses.append(float(loss.detach()))
            optimizer.step()
        return losses, {name: value.detach() for name, value in model.state_dict().items()}

    return run_ranks(1, body)[0]


FORCED = [
    {"dp": 2, "ep": 2},
    {"dp": 2, "ep": 2, "recompute": ("full", "selective")},
    {"dp": 4, "ep": 2, "zero": 3, "micro_batch": 1},
    {"pp": 2, "dp": 2, "ep": 2, "micro_batch": 1},
]


@pytest.mark.parametrize("degrees", FORCED, ids=str)
def test_any_routing_trains_alike(degrees: dict[str, Any]) -> None:
    """A rank that activated other experts than its peers once waited for collectives that never came."""
    program = program_of(degrees)

    def body(rank: int) -> tuple[list[float], dict[str, torch.Tensor], list[str]]:
        parallel = ParallelModel(program, forced()[0], join_ranks(program.part.mesh))
        optimizer, losses = torch.optim.SGD(parallel.parameters(), lr=0.1), list[float]()
        with Sent() as sent:
            for step in range(STEPS):
                optimizer.zero_grad()
                losses.append(float(parallel.step(forced_batch(step))))
                assert all(parameter.grad is not None for parameter in parallel.parameters())
                optimizer.step()
        return losses, parallel.state_dict(), sent.names

    ranks = run_ranks(program.part.mesh.devices, body, timeout_s=60)
    losses, state = trained_alone()
    assert ranks[0][0] == pytest.approx(losses, rel=1e-9)
    for name, value in state.items():
        torch.testing.assert_close(ranks[0][1][name], value, rtol=1e-9, atol=1e-12)
    peers = program.part.mesh.dp * program.part.mesh.tp
    for rank, (_, _, sent) in enumerate(ranks):
        assert sent == ranks[rank // peers * peers][2]
        assert any("all_to_all" in name for name in sent)


@pytest.mark.parametrize("zero", range(4))
def test_expert_gradients_add_up_over_steps(zero: int) -> None:
    """Gradients kept from an earlier step were divided by the expert-parallel ranks once more."""
    program = program_of({"dp": 4, "ep": 2, "zero": zero, "micro_batch": 1})

    def body(rank: int) -> float:
        parallel = ParallelModel(program, forced()[0], join_ranks(program.part.mesh))
        parallel.step(forced_batch(0))
        once = parallel.gradients()
        parallel.step(forced_batch(0))
        twice = parallel.gradients()
        return max(float((twice[n] - 2 * once[n]).abs().max() / once[n].abs().max()) for n in once)

    assert max(run_ranks(4, body)) < 1e-12


def test_unused_experts_get_zero_gradients() -> None:
    """An expert without a token once had no gradient at all, and an optimizer skipped its momentum."""
    program = program_of({"dp": 2, "ep": 2})

    def body(rank: int) -> dict[str, torch.Tensor]:
        parallel = ParallelModel(program, forced()[0], join_ranks(program.part.mesh))
        parallel.step(forced_batch(1))
        assert all(parameter.grad is not None for parameter in parallel.parameters())
        return parallel.gradients()

    for name, gradient in run_ranks(2, body)[0].items():
        if name.endswith((".up", ".down")):
            assert gradient[:2].flatten(1).any(1).all() and not gradient[2:].any(), name
