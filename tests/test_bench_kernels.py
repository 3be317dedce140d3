"""The kernel benchmark without a GPU: it says what is missing, and it compares like with like."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

TOOL = Path(__file__).parent.parent / "tools" / "bench_kernels.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_kernels", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_skips_with_a_reason(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where there is no GPU it ends well, and one JSON object is what --json prints."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["bench_kernels.py", "--json"])
    bench.main()
    assert "lacks a CUDA device" in json.loads(capsys.readouterr().out)["skipped"]
    monkeypatch.setattr("sys.argv", ["bench_kernels.py"])
    bench.main()
    assert capsys.readouterr().out.startswith("skipped: the kernels are timed on a GPU")


def test_compares_like_with_like(bench: ModuleType) -> None:
    """Every fused operator and what it is timed against give the same, as do the two blocks of Llama."""
    sizes, device = bench.Sizes(8, 16, 32, 4, 2, 16, 24), torch.device("cpu")
    torch.manual_seed(0)
    for name, row in bench.ROWS.items():
        inputs = row.inputs(sizes, device)
        copies = [x.detach().clone() for x in inputs]
        found = row.fused(*inputs).detach().float()
        if row.eager is not None and not row.random:
            torch.testing.assert_close(found, row.eager(*copies).float(), rtol=0.03, atol=0.03, msg=name)
        if any(x.requires_grad for x in inputs):
            bench.both_ways(row.fused, inputs)()
    block = bench.Block(sizes, device)
    x, tables = bench.normal(1, 8, 16, device=device), bench._positions(sizes, device)
    torch.testing.assert_close(block(x, *tables, True), block(x, *tables, False), rtol=0.03, atol=0.03)
    bench.block_step(block, True, device)()
