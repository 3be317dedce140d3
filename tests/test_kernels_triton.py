"""The Triton kernels without a GPU: equal in the interpreter, compiled for three chips, no byte too many."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kernel_cases import CASES, assert_equal_within_rounding

from autoplan_codegen.kernels import linear_cross_entropy as linear

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
OWN = "autoplan_codegen.kernels.triton"


def _forget_triton() -> None:
    """Triton decides when it is imported whether it interprets; its extension module stays as it is."""
    for name in [n for n in sys.modules if (n + ".").startswith(("triton.", OWN + "."))]:
        if not name.startswith("triton._C"):
            del sys.modules[name]


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
    _forget_triton()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.delenv("AUTOPLAN_KERNELS", raising=False)
        patch.setattr(linear, "LEAST_CHUNK", 1)
        _multiply_bf16(patch)
        yield
    _forget_triton()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_equal_to_the_unfused_model(name: str, dtype: torch.dtype) -> None:
    """The same cases as the plain PyTorch ones, kernels interpreted on the CPU."""
    assert_equal_within_rounding(CASES[name], dtype)
