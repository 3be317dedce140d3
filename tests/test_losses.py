"""Losses that micro-batches and replicas cut into unequal parts: each equals that of one batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from run_fixture import HandPlans

from autoplan.capture import capture_model, load_model_source
from autoplan.errors import BadInputError
from autoplan.runtime.check import Checker
from autoplan.runtime.weighting import Count, LossTerm, find_loss_terms

MODEL = '''
"""A model with two heads, whose labels are ignored in different places."""
import torch
from torch import nn
from torch.nn import functional as F

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head, self.later = nn.Linear(16, 32), nn.Linear(16, 32)

    def forward(self, tokens, labels, mask, given):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        main, later = self.head(x).flatten(0, 1), self.later(x).flatten(0, 1)
        ce = F.cross_entropy(main, labels.flatten())
        next_ce = F.cross_entropy(later, labels.masked_fill(labels > 9, -100).flatten())
        tokens_s = F.cross_entropy(main, labels.flatten().clamp(min=0), reduction="none")
        masked = (tokens_s * mask.flatten()).sum() / mask.sum()
        weights_s = sum(p.square().sum() for p in self.head.parameters())
        return LOSS

def build_model():
    return Model()

def example_inputs(batch_size):
    labels = torch.randint(16, (batch_size, 6))
    labels[:, 0] %= 8
    for row in range(batch_size):  # between one and all of them count
        labels[row, 1 + row % 6 :] = -100
    tokens = torch.randint(32, (batch_size, 6))
    mask = (torch.arange(6) <= torch.arange(batch_size)[:, None] % 5).to(torch.get_default_dtype())
    return {"tokens": tokens, "labels": labels, "mask": mask, "given": torch.tensor(17.0)}
'''
LOSSES = {
    "token mean": ("ce", ["counted"]),
    "two token means": ("ce + 0.3 * next_ce", ["counted", "counted"]),
    "difference of means, halved": ("(ce - 0.3 * masked) / 2", ["counted", "counted"]),
    "mean over a mask": ("masked", ["counted"]),
    "a penalty beside": ("ce + 1e-2 * weights_s", ["counted", "as it is", "as it is"]),
    "weights alone beside a sum": ("tokens_s.sum() + weights_s", ["sum", "as it is", "as it is"]),
    "sum": ("tokens_s.sum()", ["sum"]),
    "sum over samples": ("tokens_s.sum() / tokens.shape[0]", ["as it is"]),
    "sum over a given number": ("(tokens_s * mask.flatten()).sum() / given", ["sum"]),
    "plain mean": ("tokens_s.mean() * 2", ["as it is"]),
    "a floor under the mask": (
        "(tokens_s * mask.flatten()).sum() / mask.sum().clamp(min=1) - next_ce",
        ["counted", "counted"],
    ),
}


def kind(term: LossTerm) -> str:
    return "counted" if term.count else "sum" if term.is_sum else "as it is"


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_is_that_of_one_batch(name: str, tmp_path: Path) -> None:
    """Means of means, and sums that were averaged: the result depended on how the data was cut."""
    loss, kinds = LOSSES[name]
    path = tmp_path / "model.py"
    path.write_text(MODEL.replace("LOSS", loss))
    torch.manual_seed(0)
    plans = HandPlans(capture_model(path, dtype="fp64"), name)
    assert [kind(term) for term in find_loss_terms(plans.capture)] == kinds
    checker = Checker(load_model_source(path), plans.plan(), timeout_s=60)
    for degrees in ({"dp": 2, "micro_batch": 2}, {"pp": 2, "tp": 2, "micro_batch": 2}):
        result = checker.check(plans.plan(**degrees))  # type: ignore[arg-type]  # a table of keywords
        assert result.ok, result


def test_token_losses_are_divided_by_the_global_count() -> None:
    """Labels 7, 3, 5 and 1 with losses 1, 2, 3 and 4 a token: 2.0, and not the mean of means, 2.5."""
    term = LossTerm(_count_of_labels())
    pieces = [{"labels": torch.tensor([0] * n + [-100] * (7 - n))} for n in (7, 3, 5, 1)]
    weights = term.weights(pieces)
    assert sum(w * loss for w, loss in zip(weights, (1.0, 2.0, 3.0, 4.0))) / 4 == 2.0
    with pytest.raises(BadInputError, match="micro-batch 1 of 2 are -100"):
        term.weights([pieces[0], {"labels": torch.full((7,), -100)}])


def _count_of_labels() -> Count:
    graph = torch.fx.Graph()
    graph.output((graph.placeholder("labels"),))
    return Count(torch.fx.GraphModule({}, graph), ("labels",), ignored=-100)
