"""Rows packed from several documents: attention stays inside each, on every axis, as in one process.

A mask that depends on the batch must not be taken for a causal one, nor be that of another micro-batch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from run_fixture import HandPlans

from autoplan.capture import capture_model, load_model_source
from autoplan.capture.program import Capture
from autoplan.runtime.check import Checker
from autoplan_passes.calls import Call, op_name

MODEL = Path(__file__).parent / "models" / "packed_gpt.py"
# The mask comes from the documents' numbers, from where they end, or ready made.
VARIANTS: dict[str, tuple[tuple[str, str], ...]] = {
    "numbers": (),
    "ends": (
        (
            "same = documents",
            "documents = (order[None, :, None] >= documents[:, None, :]).sum(-1)\n        same = documents",
        ),
        ("torch.stack(rows)", "torch.tensor([([*n, *[0] * 4])[:4] for n in lengths]).cumsum(1)"),
    ),
    "mask": (
        ("same = documents[:, :, None] == documents[:, None, :]", "same = documents.bool()"),
        ("torch.stack(rows)", "torch.stack([(r[:, None] == r[None, :]).long() for r in rows])"),
    ),
}
PLANS: dict[str, dict[str, Any]] = {
    "by heads": {"cp": 2},
    "round a ring, pieces, stages": {"cp": 2, "cp_kind": "ring", "tp": 2, "pp": 2, "micro_batch": 1},
    "tokens cut, replicas": {"tp": 2, "sp": True, "dp": 2, "zero": 3, "recompute": ("full",)},
}

_made: dict[str, tuple[HandPlans, Checker]] = {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packed")


def made(variant: str, folder: Path) -> tuple[HandPlans, Checker]:
    if variant not in _made:
        text = MODEL.read_text()
        for before, after in VARIANTS[variant]:
            assert before in text
            text = text.replace(before, after)
        path = folder / f"{variant}.py"
        path.write_text(text)
        plans = HandPlans(capture_model(path, dtype="fp64"), variant)
        _made[variant] = (plans, Checker(load_model_source(path), plans.plan(), timeout_s=60))
    return _made[variant]


def masked_attention(capture: Capture) -> list[Call]:
    nodes = [n for n in capture.graph.nodes if op_name(n) == "aten.scaled_dot_product_attention"]
    return [Call(node) for node in nodes]


CASES = [("numbers", name) for name in PLANS] + [
    (v, "round a ring, pieces, stages") for v in ("ends", "mask")
]


@pytest.mark.parametrize(("variant", "name"), CASES)
def test_parity(variant: str, name: str, folder: Path) -> None:
    """Rows of other documents in every sample and micro-batch; labels between documents do not count."""
    plans, checker = made(variant, folder)
    attention = masked_attention(plans.capture)
    assert len(attention) == 2
    assert not any(call.arguments["is_causal"] or call.arguments["attn_mask"] is None for call in attention)
    result = checker.check(plans.plan(**PLANS[name]))
    assert result.ok, str(result)
