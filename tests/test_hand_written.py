"""What a plan sends in a step, against the same layout written by hand with PyTorch's own parts.

Times are noise on a busy machine (``tools/bench_runtime.py`` measures them); bytes are exact.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TOOL = Path(__file__).parent.parent / "tools" / "bench_runtime.py"
SMALL = {"VOCABULARY": 64, "WIDTH": 32, "TOKENS": 8}
SCALARS = 8  # bytes of the loss, which both bring to every rank


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_runtime", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_runtime"] = module
    spec.loader.exec_module(module)
    vars(module).update(SMALL)
    return module


def sent(bench: Any, layout: str) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes by kind, of the plan and by hand, on the last rank; both sides have the same loss."""
    *_, found = bench.compare(layout, steps=1, warm=0)
    assert found.losses[0] == pytest.approx(found.losses[1], rel=1e-5)
    ours, by_hand = ({kind: size for kind, (_, size) in sends.items()} for sends in found.sends)
    return ours, by_hand


def test_replicas(bench: Any) -> None:
    """Every gradient once, as under DDP."""
    ours, by_hand = sent(bench, "dp2")
    assert ours == {"all_reduce": by_hand["all_reduce"]}  # DDP also agrees on its buckets, once


def test_shards(bench: Any) -> None:
    """Gradients as under ``fully_shard`` of every block; parameters twice, but for those of the last region
    (by hand the table is in one unit with the head)."""
    ours, by_hand = sent(bench, "fsdp2")
    table = SMALL["VOCABULARY"] * SMALL["WIDTH"] * 4
    assert ours["reduce_scatter"] == by_hand["reduce_scatter"]
    assert ours["all_gather"] == by_hand["all_gather"] + table
    assert ours.get("all_reduce", 0) <= SCALARS


def test_pieces(bench: Any) -> None:
    """No more than column- and row-parallel products with a vocabulary-parallel loss send."""
    ours, by_hand = sent(bench, "tp2")
    assert sum(ours.values()) <= sum(by_hand.values())


def test_stages(bench: Any) -> None:
    """Activations and their gradients, nothing else."""
    ours, by_hand = sent(bench, "pp2")
    assert ours["send"] == by_hand["send"] == bench.ROWS * bench.TOKENS * bench.WIDTH * 4
    assert ours.get("all_reduce", 0) + ours.get("broadcast", 0) <= SCALARS
