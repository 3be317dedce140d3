"""Folding depth while tracing: the graph is the one that tracing every block gives, or nothing is folded."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from captured_models import small_sizes, small_source
from torch import nn

from autoplan.capture import ModelSource, capture_model, folding, trace
from autoplan.capture.batch import node_forms
from autoplan.capture.program import Capture

DEPTH = 5


def captured(source: ModelSource, sizes: dict[str, int], fold: str) -> tuple[Capture, int]:
    """One capture and the number of blocks that were unfolded into it."""
    plain = trace.trace

    def chosen(*args: object) -> trace.Traced:
        return plain(*args, fold=fold)  # pyright: ignore[reportArgumentType]: passed on as they came

    with (
        mock.patch("autoplan.capture.capturing.trace", chosen),
        mock.patch.object(folding, "_write_out", wraps=folding._write_out) as written,
    ):
        return capture_model(source, dtype="fp32", sizes=sizes), written.call_count


def same_graph(source: ModelSource, sizes: dict[str, int]) -> int:
    """Assert that folding changes nothing; the number of blocks that it saved."""
    whole, none = captured(source, sizes, fold="none")
    folded, copies = captured(source, sizes, fold="bare")
    assert none == 0
    assert node_forms(folded.graph) == node_forms(whole.graph)
    assert folded.fingerprint == whole.fingerprint and folded.batch_form.known == whole.batch_form.known
    stacks = [[n.meta.get("nn_module_stack") for n in c.graph.nodes] for c in (folded, whole)]
    assert stacks[0] == stacks[1]
    return copies


@pytest.mark.parametrize("name", ("gpt", "vlm", "llama3_8b", "deepseek_v3", "mamba2", "t5"))
def test_folded_examples_are_the_whole_graph(name: str) -> None:
    """T5 returns a mask without gradient from every block; as a folded output it once wanted one."""
    source = small_source(name, layers=DEPTH)
    assert same_graph(source, small_sizes(source)) > 0


class Block(nn.Module):
    """One block; ``how`` says what keeps it from being folded."""

    calls = 0
    outside: torch.Tensor

    def __init__(self, how: str, index: int) -> None:
        super().__init__()
        self.how, self.index = how, index
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, extra: object = None) -> torch.Tensor:
        if self.how == "reads its index" and self.index % 2:
            x = x.sin()
        if self.how == "writes to its input":
            x.add_(1)
        if self.how == "reads a tensor from outside":
            x = x + Block.outside
        if self.how == "counts its calls":
            Block.calls += 1
            x = x * (Block.calls % 2)
        return self.linear(x).relu() + x


class Deep(nn.Module):
    """A chain of blocks."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block(how, i) for i in range(DEPTH))
        if how == "has a hook":
            self.blocks[2].register_forward_hook(lambda module, args, output: output * 2)
        if how == "one is frozen":
            self.blocks[1].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        Block.calls, Block.outside = 0, self.first.weight.sum(0)
        for index, block in enumerate(self.blocks):
            extra = {"odd argument": object(), "number": index, "a number for the last two": index > 2}
            x = block(x, extra.get(self.how))
        if self.how == "the loss reads all weights":
            return x.pow(2).mean() + sum(p.square().sum() for p in self.parameters())
        if self.how == "the loss reads a block's weight":
            return (x * self.blocks[3].linear.weight.sum()).mean()
        return x.pow(2).mean()


# what the blocks do -> how many may be folded
CASES = {
    "nothing special": DEPTH - 2,
    "reads its index": 0,
    "writes to its input": 0,
    "reads a tensor from outside": 0,
    "counts its calls": 0,
    "has a hook": DEPTH - 3,
    "one is frozen": DEPTH - 3,
    "odd argument": 0,
    "number": 0,
    "a number for the last two": 1,
    "the loss reads all weights": DEPTH - 2,
    "the loss reads a block's weight": DEPTH - 2,
}


@pytest.mark.parametrize("how", CASES)
def test_what_is_not_provably_equal_is_not_folded(how: str) -> None:
    """Each of these gave a wrong graph to a fold that looked at classes and parameters alone."""
    source = ModelSource("deep", __file__, lambda: Deep(how), lambda batch: {"x": torch.randn(batch, 8)})
    assert same_graph(source, {}) == CASES[how]
