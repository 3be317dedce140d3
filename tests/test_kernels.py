"""The fused operators in plain PyTorch: equal to the unfused model in every dtype, their gradients exact."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import CASES, OPS, Inputs, assert_equal_within_rounding

from autoplan_codegen.kernels import OPERATORS
from autoplan_codegen.kernels import linear_cross_entropy as linear

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


def test_select_keys_takes_the_best_that_a_row_sees() -> None:
    """A causal row that sees fewer keys than it may take gets -1 for the rest, never a later key."""
    made = Inputs(torch.float64)
    q, k, weights = made.plain(2, 5, 3, 8), made.plain(2, 5, 8), made.plain(2, 5, 3)
    chosen = OPS.select_keys(q, k, weights, 3, True)
    scores = torch.einsum("brhc,brh->brc", torch.einsum("brhd,bcd->brhc", q, k).relu(), weights)
    for sample in range(2):
        for row in range(5):
            best = scores[sample, row, : row + 1].argsort(descending=True)[:3].tolist()
            assert chosen[sample, row].tolist() == best + [-1] * (3 - len(best))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_adamw_is_torchs(dtype: torch.dtype) -> None:
    """Three steps with scaled gradients; 16-bit parameters follow their fp32 masters."""
    made = Inputs(dtype)
    parameters = [made.plain(5, 3), made.plain(7)]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    masters = [] if dtype == torch.float64 else [x.to(wide) for x in parameters]
    expected = [x.to(wide).clone().requires_grad_() for x in parameters]
    optimizer = torch.optim.AdamW(expected, lr=0.1, betas=(0.8, 0.95), eps=1e-7, weight_decay=0.2)
    first, second = ([torch.zeros_like(x) for x in expected] for _ in range(2))
    for step in (1, 2, 3):
        gradients = [made.plain(*x.shape) for x in parameters]
        for x, g in zip(expected, gradients):
            x.grad = g.to(wide) * 0.5
        optimizer.step()
        OPS.adamw_step(parameters, gradients, first, second, masters, 0.1, 0.8, 0.95, 1e-7, 0.2, step, 0.5)
    for x, y in zip(masters or parameters, expected):
        torch.testing.assert_close(x, y.detach())
    for x, y in zip(parameters, expected):
        assert torch.equal(x, y.detach().to(dtype)) or dtype == torch.float64


def test_every_operator_has_a_case() -> None:
    """A new operator without a test does not pass."""
    tested = {
        str(case.operator).split(".")[-1] for case in CASES.values() if hasattr(case.operator, "default")
    }
    forward = {name for name in OPERATORS if not name.endswith("_backward")}
    assert forward - tested == {"adamw_step", "select_keys"}
