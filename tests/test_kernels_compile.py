"""Every Triton kernel compiled for three chips that are not here: wide accesses, nothing spilled.

One process of its own: whether Triton compiles or interprets is decided when it is imported.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import autoplan_codegen.kernels

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
# What reads or writes more than four numbers beside its tensors.
NARROW = {
    "adamw, masters": "the last block of a tensor is masked",
    "combine_experts": "a place and a weight for each of eight choices",
    "combine_experts backward": "a place and a weight for each of eight choices",
    "sparse_attention": "the keys of a row",
    "sparse_attention backward": "the keys of a row",
    "index scores": "a weight for each row",
    "attention backward, rows": "two numbers a row",
    "attention backward, columns": "two numbers a row",
    "grouped_linear": "the row of each row",
    "grouped_linear weight gradient": "the row of each row",
}
SCALARS_ALONE = {"cross_entropy", "attention backward, means"}  # writes one or two numbers a row


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Any]]:
    """Triton's own cache is used: it knows what it compiled by source, chip and options."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_DEFAULT_FP_FUSION": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "autoplan_codegen.kernels.triton.compiled", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["kernels"]


def test_nothing_is_spilled(compiled: list[dict[str, Any]]) -> None:
    """A spilled register is traffic that no count of bytes shows."""
    assert {row["chip"] for row in compiled} == {"cuda 9.0", "cuda 10.0", "gfx942"}
    assert [row for row in compiled if row["spilled_bytes"]] == []


def test_tensors_move_in_128_bits(compiled: list[dict[str, Any]]) -> None:
    """Narrower accesses are of numbers, a label or a log-sum, not of tensors. (AMD's products end in 64.)"""
    for row in compiled:
        loads, stores = ({int(k): v for k, v in row[kind].items()} for kind in ("loads", "stores"))
        assert loads[128], row
        if row["kernel"] not in SCALARS_ALONE:
            of_product = row["kernel"] in NARROW or row["kernel"] == "attention"
            assert max(stores) == 128 or (row["chip"] == "gfx942" and of_product and max(stores) == 64), row
        if row["kernel"] not in NARROW:
            assert sum(n for width, n in loads.items() if width < 128) <= 4, row


def test_shared_memory_fits(compiled: list[dict[str, Any]]) -> None:
    """The default tiles leave room on the smallest of the chips: 227 KiB on CUDA 9.0, 64 KiB on gfx942."""
    for row in compiled:
        assert row["shared_bytes"] <= (65536 if row["chip"] == "gfx942" else 232448), row


def test_every_kernel_is_there() -> None:
    """A new kernel without a launch to compile does not pass."""
    folder = Path(autoplan_codegen.kernels.__file__).parent / "triton"
    compiled = (folder / "launches.py").read_text()
    for file in folder.glob("*.py"):
        text = file.read_text()
        kernels = [name for name in re.findall(r"@jit\ndef (\w+)\(", text) if f"{name}[" in text]
        assert [name for name in kernels if f".{name}" not in compiled] == []
