"""A plan's bytes against those that its ranks really allocate on CPU: saved within 1%, the peak within 3%."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from allocation import Allocations
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from autoplan.capture import ModelSource
from autoplan.plan import Plan
from autoplan.planner.driver import search_plan
from autoplan.runtime.forked import run_ranks
from autoplan.runtime.parallel import ParallelModel
from autoplan.runtime.prepare import trace_and_prepare
from autoplan.runtime.ranks import join_ranks

WIDTH, HEADS, LAYERS, VOCAB, TOKENS = 64, 4, 4, 320, 96
BATCH = 32
# a thread of a collective may let go of its tensor late: the least peak of some steps is the plan's
STEPS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm_1(x)
        q, k, v = (f(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def inputs(batch: int) -> dict[str, Any]:
    tokens, labels = torch.randint(VOCAB, (2, batch, TOKENS))
    return {"tokens": tokens, "labels": labels}


SOURCE = ModelSource("allocated", str(Path(__file__)), Decoder, inputs, None, ())


@dataclass
class Seen:
    """What one rank saw: the most bytes alive in a step, and what autograd saved in its micro-batches."""

    peak_bytes: int
    saved_bytes: int


def planned(pins: dict[str, Any]) -> Plan:
    texts = [f"{key}={value}" for key, value in pins.items()]
    return search_plan(SOURCE, hw="cpu", devices=2, global_batch=BATCH, dtype="fp32", pins=texts)


class Saved:
    """Distinct storages that autograd saves, held until the end, less those there before."""

    def __init__(self, held: Iterable[torch.Tensor]) -> None:
        self.held = list(held)
        self.sizes = {self._key(tensor): 0 for tensor in self.held}

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.held.append(tensor)
        self.sizes.setdefault(self._key(tensor), tensor.untyped_storage().nbytes())
        return tensor

    def _key(self, tensor: torch.Tensor) -> int:
        return StorageWeakRef(tensor.untyped_storage()).cdata


def really_allocated(plan: Plan) -> list[Seen]:
    """What each rank sees after a first step, which makes the optimizer's states."""
    torch.manual_seed(0)
    model, batch = Decoder(), inputs(BATCH)
    program = trace_and_prepare(model, plan, example_inputs=batch)

    def body(rank: int) -> Seen:
        parallel = ParallelModel(program, model, join_ranks(program.part.mesh))
        optimizer = torch.optim.AdamW(parallel.parameters(), fused=True)
        parallel.step(batch)
        optimizer.step()
        held = [*parallel.parameters()]
        for stage in parallel.stages.values():
            held += [*stage.parameters(), *stage.buffers()]
        saved = Saved(held)
        held += [value for state in optimizer.state.values() for value in state.values()]
        counted = Allocations(held)
        peaks: list[int] = []
        for _ in range(STEPS):
            parallel.zero_grad()
            counted.restart()
            with counted:
                parallel.step(batch)
                optimizer.step()
            peaks.append(counted.peak_bytes)
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
            parallel.step(batch)
        return Seen(min(peaks), sum(saved.sizes.values()))

    return run_ranks(2, body)


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2, "micro_batch": 8, "recompute": "none"},
    "tp, full": {"tp": 2, "micro_batch": 8, "recompute": "full"},
    "ZeRO-3": {"dp": 2, "zero": 3, "micro_batch": 8, "recompute": "none"},
    "1F1B": {"pp": 2, "micro_batch": 8, "recompute": "none", "schedule": "1f1b"},
    "selective": {"dp": 2, "zero": 0, "micro_batch": 8, "recompute": "selective"},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_bytes_of_an_applied_plan(name: str) -> None:
    """Several micro-batches, the optimizer's step included; what recompute makes again is in the peak."""
    plan = planned(LAYOUTS[name])
    (part,) = plan.parts
    stages = [stage.prediction for stage in part.stages if stage.prediction]
    for seen, told in zip(really_allocated(plan), stages * (2 // len(stages)), strict=True):
        assert told.memory_peak_bytes == pytest.approx(seen.peak_bytes, rel=0.03)
        if LAYOUTS[name]["recompute"] == "none" and "zero" not in LAYOUTS[name]:
            assert told.saved_bytes * part.microbatches == pytest.approx(seen.saved_bytes, rel=0.01)
