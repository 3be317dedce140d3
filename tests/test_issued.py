"""The static list of collectives of every rank, held against what gloo ranks really issue."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from run_fixture import HandPlans
from torch.utils._python_dispatch import TorchDispatchMode

from autoplan.capture import capture_model, load_model_source
from autoplan.runtime.check import DTYPES, Checker
from autoplan.runtime.forked import run_ranks
from autoplan.runtime.issued import StageCollectives
from autoplan.runtime.parallel import ParallelModel
from autoplan.runtime.ranks import Ranks, join_ranks

MODEL = Path(__file__).parent / "models" / "tiny_llama_hf.py"
KINDS = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
PLANS: Mapping[str, Mapping[str, Any]] = {
    "tp2": {"tp": 2},
    "tp2, all recomputed": {"tp": 2, "recompute": ("full",)},
    "tp2, some recomputed": {"tp": 2, "recompute": ("selective", "full", "none")},
    "tp2 on two stages": {"tp": 2, "pp": 2, "recompute": ("none", "full")},
    "tp2 of two replicas": {"tp": 2, "dp": 2, "zero": 3},
    "tokens cut": {"tp": 2, "sp": True},
    "tokens cut, all recomputed": {"tp": 2, "sp": True, "recompute": ("full",)},
    "tokens cut, some recomputed": {"tp": 2, "sp": True, "recompute": ("selective", "selective", "none")},
    "tokens cut, backward split": {"tp": 2, "sp": True, "pp": 2, "schedule": "zb_h1"},
}
Call = tuple[str, str, int]


class Recorder(TorchDispatchMode):
    """Every functional collective in the order of issue, apart by direction: (kind, axis, bytes)."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.axes: dict[str, str] = {ranks.group(axis).group_name: axis for axis in ranks.region_axes}
        self.forward: list[Call] = []
        self.backward: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        kind = KINDS.get(func._schema.name.partition("::")[2], "")
        if func.namespace == "_c10d_functional" and kind:
            size = max(x.numel() * x.element_size() for x in (args[0], result))
            group = next(a for a in reversed(args) if isinstance(a, str))
            in_backward = torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage]: no public one
            (self.backward if in_backward else self.forward).append((kind, self.axes[group], size))
        return result


@pytest.fixture(scope="module")
def checker() -> tuple[HandPlans, Checker]:
    plans = HandPlans(capture_model(MODEL, dtype="fp64"), "llama")
    return plans, Checker(load_model_source(MODEL), plans.plan())


def issued(checker: Checker, program: Any) -> list[tuple[int, list[Call], list[Call]]]:
    def body(_rank: int) -> tuple[int, list[Call], list[Call]]:
        torch.set_default_dtype(DTYPES[checker.dtype])
        ranks = join_ranks(program.part.mesh)
        parallel = ParallelModel(program, checker.model, ranks)
        with Recorder(ranks) as recorder:
            parallel.step(checker.batch)
        return ranks.pp, recorder.forward, recorder.backward

    return run_ranks(program.part.mesh.devices, body)


def planned(collectives: StageCollectives, count: int) -> tuple[list[Call], list[Call]]:
    return [one.sent for one in collectives.forward] * count, [
        one.sent for one in collectives.backward
    ] * count


@pytest.mark.parametrize("name", PLANS)
def test_ranks_issue_what_the_program_says(name: str, checker: tuple[HandPlans, Checker]) -> None:
    """A rank that sends once more than its peers hangs them all; recompute sends again."""
    plans, own = checker
    program = own.prepare(plans.plan(**PLANS[name]))
    by_stage: dict[int, list[tuple[list[Call], list[Call]]]] = {}
    for stage, forward, backward in issued(own, program):
        by_stage.setdefault(stage, []).append((forward, backward))
    assert any(collectives.backward for collectives in program.collectives)
    for stage, found in by_stage.items():
        assert all(one == found[0] for one in found)
        expected = planned(program.collectives[stage], program.part.microbatches)
        assert found[0] == expected
