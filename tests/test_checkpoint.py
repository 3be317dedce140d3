"""A run saved under one plan goes on under another as if nothing had happened; plain torch reads it."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from run_fixture import HandPlans

from autoplan.capture import capture_model, load_model_source
from autoplan.runtime import parallel
from autoplan.runtime.check import Checker
from autoplan.runtime.exact import eager_exactly, without_dropout
from autoplan.runtime.forked import RankError, run_ranks
from autoplan.runtime.parallel import ParallelModel
from autoplan.runtime.prepare import RunProgram, trace_and_prepare
from autoplan.runtime.ranks import join_ranks
from autoplan_codegen.script import rewrite_script
from autoplan_codegen.script_checkpoints import Kept

MODELS = Path(__file__).parent / "models"


@dataclass
class Setting:
    plans: HandPlans
    checker: Checker

    @property
    def model(self) -> torch.nn.Module:
        return self.checker.model

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1000 + step)
            return dict(load_model_source(self.plans.capture.source).example_inputs(8))

    def program(self, **degrees: Any) -> RunProgram:
        return self.checker.prepare(self.plans.plan(**degrees))


@cache
def setting(name: str) -> Setting:
    path = MODELS / f"{name}.py"
    plans = HandPlans(capture_model(path, dtype="fp64"), name)
    return Setting(plans, Checker(load_model_source(path), plans.plan()))


def make_optimizer(parameters: Any) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)


def leg(where: Setting, program: RunProgram, start: Path | None, end: Path, steps: int = 1) -> list[float]:
    """Resume, train on the data that comes next, save: the losses."""

    def body(rank: int) -> list[float]:
        model = copy.deepcopy(where.model)
        if start is not None:  # other weights everywhere, so that only what is read can be right
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(0.5)
        parallel = ParallelModel(program, model, join_ranks(program.part.mesh))
        optimizer, scheduler = make_optimizer(parallel.parameters())
        if start is not None:
            assert parallel.load(start, optimizer, scheduler) == {"note": str(start)}
        losses = list[float]()
        for _ in range(steps):
            losses.append(float(parallel.step(where.batch(parallel.steps_taken))))
            parallel.clip_grad_norm_(0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        parallel.save(end, optimizer, scheduler, extra={"note": str(end)})
        return losses

    return run_ranks(program.part.mesh.devices, body)[0]


def alone(where: Setting, steps: int) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    """The plain loop on one process: losses, weights, the optimizer's state."""
    model = copy.deepcopy(where.model)
    optimizer, scheduler = make_optimizer(model.parameters())
    losses = list[float]()
    for step in range(steps):
        with eager_exactly(model, torch.float64):
            outputs = model(**where.batch(step))
        loss = outputs if isinstance(outputs, torch.Tensor) else outputs.loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    moments = {name: optimizer.state[p] for name, p in model.named_parameters()}
    return losses, model.state_dict(), moments


CHAINS: dict[str, list[dict[str, Any]]] = {
    "tiny_mixtral": [
        {"tp": 2},
        {"pp": 2},
        {"dp": 4, "zero": 3, "micro_batch": 1},
        {"cp": 2},
        {"dp": 2, "ep": 2, "zero": 1},
        {},
    ],
    "odd_gpt": [  # a table of 51 rows tied to the head: padded for tp, on two stages, cut by ZeRO, by groups
        {"pp": 2, "tp": 2},
        {"dp": 4, "zero": 1, "micro_batch": 1},
        {"tp": 2, "dp": 2, "zero": 3},
        {"dp": 4, "zero": 2, "zero_shard": 2, "micro_batch": 1},
        {"pp": 2, "vpp": 2, "schedule": "interleaved_1f1b"},
    ],
}


@pytest.mark.parametrize("name", CHAINS)
def test_runs_go_on_under_any_plan(name: str, tmp_path: Path) -> None:
    where, chain = setting(name), CHAINS[name]
    expected, weights, moments = alone(where, len(chain))
    losses, start = list[float](), None
    for number, degrees in enumerate(chain):
        end = tmp_path / str(number)
        losses += leg(where, where.program(**degrees), start, end)
        start = end
    assert losses == pytest.approx(expected, rel=1e-9)
    assert start is not None
    assert_plain_torch_reads(start, weights, moments)


def assert_plain_torch_reads(path: Path, weights: dict[str, torch.Tensor], moments: Any) -> None:
    """Names and shapes are those of the user's model; a tied weight is there once."""
    stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    names = {name.removeprefix("model.") for name in stored if name.startswith("model.")}
    assert moments.keys() <= names <= weights.keys()
    assert not [name for name in names - moments.keys() if isinstance(weights[name], torch.nn.Parameter)]
    wanted = {f"model.{name}": torch.empty_like(weights[name]) for name in names}
    for name, state in moments.items():
        for key, value in state.items():
            wanted[f"optimizer.state.{name}.{key}"] = torch.empty_like(value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "assuming the intent is to load in a single process"
        dcp.load(wanted, checkpoint_id=path)
    for name in names:
        torch.testing.assert_close(wanted[f"model.{name}"], weights[name], rtol=1e-7, atol=1e-9)
    for name, state in moments.items():
        for key, value in state.items():
            found = wanted[f"optimizer.state.{name}.{key}"]
            torch.testing.assert_close(found, value, rtol=1e-6, atol=1e-9, msg=f"{name} {key}")


SCRIPT = """
import torch
from tiny_gpt import build_model, example_inputs
torch.manual_seed(0)
model = build_model().double()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
losses = []
for epoch in range(2):
    for _ in range(4):
        batch = example_inputs(8)
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    scheduler.step()
"""


def test_an_applied_script_resumes_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data drawn as it goes, a schedule by epoch: both were repeated or skipped by a resumed run."""
    where = setting("tiny_gpt")
    monkeypatch.syspath_prepend(str(MODELS))

    def train(number: int, degrees: dict[str, Any], kept: Kept) -> list[float]:
        plan, program = tmp_path / f"{number}.yaml", where.program(**degrees)
        program.plan.save(plan)
        text = rewrite_script(SCRIPT, name="train.py", plan_path=str(plan), kept=kept).text

        def body(rank: int) -> list[float]:
            vars(parallel)["trace_and_prepare"] = lambda *_, **__: program  # without dropout
            ran: dict[str, Any] = {}
            exec(compile(text, "train_autoplan.py", "exec"), ran)
            return ran["losses"]

        return run_ranks(program.part.mesh.devices, body)[0]

    runs = tmp_path / "runs"
    whole = train(0, {"pp": 2}, Kept(save=str(runs), every=3, resume=str(runs)))
    assert sorted(path.name for path in runs.iterdir()) == [f"step_0000000{n}" for n in (3, 6, 8)]
    for step, degrees in ((3, {"dp": 2, "zero": 3}), (6, {})):
        rest = train(step, degrees, Kept(resume=str(runs / f"step_0000000{step}")))
        assert rest == pytest.approx(whole[step:], rel=1e-9)
    assert train(8, {}, Kept(resume=str(runs))) == []
    with pytest.raises(RankError, match="nothing to resume"):
        train(9, {}, Kept(resume=str(tmp_path)))


def test_fp32_masters_are_what_is_saved(tmp_path: Path) -> None:
    """Rounded weights in a checkpoint would make a resumed bf16 run another one."""
    where = setting("tiny_gpt")
    plan = where.plans.plan(dp=2, zero=1)
    plan = replace(plan, workload=replace(plan.workload, dtype="bf16"))
    model = load_model_source(MODELS / "tiny_gpt.py").build()
    batch = where.batch(0)
    program = trace_and_prepare(model, plan, example_inputs=batch, passes=(without_dropout,))
    mixed = Setting(where.plans, cast(Any, SimpleNamespace(model=model)))
    whole = leg(mixed, program, None, tmp_path / "whole", steps=3)
    first = leg(mixed, program, None, tmp_path / "first")
    rest = leg(mixed, program, tmp_path / "first", tmp_path / "rest", steps=2)
    assert first + rest == whole
    stored = dcp.FileSystemReader(tmp_path / "rest").read_metadata().state_dict_metadata
    assert cast(Any, stored["model.embedding.weight"]).properties.dtype == torch.float32


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    """A checkpoint of another model, none at all, or one without an optimizer."""
    where, other = setting("tiny_gpt"), setting("tiny_mixtral")
    small = where.program()

    def save(rank: int) -> None:
        parallel = ParallelModel(small, where.model, join_ranks(small.part.mesh))
        parallel.save(tmp_path / "plain")

    run_ranks(1, save)

    def factored(rank: int) -> None:
        parallel = ParallelModel(small, where.model, join_ranks(small.part.mesh))
        optimizer = torch.optim.Adafactor(parallel.parameters())
        parallel.step(where.batch(0))
        optimizer.step()
        parallel.save(tmp_path / "factored", optimizer)

    with pytest.raises(RankError, match="cannot be cut another way"):
        run_ranks(1, factored)
    theirs = other.program()

    def load(path: Path, program: RunProgram, model: torch.nn.Module, with_optimizer: bool) -> Any:
        def body(rank: int) -> None:
            parallel = ParallelModel(program, model, join_ranks(program.part.mesh))
            optimizer = make_optimizer(parallel.parameters())[0] if with_optimizer else None
            parallel.load(path, optimizer)

        return run_ranks(1, body)

    load(tmp_path / "plain", small, where.model, False)
    with pytest.raises(RankError, match="saved without"):
        load(tmp_path / "plain", small, where.model, True)
    with pytest.raises(RankError, match="another model"):
        load(tmp_path / "plain", theirs, other.model, False)
    with pytest.raises(RankError, match="is no checkpoint"):
        load(tmp_path, small, where.model, False)
