"""The fused operators in plain PyTorch: equal to the unfused model in every dtype, their gradients exact."""

from __future__ import annotations

import sys
from functools import cache

import pytest
import torch
import torch.distributed as dist
from kernel_cases import (
    CASES,
    OPS,
    Inputs,
    assert_adamw_is_torchs,
    assert_equal_within_rounding,
    assert_selects_the_best,
)

from autoplan.runtime.forked import run_ranks
from autoplan_codegen.kernels import OPERATORS, operators, sparse
from autoplan_codegen.kernels import linear_cross_entropy as linear
from autoplan_passes import collectives

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks of a small vocabulary; no Triton."""
    monkeypatch.setattr(linear, "LEAST_CHUNK", 1)
    monkeypatch.setenv("AUTOPLAN_KERNELS", "torch")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_equal_to_the_unfused_model(name: str, dtype: torch.dtype) -> None:
    """Outputs and gradients on odd sizes, strided and empty inputs, against fp64."""
    assert_equal_within_rounding(CASES[name], dtype)


@pytest.mark.parametrize("name", [name for name in CASES if "empty" not in name])
def test_gradient_is_the_derivative(name: str) -> None:
    """gradcheck in fp64: the hand-written backward against finite differences."""
    case = CASES[name]
    inputs = case.inputs(Inputs(torch.float64))
    inputs = tuple(x.detach().requires_grad_(x.requires_grad) if torch.is_tensor(x) else x for x in inputs)

    def checked(*given: object) -> object:
        made = case.operator(*given)
        return made[: case.checked] if case.checked else made

    assert torch.autograd.gradcheck(checked, inputs, fast_mode=True)


@pytest.mark.parametrize("name", CASES)
def test_registered_as_pytorch_expects(name: str) -> None:
    """A fake result has the shape, dtype and strides of a real one; the schema tells what is written."""
    case = CASES[name]
    if not hasattr(case.operator, "default"):
        return
    inputs = case.inputs(Inputs(torch.float32))
    torch.library.opcheck(case.operator.default, inputs, test_utils=("test_schema", "test_faketensor"))


def test_saved_tensors_are_the_inputs() -> None:
    """What a backward keeps is what it says: no statistics, masks or activations besides."""
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x.numel()), x)[1], lambda x: x):
        made = Inputs(torch.float32)
        OPS.rms_norm(made.normal(4, 8), made.normal(8), 1e-6)
        OPS.swiglu(made.normal(4, 8), made.normal(4, 8))
        OPS.cross_entropy(made.normal(4, 8), made.labels(4, 8), -100)
        OPS.linear_cross_entropy(made.normal(4, 8), made.normal(9, 8), None, made.labels(4, 9), -100)
        OPS.rotary(made.normal(4, 8), made.plain(4, 8), made.plain(4, 8))
    assert saved == [32, 8, 32, 32, 32, 4, 4, 32, 72, 4, 4, 32, 32]


def test_gradient_of_rotary_tables() -> None:
    """cos and sin that want a gradient get one: a learned frequency would have stood still."""
    made = Inputs(torch.float64)
    assert torch.autograd.gradcheck(OPS.rotary, (made.normal(2, 3, 8), made.normal(3, 8), made.normal(3, 8)))


def test_select_keys_takes_the_best_that_a_row_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """A causal row that sees fewer keys than it may take gets -1 for the rest, never a later key."""
    monkeypatch.setattr(sparse, "LARGEST_BLOCK", 120)  # several blocks of rows
    assert_selects_the_best(torch.float64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_adamw_is_torchs(dtype: torch.dtype) -> None:
    """Three steps with scaled gradients; 16-bit parameters follow their fp32 masters."""
    assert_adamw_is_torchs(dtype)


@cache
def on_ranks() -> list[list[torch.Tensor]]:
    def body(rank: int) -> list[torch.Tensor]:
        collectives.bind({"tp": dist.group.WORLD})
        hidden, weight, labels = sliced_loss_inputs()
        own = weight.detach().chunk(2)[rank].clone().requires_grad_()
        pieces = OPS.linear_cross_entropy_pieces(hidden, own, None, labels, rank * own.shape[0])
        log_sum, target = collectives.combined_log_sums(*pieces, "tp")
        (log_sum - target).mean().backward()
        return [(log_sum - target).detach(), *(x.grad for x in (hidden, own) if x.grad is not None)]

    return run_ranks(2, body)


def sliced_loss_inputs() -> tuple[torch.Tensor, ...]:
    made = Inputs(torch.float64)
    return made.normal(6, 8), made.normal(40, 8, scale=4), made.labels(6, 40)


def test_slices_of_the_vocabulary_join() -> None:
    """Two ranks with half the classes each: the whole's loss, gradients of their rows, parts of hidden's."""
    hidden, weight, labels = sliced_loss_inputs()
    losses = torch.nn.functional.cross_entropy(hidden @ weight.t(), labels, reduction="none")
    d_hidden, d_weight = torch.autograd.grad(losses.mean(), (hidden, weight))
    for rank, (found, _, own) in enumerate(on_ranks()):
        torch.testing.assert_close(found, losses.detach())
        torch.testing.assert_close(own, d_weight.chunk(2)[rank])
    torch.testing.assert_close(sum(part for _, part, _ in on_ranks()), d_hidden)


def test_every_operator_has_a_case() -> None:
    """A new operator without a test does not pass."""
    tested = {
        str(case.operator).split(".")[-1] for case in CASES.values() if hasattr(case.operator, "default")
    }
    forward = {name for name in OPERATORS if not name.endswith("_backward")}
    assert forward - tested == {"adamw_step", "select_keys"}


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """No Triton, and told to interpret it: PyTorch serves, and nothing tries to import kernels."""
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delenv("AUTOPLAN_KERNELS")
    operators.has_triton.cache_clear()
    try:
        assert not operators.runs_triton(torch.ones(2))
        assert_equal_within_rounding(CASES["add_rms_norm"], torch.bfloat16)
    finally:
        operators.has_triton.cache_clear()
