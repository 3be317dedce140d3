"""The static list of collectives of every rank, held against what gloo ranks really issue."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from captured_models import small_sizes, small_source
from run_fixture import HandPlans
from torch.utils._python_dispatch import TorchDispatchMode

from autoplan.capture import capture_model, load_model_source
from autoplan.runtime.check import DTYPES, Checker
from autoplan.runtime.forked import run_ranks
from autoplan.runtime.parallel import ParallelModel
from autoplan.runtime.prepare import RunProgram
from autoplan.runtime.ranks import Ranks, join_ranks

COMM = torch.ops._c10d_functional
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
    "tokens cut, all recomputed": {"tp": 2, "sp": True, "recompute": ("full", "none")},
    "tokens cut, some recomputed": {"tp": 2, "sp": True, "recompute": ("selective", "selective", "none")},
    "tokens cut, backward split": {"tp": 2, "sp": True, "pp": 2, "schedule": "zb_h1"},
    "two stages a rank": {"tp": 2, "pp": 2, "vpp": 2, "schedule": "interleaved_1f1b", "micro_batch": 1},
    "backward split, all recomputed": {"tp": 2, "pp": 2, "schedule": "zb_h1", "recompute": ("full", "none")},
    "by heads": {"cp": 2, "cp_kind": "ulysses", "recompute": ("full", "none")},
    "round a ring": {"cp": 2, "cp_kind": "ring", "tp": 2, "recompute": ("full", "selective")},
    "round a larger ring": {"cp": 4, "cp_kind": "ring"},
}
Call = tuple[str, str, str, int]  # direction, kind, axis, bytes


class Recorder(TorchDispatchMode):
    """Every functional collective in the order of issue.

    No mode sees what an operator of our own issues inside (attention round a ring): there, the functions are
    replaced while it runs.
    """

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.axes: dict[str, str] = {ranks.group(axis).group_name: axis for axis in ranks.region_axes}
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "autoplan":
            with self._inside():
                return func(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if func.namespace == "_c10d_functional" and name in KINDS:
            self._note(KINDS[name], args, result)
        return result

    def _note(self, kind: str, args: Sequence[Any], result: torch.Tensor) -> None:
        size = max(x.numel() * x.element_size() for x in (args[0], result))
        group = next(a for a in reversed(args) if isinstance(a, str))
        in_backward = torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage]: no public one
        self.calls.append(("backward" if in_backward else "forward", kind, self.axes[group], size))

    @contextmanager
    def _inside(self) -> Generator[None]:
        before = {name: getattr(COMM, name) for name in KINDS}

        def noted(function: Any, kind: str) -> Callable[..., torch.Tensor]:
            def call(*args: Any) -> torch.Tensor:
                result = function(*args)
                self._note(kind, args, result)
                return result

            return call

        for name, kind in KINDS.items():
            setattr(COMM, name, noted(before[name], kind))
        try:
            yield
        finally:
            for name, function in before.items():
                setattr(COMM, name, function)


@cache
def llama() -> tuple[HandPlans, Checker]:
    plans = HandPlans(capture_model(MODEL, dtype="fp64"), "llama")
    return plans, Checker(load_model_source(MODEL), plans.plan())


def issued(checker: Checker, program: RunProgram) -> list[tuple[int, list[Call]]]:
    """For every rank its place on the pp axis and what it issued in a step."""

    def body(_rank: int) -> tuple[int, list[Call]]:
        torch.set_default_dtype(DTYPES[checker.dtype])
        ranks = join_ranks(program.part.mesh)
        parallel = ParallelModel(program, checker.model, ranks)
        with Recorder(ranks) as recorder:
            parallel.step(checker.batch)
        return ranks.pp, recorder.calls

    return run_ranks(program.part.mesh.devices, body)


@pytest.mark.parametrize("name", PLANS)
def test_ranks_issue_what_the_program_says(name: str) -> None:
    """A rank that sends once more than its peers hangs them all; recompute sends again."""
    plans, checker = llama()
    program = checker.prepare(plans.plan(**PLANS[name]))
    assert any(collectives.backward for collectives in program.collectives)
    for pp_rank, calls in issued(checker, program):
        assert calls == [(direction, *one.sent) for direction, one in program.issued_on(pp_rank)]


def test_experts_issue_the_same_whatever_the_routing() -> None:
    """How many rows go to an expert is data; that they go is not."""
    source = small_source("qwen3_30b_a3b", 2)
    plans = HandPlans(capture_model(source, dtype="fp64", sizes=small_sizes(source)), "experts")
    checker = Checker(source, plans.plan())
    program = checker.prepare(plans.plan(dp=2, ep=2, tp=2))
    for pp_rank, calls in issued(checker, program):
        planned = [(direction, *one.sent) for direction, one in program.issued_on(pp_rank)]
        assert [call[:3] for call in calls] == [call[:3] for call in planned]
        assert {call[2] for call in calls} == {"ep", "tp"}
