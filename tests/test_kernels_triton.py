"""The Triton kernels without a GPU: equal in the interpreter, compiled for three chips, no byte too many."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from kernel_cases import (
    CASES,
    EPS,
    OPS,
    SEED,
    Inputs,
    assert_adamw_is_torchs,
    assert_equal_within_rounding,
    assert_selects_the_best,
)

from autoplan_codegen.kernels import linear_cross_entropy as linear
from autoplan_codegen.kernels import sparse

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
OWN = "autoplan_codegen.kernels.triton"


def _take_triton() -> dict[str, ModuleType]:
    """Triton decides when it is imported whether it interprets; its extension module stays as it is."""
    taken = [n for n in sys.modules if (n + ".").startswith(("triton.", OWN + "."))]
    return {name: sys.modules.pop(name) for name in taken if not name.startswith("triton._C")}


def _multiply_bf16(patch: pytest.MonkeyPatch) -> None:
    """Triton 3.9 interprets a product of bf16 as one of its bit patterns: widen them first."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    builder, plain = interpreter.InterpreterBuilder, interpreter.InterpreterBuilder.create_dot

    def widened(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        kinds = interpreter.tl.bfloat16, interpreter.tl.float32
        a, b = (self.create_fp_ext(x, kinds[1]) if x.dtype.scalar == kinds[0] else x for x in (a, b))
        return plain(self, a, b, *rest)

    patch.setattr(builder, "create_dot", widened)


@pytest.fixture(scope="module", autouse=True)
def interpreter() -> Iterator[None]:
    before = _take_triton()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.delenv("AUTOPLAN_KERNELS", raising=False)
        patch.setattr(linear, "LEAST_CHUNK", 1)
        _multiply_bf16(patch)
        yield
    _take_triton()
    sys.modules.update(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_equal_to_the_unfused_model(name: str, dtype: torch.dtype) -> None:
    """The same cases as the plain PyTorch ones, kernels interpreted on the CPU."""
    assert_equal_within_rounding(CASES[name], dtype)


def test_select_keys_takes_the_best_that_a_row_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks of rows: a kernel that counts rows from its own block's first would see the future."""
    monkeypatch.setattr(sparse, "LARGEST_BLOCK", 20)
    assert_selects_the_best(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adamw_is_torchs(dtype: torch.dtype) -> None:
    """One launch over tensors of several sizes, the last block of each cut off."""
    assert_adamw_is_torchs(dtype)


# --- bytes ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moves:
    """An operator on given tensors; ``read`` and ``written``: how often each element is, in their order."""

    call: Callable[[Inputs], tuple[list[Any], list[Any]]]
    extra: int = 0
    """Elements read besides, in all."""


def _whole(name: str, *inputs: Any) -> tuple[list[Any], list[Any]]:
    made = getattr(OPS, name)(*inputs)
    return list(inputs), [made] if isinstance(made, torch.Tensor) else list(made)


R, C = 6, 128
MOVES = {
    "rms_norm": Moves(lambda i: _whole("rms_norm", i.plain(R, C), i.plain(C), EPS)),
    "add_rms_norm": Moves(lambda i: _whole("add_rms_norm", i.plain(R, C), i.plain(R, C), i.plain(C), EPS)),
    "add_layer_norm": Moves(
        lambda i: _whole("add_layer_norm", i.plain(R, C), i.plain(R, C), i.plain(C), i.plain(C), EPS)
    ),
    "norm backward": Moves(
        lambda i: _whole(
            "norm_backward", i.plain(R, C), i.plain(R, C), i.plain(R, C), i.plain(C), EPS, True, True
        )
    ),
    "swiglu": Moves(lambda i: _whole("swiglu", i.plain(R, C), i.plain(R, C))),
    "gated backward": Moves(
        lambda i: _whole("gated_backward", i.plain(R, C), i.plain(R, C), i.plain(R, C), "silu")
    ),
    "bias_gelu_dropout": Moves(
        lambda i: _whole("bias_gelu_dropout", i.plain(R, C), i.plain(C), 0.1, SEED, "none")
    ),
    "bias_gelu_dropout backward": Moves(
        lambda i: _whole(
            "bias_gelu_dropout_backward", i.plain(R, C), i.plain(R, C), i.plain(C), 0.1, SEED, "none"
        )
    ),
    "rotary": Moves(
        lambda i: _whole("rotary", i.plain(2, 4, 3, 16), i.plain(2, 1, 3, 16), i.plain(2, 1, 3, 16))
    ),
    "cross_entropy": Moves(lambda i: _whole("cross_entropy", i.plain(R, C), i.labels(R, C), -100), extra=R),
    "cross_entropy backward": Moves(
        lambda i: _whole(
            "cross_entropy_backward", i.plain(R), i.plain(R), i.plain(R, C), i.labels(R, C), i.plain(R), 0
        )
    ),
    "adamw": Moves(lambda i: _stepped(i)),
}


def _stepped(i: Inputs) -> tuple[list[Any], list[Any]]:
    parameter, gradient, first, second = *(i.plain(R, C) for _ in range(3)), i.plain(R, C).square()
    rest = (0.1, 0.9, 0.99, 1e-8, 0.1, 1, 1.0)
    OPS.adamw_step([parameter], [gradient], [first], [second], [], *rest)
    return [parameter, gradient, first, second], [parameter, first, second]


@pytest.mark.parametrize("name", MOVES)
def test_no_byte_too_many(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted from the kernels' own loads and stores: each large tensor is read once and written once."""
    counts = {"load": Counter[int](), "store": Counter[int]()}
    builder = importlib.import_module("triton.runtime.interpreter").InterpreterBuilder
    for kind, counter in counts.items():
        monkeypatch.setattr(builder, f"create_masked_{kind}", _counting(builder, kind, counter))
    read, written = MOVES[name].call(Inputs(torch.float32))
    for tensors, counter, extra in ((read, counts["load"], MOVES[name].extra), (written, counts["store"], 0)):
        for x in (x for x in tensors if isinstance(x, torch.Tensor) and x.dim() > 1):
            places = range(x.data_ptr(), x.data_ptr() + x.numel() * x.element_size(), x.element_size())
            found = sum(counter[place] for place in places)
            assert x.numel() <= found <= x.numel() + extra, (name, tuple(x.shape), found)


def _counting(builder: Any, kind: str, counter: Counter[int]) -> Callable[..., Any]:
    plain = getattr(builder, f"create_masked_{kind}")

    def counted(self: Any, pointers: Any, *rest: Any) -> Any:
        mask = rest[1 if kind == "store" else 0].data
        counter.update(pointers.data[mask.astype(bool)].tolist())
        return plain(self, pointers, *rest)

    return counted
