"""Training with a ParallelModel: optimizer steps, clipping, state, and the errors a user can meet."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from run_fixture import HandPlans

from autoplan.capture import capture_model, load_model_source
from autoplan.errors import BadInputError, BadPlanError
from autoplan.plan import AxisLayout, Mesh, Stage
from autoplan.plan_file import check_plan
from autoplan.runtime import parallelize
from autoplan.runtime.exact import eager_exactly, without_dropout
from autoplan.runtime.forked import RankError, run_ranks
from autoplan.runtime.parallel import ParallelModel
from autoplan.runtime.prepare import first_samples, trace_and_prepare
from autoplan.runtime.ranks import join_ranks
from autoplan.runtime.shrink import shrink
from autoplan.runtime.weights import local_of

MODEL = Path(__file__).parent / "models" / "tiny_gpt.py"
STEPS, MAX_NORM = 5, 0.1


@dataclass
class Setting:
    plans: HandPlans
    model: torch.nn.Module
    batches: list[dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def setting() -> Setting:
    torch.set_num_threads(1)
    source = load_model_source(MODEL)
    torch.manual_seed(0)
    model = source.build().double()
    batches = [dict(source.example_inputs(8)) for _ in range(STEPS)]
    return Setting(HandPlans(capture_model(MODEL, dtype="fp64"), "tiny_gpt"), model, batches)


@dataclass
class Trained:
    losses: list[float]
    norms: list[float]
    state: dict[str, torch.Tensor]
    tied_copies_differ: float = 0.0


def train_alone(setting: Setting, make_optimizer: Any) -> Trained:
    """The plain loop, in one process."""

    def body(rank: int) -> Trained:
        model = copy.deepcopy(setting.model)
        optimizer = make_optimizer(model.parameters())
        trained = Trained([], [], {})
        for batch in setting.batches:
            optimizer.zero_grad()
            with eager_exactly(model, torch.float64):
                loss = model(**batch)
            loss.backward()
            trained.losses.append(float(loss.detach()))
            trained.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
            optimizer.step()
        trained.state = {name: value.clone() for name, value in model.state_dict().items()}
        return trained

    return run_ranks(1, body)[0]


def train_parallel(setting: Setting, make_optimizer: Any, degrees: dict[str, Any]) -> Trained:
    """The same loop around ``ParallelModel.step``."""
    plan = setting.plans.plan(**degrees)
    program = trace_and_prepare(
        setting.model, plan, example_inputs=setting.batches[0], passes=(without_dropout,)
    )

    def body(rank: int) -> Trained:
        parallel = ParallelModel(program, setting.model, join_ranks(program.part.mesh))
        optimizer = make_optimizer(parallel.parameters())
        trained = Trained([], [], {})
        for batch in setting.batches:
            optimizer.zero_grad()
            trained.losses.append(float(parallel.step(batch)))
            trained.norms.append(float(parallel.clip_grad_norm_(MAX_NORM)))
            optimizer.step()
        trained.state = parallel.state_dict()
        trained.tied_copies_differ = _tied_difference(parallel)
        parallel.load_state_dict(setting.model.state_dict())
        assert all(torch.equal(v, setting.model.state_dict()[k]) for k, v in parallel.state_dict().items())
        return trained

    return run_ranks(program.part.mesh.devices, body)[0]


def _tied_difference(parallel: ParallelModel) -> float:
    """How far the copies of the tied table on first and last stage are from each other."""
    if parallel.ranks.shape.pp == 1:
        return 0.0
    own = dict(parallel.named_parameters()).get("embedding.weight")
    group = parallel.ranks.group("pp")
    pieces: list[Any] = [None] * parallel.ranks.shape.pp
    dist.all_gather_object(pieces, None if own is None else local_of(own.detach()), group=group)
    copies = [piece for piece in pieces if piece is not None]
    assert len(copies) == 2
    return float((copies[0] - copies[1]).abs().max())


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}
LAYOUTS = [
    {"pp": 2, "tp": 2},
    {"dp": 2, "tp": 2},
    {"pp": 2, "dp": 2, "zero": 3},
    {"pp": 2, "dp": 2, "zero": 2},
    {"pp": 2, "dp": 2, "zero": 1},
    {"dp": 2, "tp": 2, "zero": 1},
    {"dp": 4, "zero": 1, "zero_shard": 2},
    {"dp": 4, "zero": 2, "zero_shard": 2, "micro_batch": 1},
    {"dp": 4, "zero": 3, "zero_shard": 2, "micro_batch": 1},
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_equals_one_process(setting: Setting, optimizer: str) -> None:
    """Clipping by one stage's norm, tied copies that drift, a state that cannot be loaded: all were real."""
    make = OPTIMIZERS[optimizer]
    alone = train_alone(setting, make)
    for degrees in LAYOUTS if optimizer == "sgd" else LAYOUTS[2:5]:
        trained = train_parallel(setting, make, degrees)
        assert trained.losses == pytest.approx(alone.losses, rel=1e-9), degrees
        assert trained.norms == pytest.approx(alone.norms, rel=1e-9), degrees
        assert trained.tied_copies_differ == 0.0
        assert trained.state.keys() == alone.state.keys()
        for name, value in alone.state.items():
            assert torch.allclose(trained.state[name], value, rtol=1e-7, atol=1e-9), (degrees, name)


@pytest.mark.parametrize(
    "degrees",
    [
        {},
        *({"dp": 2, "zero": zero} for zero in range(4)),
        *({"dp": 2, "tp": 2, "sp": True, "zero": zero} for zero in (0, 1, 3)),
    ],
    ids=str,
)
def test_gradients_add_up_over_steps(setting: Setting, degrees: dict[str, int]) -> None:
    """A second step without zero_grad counted the first one's tied gradient twice, and partial ones."""
    plan = setting.plans.plan(pp=2, **degrees)
    program = trace_and_prepare(
        setting.model, plan, example_inputs=setting.batches[0], passes=(without_dropout,)
    )

    def body(rank: int) -> float:
        parallel = ParallelModel(program, setting.model, join_ranks(program.part.mesh))
        parallel.step(setting.batches[0])
        once = parallel.gradients()
        parallel.step(setting.batches[0])
        twice = parallel.gradients()
        return max(float((twice[name] - 2 * once[name]).abs().max()) for name in once)

    assert max(run_ranks(program.part.mesh.devices, body)) < 1e-12


def test_dropout_is_alike_in_a_tp_group_and_leaves_the_users_generator(setting: Setting) -> None:
    """Ranks that drop other values than their tp neighbours train another model."""
    plan = setting.plans.plan(tp=2)
    program = trace_and_prepare(setting.model, plan, example_inputs=setting.batches[0])

    def body(rank: int) -> tuple[float, float, float]:
        parallel = ParallelModel(program, setting.model, join_ranks(program.part.mesh))
        losses = [float(parallel.step(setting.batches[0])) for _ in range(2)]
        return (*losses, float(torch.rand(())))

    first, second = run_ranks(2, body)
    assert first[:2] == second[:2]
    assert first[0] != first[1]
    assert first[2] == second[2]


@pytest.mark.parametrize("size", [4, 9])
def test_batch_of_another_size_is_refused(setting: Setting, size: int) -> None:
    """A batch the plan was not made for is refused with the sizes that fit."""
    plan = setting.plans.plan()
    batch = dict(load_model_source(MODEL).example_inputs(size))

    def body(rank: int) -> None:
        parallelize(setting.model, plan, example_inputs=setting.batches[0]).step(batch)

    with pytest.raises(RankError, match=r"should have shape \[8, 8\].*got \[" + str(size)):
        run_ranks(1, body)


def test_missing_input_is_named(setting: Setting) -> None:
    """A batch without labels names what is missing."""

    def body(rank: int) -> None:
        parallel = parallelize(setting.model, setting.plans.plan(), example_inputs=setting.batches[0])
        parallel.step({"tokens": setting.batches[0]["tokens"]})

    with pytest.raises(RankError, match="lacks labels"):
        run_ranks(1, body)


def test_unseeded_weights_are_refused(setting: Setting) -> None:
    """Ranks that build other weights train wrongly without a word."""
    program = trace_and_prepare(setting.model, setting.plans.plan(dp=2), example_inputs=setting.batches[0])

    def body(rank: int) -> None:
        torch.manual_seed(rank)
        ParallelModel(program, load_model_source(MODEL).build().double(), join_ranks(program.part.mesh))

    with pytest.raises(RankError, match=r"torch.manual_seed\(0\)"):
        run_ranks(2, body)


def test_alone_is_told_how_to_launch(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan for several ranks started as one process says what to type."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert "RANK" not in os.environ
    with pytest.raises(BadPlanError, match="torchrun --nproc-per-node 4"):
        parallelize(setting.model, setting.plans.plan(pp=2, tp=2), example_inputs=setting.batches[0])


def test_rank_error_holds_its_rank() -> None:
    """A rank's traceback comes with its rank; the others are ended, not waited for."""

    def body(rank: int) -> None:
        if rank == 1:
            raise ValueError("no such luck")
        dist.barrier()

    with pytest.raises(RankError, match=r"rank 1 of 2 failed(.|\n)*no such luck"):
        run_ranks(2, body, timeout_s=20)


def test_hanging_ranks_are_ended() -> None:
    """A collective that not every rank issues ends in an error, not in a hang."""

    def body(rank: int) -> None:
        if rank == 0:
            dist.barrier()

    with pytest.raises(RankError):
        run_ranks(2, body, timeout_s=2)


def test_first_samples_are_copies_of_their_own() -> None:
    """Two inputs that share memory were traced as one input."""
    ids = torch.arange(8).reshape(4, 2)
    cut = first_samples({"ids": ids, "labels": ids, "pixels": torch.zeros(12, 3), "scale": torch.ones(())}, 2)
    assert [tuple(value.shape) for value in cut.values()] == [(2, 2), (2, 2), (6, 3), ()]
    assert cut["ids"].data_ptr() != cut["labels"].data_ptr()
    with pytest.raises(BadInputError, match="at least one micro-batch"):
        first_samples((ids,), 5)


def test_shrink_keeps_the_kind_of_plan(setting: Setting) -> None:
    """A large plan is checked by a small one with the same classes, layouts and axes."""
    small = shrink(setting.plans.plan(pp=2, tp=4, micro_batch=4))
    part = small.plan.parts[0]
    assert (part.mesh.pp, part.mesh.dp, part.mesh.tp) == (2, 1, 2)
    assert small.kept == {"blocks": (0, 1)}
    assert "tp 4" in small.note


@pytest.mark.parametrize("degrees", [{"pp": 2}, *({"dp": 2, "zero": zero} for zero in range(4))], ids=str)
def test_bf16_keeps_fp32_masters(setting: Setting, degrees: dict[str, Any]) -> None:
    """Updates smaller than a bf16 step were lost when the optimizer saw the rounded weights."""
    plan = setting.plans.plan(**degrees)
    plan = replace(plan, workload=replace(plan.workload, dtype="bf16"))
    model = copy.deepcopy(setting.model).float()
    program = trace_and_prepare(model, plan, example_inputs=setting.batches[0], passes=(without_dropout,))

    def body(rank: int) -> tuple[list[float], float]:
        parallel = ParallelModel(program, model, join_ranks(program.part.mesh))
        assert {parameter.dtype for parameter in parallel.parameters()} == {torch.float32}
        start = parallel.state_dict()
        optimizer = torch.optim.SGD(parallel.parameters(), lr=1e-6)
        losses: list[float] = []
        for _ in range(3):
            optimizer.zero_grad()
            losses.append(float(parallel.step(setting.batches[0])))
            optimizer.step()
        moved = [float((value - start[name]).abs().max()) for name, value in parallel.state_dict().items()]
        return losses, min(moved)

    losses, moved = run_ranks(program.part.mesh.devices, body)[0]
    alone = float(model(**setting.batches[0]).detach())
    assert losses[0] == pytest.approx(alone, rel=2e-2)
    assert moved > 0


def test_slices_of_a_longer_text_are_taken(setting: Setting) -> None:
    """tokens[:, :-1] and tokens[:, 1:] are no contiguous tensors; the trace's views failed on them."""
    text = torch.randint(64, (8, 9))
    batch = {"tokens": text[:, :-1], "labels": text[:, 1:]}

    def body(rank: int) -> float:
        return float(parallelize(setting.model, setting.plans.plan(), example_inputs=batch).step(batch))

    assert run_ranks(1, body)[0] > 0


def test_shrink_keeps_what_degrees_divide(setting: Setting) -> None:
    """Experts over 9 ranks (of 27) were shrunk to 2, which cuts no 27; several stages a rank were lost."""
    plan = setting.plans.plan(pp=2, tp=1, micro_batch=4)
    part = plan.parts[0]
    layouts = {
        key: layout.replace_axis("ep", AxisLayout(9)) if i == 0 else layout
        for i, (key, layout) in enumerate(plan.layouts.items())
    }
    wide = replace(part, mesh=Mesh(pp=2, dp=18, tp=1, ep=9), zero=1, zero_shard=6)
    small = shrink(replace(plan, parts=(wide,), layouts=layouts)).plan
    assert (small.parts[0].mesh.ep, small.parts[0].mesh.dp) == (3, 3)
    assert {layout.on("ep").size for layout in small.layouts.values()} == {1, 3}
    check_plan(small)
    stages = tuple(Stage((region,)) for region in [r for s in part.stages for r in s.regions][:4])
    looped = replace(part, vpp=2, schedule="interleaved_1f1b", stages=stages)
    found = shrink(replace(plan, parts=(looped,))).plan.parts[0]
    assert len(found.stages) == found.mesh.pp * found.vpp
