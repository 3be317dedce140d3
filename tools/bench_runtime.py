"""Times a step of an applied plan against the same layout written by hand with PyTorch's own parts.

Both sides run on CPU ranks of one process group, turn and turn about: DDP, ``fully_shard``,
``parallelize_module`` and PyTorch's 1F1B against the plan for the same mesh. Prints the median of the ratios
of neighbouring steps with its quartiles, and what each side sends in a step (``tests/test_hand_written.py``
holds the bytes against each other).
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autoplan.planner.driver import search
from autoplan.runtime.forked import run_ranks
from autoplan.runtime.parallel import ParallelModel
from autoplan.runtime.prepare import RunProgram, trace_and_prepare
from autoplan.runtime.ranks import join_ranks

VOCABULARY, WIDTH, HEADS, BLOCKS, TOKENS = 2048, 256, 4, 4, 64
RANKS, ROWS, PIPELINE_MICROBATCHES = 2, 8, 4
PINS: Mapping[str, Sequence[str]] = {
    "dp2": ("dp=2", "zero=0", "micro_batch=4"),
    "fsdp2": ("dp=2", "zero=3", "micro_batch=4"),
    "tp2": ("tp=2", "sp=0", "micro_batch=8"),
    "pp2": ("pp=2", "vpp=1", "schedule=1f1b", "micro_batch=2"),
}
Step = Callable[[], Tensor | None]
Sends = Mapping[str, tuple[int, int]]  # kind -> how many, bytes in all


class Block(nn.Module):
    """Attention and two products, pre-norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_1(x)
        heads = (f(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Model(nn.Module):
    """A small GPT without positions; either end may be missing, as on a pipeline stage."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding: nn.Module | None = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head: nn.Module | None = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens) if self.embedding is not None else tokens
        for block in self.blocks:
            x = block(x)
        if self.head is None:
            return x
        logits = self.head(self.norm(x))
        return logits if labels is None else mean_loss(logits, labels)


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def example_inputs(batch_size: int) -> dict[str, Tensor]:
    tokens, labels = torch.randint(VOCABULARY, (2, batch_size, TOKENS))
    return {"tokens": tokens, "labels": labels}


@dataclass(frozen=True)
class Compared:
    """One layout: ratios of neighbouring steps (ours / by hand), their seconds, and what each side sends."""

    layout: str
    ratios: Sequence[float]
    ours_s: float
    by_hand_s: float
    sends: tuple[Sends, Sends]
    losses: tuple[float, float]


def by_hand(layout: str, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Step, nn.Module]:
    """A step of the layout as PyTorch's documentation writes it, and the module whose gradients it makes."""
    mesh, rank = init_device_mesh("cpu", (RANKS,)), dist.get_rank()
    own = {name: value.chunk(RANKS)[rank] for name, value in batch.items()}
    if layout == "dp2":
        replica = DistributedDataParallel(model)
        return lambda: _backward(replica(**own)), model
    if layout == "fsdp2":
        for block in model.get_submodule("blocks").children():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return lambda: _backward(model(**own)), model
    return _tensor_parallel(model, mesh, batch) if layout == "tp2" else _pipelined(model, batch)


def _backward(loss: Tensor) -> Tensor:
    """The mean of all replicas' losses, as scripts log it."""
    loss.backward()
    whole = loss.detach().clone()
    dist.all_reduce(whole)
    return whole / RANKS


def _tensor_parallel(model: nn.Module, mesh: Any, batch: Mapping[str, Tensor]) -> tuple[Step, nn.Module]:
    columns, rows = ("q", "k", "v", "up"), ("out", "down")
    styles: dict[str, Any] = {f"blocks.*.{name}": ColwiseParallel() for name in columns}
    styles |= {f"blocks.*.{name}": RowwiseParallel() for name in rows}
    styles["embedding"] = RowwiseParallel(input_layouts=Replicate())
    styles["head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    cut = parallelize_module(model, mesh, styles)

    def step() -> Tensor:
        with loss_parallel():
            loss: Any = cut(**batch)
            loss.backward()
        return loss.detach().full_tensor()

    return step, cut


def _pipelined(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Step, nn.Module]:
    rank, half = dist.get_rank(), BLOCKS // RANKS
    stage: Any = model
    stage.blocks = stage.blocks[rank * half : (rank + 1) * half]
    if rank:
        stage.embedding = None
    else:
        stage.norm = stage.head = None
    schedule = Schedule1F1B(
        PipelineStage(stage, rank, RANKS, torch.device("cpu")), PIPELINE_MICROBATCHES, loss_fn=mean_loss
    )

    def step() -> Tensor | None:
        if rank == 0:
            schedule.step(batch["tokens"])
            return None
        losses: list[Tensor] = []
        schedule.step(target=batch["labels"], losses=losses)
        return torch.stack(losses).mean().detach()

    return step, stage


class Recorder(TorchDispatchMode):
    """Counts what is sent, whether by functional collectives or in place."""

    KINDS: Mapping[str, str] = {
        "all_reduce": "all_reduce",
        "allreduce_": "all_reduce",
        "all_gather_into_tensor": "all_gather",
        "_allgather_base_": "all_gather",
        "allgather_into_tensor_coalesced_": "all_gather",
        "reduce_scatter_tensor": "reduce_scatter",
        "_reduce_scatter_base_": "reduce_scatter",
        "send": "send",
        "broadcast_": "broadcast",
    }

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        space, _, name = func._schema.name.partition("::")
        if space in ("c10d", "_c10d_functional") and name in self.KINDS:
            given = [x for x in pytree.tree_leaves((args, result)) if isinstance(x, Tensor)]
            kind = self.KINDS[name]
            self.counts[kind] += 1
            self.bytes[kind] += max(x.numel() * x.element_size() for x in given)
        return result

    @property
    def sends(self) -> Sends:
        return {kind: (count, self.bytes[kind]) for kind, count in self.counts.items()}


def program_of(layout: str, model: nn.Module) -> RunProgram:
    """The plan for a layout and what its ranks run."""
    inputs = example_inputs(ROWS)
    plan = search(model, inputs, hw="cpu", devices=RANKS, global_batch=ROWS, pins=PINS[layout])
    return trace_and_prepare(model, plan, example_inputs=inputs)


def compare(layout: str, steps: int, warm: int = 2) -> list[Compared]:
    """Both sides of a layout, on every rank."""
    torch.manual_seed(0)
    model, batch = Model(), example_inputs(ROWS)
    program = program_of(layout, model)

    def body(_rank: int) -> Compared:
        parallel = ParallelModel(program, model, join_ranks(program.part.mesh))
        hand, module = by_hand(layout, copy.deepcopy(model), batch)
        sides = ((lambda: parallel.step(batch), parallel.parameters), (hand, module.parameters))
        losses = [[_one(*side, recorded=True) for _ in range(2)][-1] for side in sides]
        times: tuple[list[float], list[float]] = ([], [])
        for turn in range(warm + steps):
            order = (0, 1) if turn % 2 else (1, 0)
            for side in order:
                seconds, _, _ = _one(*sides[side])
                if turn >= warm:
                    times[side].append(seconds)
        return Compared(
            layout,
            [ours / other for ours, other in zip(*times)],
            statistics.median(times[0]),
            statistics.median(times[1]),
            (losses[0][2], losses[1][2]),
            (losses[0][1], losses[1][1]),
        )

    return run_ranks(RANKS, body, timeout_s=600)


def _one(step: Step, parameters: Callable[[], Any], *, recorded: bool = False) -> tuple[float, float, Sends]:
    """Seconds of one step from barrier to barrier, its loss, and what it sent if asked."""
    for parameter in parameters():
        parameter.grad = None
    dist.barrier()
    begun = time.perf_counter()
    if recorded:
        with Recorder() as recorder:
            loss = step()
        sends = recorder.sends
    else:
        loss, sends = step(), {}
    dist.barrier()
    return time.perf_counter() - begun, float(loss) if loss is not None else float("nan"), sends


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--layouts", nargs="*", default=list(PINS), choices=list(PINS))
    args = parser.parse_args()
    rows: list[list[object]] = []
    for layout in args.layouts:
        found = compare(layout, args.steps)[-1]
        low, middle, high = statistics.quantiles(found.ratios, n=4)
        sides = [
            ", ".join(f"{n} {kind} {size / 1e6:.2f} MB" for kind, (n, size) in sorted(sends.items()))
            for sends in found.sends
        ]
        times = f"{found.ours_s * 1e3:.1f} / {found.by_hand_s * 1e3:.1f}"
        rows.append([layout, f"{middle:.3f}", f"{low:.3f} - {high:.3f}", times, *sides])
    titles = ["layout", "ours / by hand", "quartiles", "ms a step", "ours sends", "by hand sends"]
    print(tabulate(rows, headers=titles))


if __name__ == "__main__":
    main()
