"""Losses that drop positions of their logits, rewritten to keep them: the same loss and gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from graph_fixture import functional_graph
from torch import Tensor, fx, nn
from torch.nn import functional as F

from autoplan_passes.calls import op_name
from autoplan_passes.shifted_loss import keep_all_positions

CLASSES, HIDDEN = 11, 6


def next_token(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].reshape(-1, CLASSES), labels[:, 1:].reshape(-1))


def next_token_in_single_precision(logits: Tensor, labels: Tensor) -> Tensor:
    logits = logits[..., :-1, :].float().contiguous()
    return F.cross_entropy(logits.view(-1, CLASSES), labels[..., 1:].contiguous().view(-1), ignore_index=3)


def two_ahead_summed(logits: Tensor, labels: Tensor) -> Tensor:
    loss = F.cross_entropy(
        logits[:, :-2].flatten(0, 1), labels[:, 2:].flatten(), reduction="sum", label_smoothing=0.1
    )
    return loss / 7


def after_a_prefix(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, 3:-1].reshape(-1, CLASSES), labels[:, 4:].reshape(-1))


def of_all_positions(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def of_each_position(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none").mean()


class Head(nn.Module):
    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.out, self.loss = nn.Linear(HIDDEN, CLASSES, dtype=torch.float64), loss

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.out(x), labels)


def graph_of(loss: Callable[[Tensor, Tensor], Tensor]) -> tuple[fx.GraphModule, list[Tensor]]:
    torch.manual_seed(0)
    module = Head(loss)
    x, labels = torch.randn(2, 8, HIDDEN, dtype=torch.float64), torch.randint(CLASSES, (2, 8))
    graph = functional_graph(module, [x, labels], needs_gradient=True)
    return graph, [x, labels, *(p.detach() for p in module.parameters())]


def run(graph: fx.GraphModule, values: list[Tensor]) -> list[Tensor]:
    inputs = [v.clone().requires_grad_(v.is_floating_point()) for v in values]
    (loss,) = graph(*inputs)
    loss.backward()
    return [loss.detach(), *(v.grad for v in inputs if v.grad is not None)]


SHIFTED = [next_token, next_token_in_single_precision, two_ahead_summed, after_a_prefix]


@pytest.mark.parametrize("loss", SHIFTED, ids=lambda loss: loss.__name__)
def test_all_positions_stay(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    """The logits are read whole; loss and every gradient are the same."""
    graph, values = graph_of(loss)
    kept = keep_all_positions(graph)
    sliced = [n for n in kept.graph.nodes if op_name(n) == "aten.slice"]
    assert [n.all_input_nodes[0].meta.get("kind") for n in sliced if n.meta["val"].is_floating_point()] == []
    before, after = run(graph, values), run(kept, values)
    exact = 1e-6 if "single" in loss.__name__ else 1e-12
    assert all(float((a - b).abs().max()) < exact for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("loss", [of_all_positions, of_each_position], ids=lambda loss: loss.__name__)
def test_other_losses_are_left_alone(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    """One loss a position cannot gain positions: what follows would see them."""
    graph, _ = graph_of(loss)
    assert keep_all_positions(graph) is graph
