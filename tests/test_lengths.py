"""Batches of several sizes under one plan: each compiled once, one set of parameters, as in one process."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from run_fixture import HandPlans

from autoplan.capture import capture_model, load_model_source
from autoplan.errors import BadInputError, BadPlanError
from autoplan.runtime.forked import run_ranks
from autoplan.runtime.lengths import further_programs, serving
from autoplan.runtime.parallel import ParallelModel
from autoplan.runtime.prepare import trace_and_prepare
from autoplan.runtime.ranks import join_ranks

MODEL = Path(__file__).parent / "models" / "odd_gpt.py"
SIZES = ((8, 8), (8, 12), (4, 16), (8, 8), (16, 12))  # rows, tokens
PLANS: dict[str, dict[str, Any]] = {
    "pieces with tokens cut, stages": {"tp": 2, "sp": True, "pp": 2},
    "stages of a rank, ring": {"cp": 2, "cp_kind": "ring", "pp": 2, "vpp": 2, "schedule": "interleaved_1f1b"},
    "replicas, ZeRO-1": {"dp": 2, "zero": 1, "recompute": ("full",)},
}


@pytest.fixture(scope="module")
def plans() -> HandPlans:
    return HandPlans(capture_model(MODEL, dtype="fp64"), "odd")


def batch_of(rows: int, tokens: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows * tokens)
    given, labels = torch.randint(51, (2, rows, tokens), generator=generator)
    return {"tokens": given, "labels": labels}


BATCHES = [batch_of(*size) for size in SIZES]


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    return load_model_source(MODEL).build().double()


def train_alone(model: torch.nn.Module) -> tuple[list[float], dict[str, torch.Tensor]]:
    own = copy.deepcopy(model)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    losses: list[float] = []
    for batch in BATCHES:
        optimizer.zero_grad()
        loss = own(**batch)
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
    return losses, own.state_dict()


@pytest.mark.parametrize("name", PLANS)
def test_training_over_sizes_equals_one_process(name: str, plans: HandPlans) -> None:
    """A second graph with parameters of its own would train two models; token sections have new lengths."""
    model, plan = build(), plans.plan(**PLANS[name])
    losses, state = train_alone(model)
    program = trace_and_prepare(model, plan, example_inputs=BATCHES[0])
    others = further_programs(model, plan, program, BATCHES)
    assert len(others) == 3 and [p.part.micro_batch for p in others] == [2, 1, 4]

    def body(_rank: int) -> tuple[list[float], dict[str, torch.Tensor]]:
        parallel = ParallelModel(program, model, join_ranks(program.part.mesh), others=others)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
        found: list[float] = []
        for batch in BATCHES:
            optimizer.zero_grad()
            found.append(float(parallel.step(batch)))
            optimizer.step()
        return found, parallel.state_dict()

    found, trained = run_ranks(plan.workload.devices, body, timeout_s=60)[0]
    assert found == pytest.approx(losses, rel=1e-9)
    for key, value in state.items():
        torch.testing.assert_close(trained[key], value, rtol=1e-9, atol=1e-12, msg=key)


def test_other_sizes_are_refused_with_those_served(plans: HandPlans) -> None:
    model, plan = build(), plans.plan(dp=2)
    program = trace_and_prepare(model, plan, example_inputs=BATCHES[0])
    others = further_programs(model, plan, program, BATCHES[:2])
    with pytest.raises(BadInputError, match=r"Served are .*tokens \[8, 8\], .*; tokens \[8, 12\]"):
        serving([program, *others], batch_of(8, 10))
    with pytest.raises(BadInputError, match="multiple of 4 rows"):
        further_programs(model, plan, program, [batch_of(6, 8)])
    sharded = replace(program, part=plans.plan(dp=2, zero=3).parts[0])
    with pytest.raises(BadPlanError, match="zero=1"):
        further_programs(model, plan, sharded, BATCHES)
