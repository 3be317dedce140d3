"""Sizes that a mesh does not divide: vocabularies get hidden classes, few key-value heads are shared.

A padded vocabulary that counts its padding, or a shared head whose gradient lacks a neighbour's part, trains
on with wrong gradients; the reference is one process in fp64 on the real sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from graph_fixture import functional_graph
from run_fixture import FlatPrices, HandPlans
from torch import fx, nn
from torch.nn import functional as F

from autoplan.capture import capture_model, load_model_source
from autoplan.planner.layout import choose_layout, tp_degrees
from autoplan.runtime.check import Checker
from autoplan_passes.attention import cut_degrees
from autoplan_passes.collectives import hide_classes
from autoplan_passes.padding import made_divisible, padded_length
from autoplan_passes.placements import parse_placement
from autoplan_passes.shard import dry_group
from autoplan_passes.states import cut_tensor, divides, join_tensors, local_shape, parse_state

MODEL = Path(__file__).parent / "models" / "odd_gpt.py"
SHARED = {f"{name}.{kind}": "S(0)x2" for name in "kv" for kind in ("weight", "bias")}

PLANS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "tp2, tokens cut, stages": {"tp": 2, "sp": True, "pp": 2},
    "tp2 and a ring": {"tp": 2, "cp": 2, "cp_kind": "ring"},
    "uneven stages of uneven pieces": {"tp": 2, "pp": 4, "micro_batch": 1},
    "heads shared": {"tp": 4},
    "heads shared, ZeRO-1": {"tp": 4, "dp": 2, "zero": 1},
    "heads shared, ZeRO-3, tokens cut": {"tp": 4, "dp": 2, "zero": 3, "sp": True},
    "heads shared beside a ring": {"tp": 4, "cp": 2, "cp_kind": "ring"},
    "heads shared, zero bubble": {"tp": 4, "pp": 2, "schedule": "zb_h1"},
}

_made: dict[bool, tuple[HandPlans, Checker]] = {}


def made(shared: bool) -> tuple[HandPlans, Checker]:
    if shared not in _made:
        plans = HandPlans(capture_model(MODEL, dtype="fp64"), "odd", stored=SHARED if shared else {})
        _made[shared] = (plans, Checker(load_model_source(MODEL), plans.plan(), timeout_s=60))
    return _made[shared]


@pytest.mark.parametrize("name", PLANS)
def test_parity(name: str) -> None:
    """51 classes on 2 and 4 ranks, 2 key-value heads on 4, 3 blocks on 2 and 4 stages."""
    plans, checker = made("shared" in name)
    plan = plans.plan(**PLANS[name])
    result = checker.check(plan)
    assert result.ok, str(result)
    rules = [rule for layout in plan.layouts.values() for rule in layout.tp.rules.values()]
    assert any(rule.endswith(" hide_classes") for rule in rules)
    held = [state for layout in plan.layouts.values() for state in layout.tp.parameters.values()]
    assert ("shared" in name) == ("S(0)x2" in held)


# --- classes ------------------------------------------------------------------------------------------


class Head(nn.Module):
    """A head of 5 classes on top of a table of 7 rows, in ways that may be padded and ways that may not."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.table, self.head = how, nn.Embedding(7, 4), nn.Linear(4, 5)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.table(tokens))
        if self.how == "sliced":
            logits, labels = logits[:, :-1], labels[:, 1:]
        rows = logits.reshape(-1, 5).float()
        smoothing = 0.1 if self.how == "smoothed" else 0.0
        loss = F.cross_entropy(rows, labels.reshape(-1), label_smoothing=smoothing)
        return loss + logits.square().mean() if self.how == "also read" else loss


def head_graph(how: str) -> fx.GraphModule:
    tokens = torch.randint(5, (2, 3))
    return functional_graph(Head(how), [tokens, tokens.clone()])


@pytest.mark.parametrize(
    ("how", "padded"), [("plain", True), ("sliced", True), ("smoothed", False), ("also read", False)]
)
def test_only_a_loss_may_read_hidden_classes(how: str, padded: bool) -> None:
    """Smoothing spreads over all classes, a penalty on logits over all columns: padding would change both."""
    graph = head_graph(how)
    names = {node.name for node in made_divisible(graph, 2).graph.nodes if "padded" in node.meta}
    assert any("head" in name for name in names) == padded
    assert made_divisible(graph, 1) is graph


def test_loss_and_gradient_of_hidden_classes() -> None:
    """Logits 0, 1, 2, 3 and label 3 give 0.44019 (1.13334 when the classes are counted twice)."""
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]], dtype=torch.float64, requires_grad=True)
    wide = F.pad(logits, (0, 2), value=9.0)
    loss = F.cross_entropy(hide_classes(wide, 4), torch.tensor([3]))
    loss.backward()
    assert loss.item() == pytest.approx(0.4401897, abs=1e-7)
    assert logits.grad is not None
    assert logits.grad[0].tolist() == pytest.approx([0.0321, 0.0871, 0.2369, -0.3561], abs=1e-4)
    with dry_group("tp", 2, rank=1):  # the second of two ranks has columns 3, 4, 5
        piece = hide_classes(torch.zeros(1, 3), 4, "tp")
    assert piece[0].tolist() == [0.0, torch.finfo(torch.float32).min, torch.finfo(torch.float32).min]


def test_lengths() -> None:
    assert [padded_length(n, 4) for n in (51, 52)] == [52, 52]
    assert padded_length(50257, 2) == 50304 and padded_length(50257, 8) == 50688


def test_padded_parameters_come_back_as_they_were() -> None:
    """What is saved has the model's own rows."""
    placement = parse_placement("S(0) padded(5:6)")
    assert parse_placement(str(placement)) == placement
    whole = torch.rand(5, 3)
    pieces = [placement.cut(whole, {"tp": (rank, 2)}) for rank in range(2)]
    assert [piece.shape[0] for piece in pieces] == [3, 3] and not pieces[1][-1].any()
    assert torch.equal(placement.join(pieces[0], lambda _piece, _axis: pieces), whole)
    alone = parse_placement("R padded(5:6)")
    assert alone.cut(whole, {}).shape == (6, 3) and torch.equal(
        alone.join(alone.cut(whole, {}), lambda _piece, _axis: []), whole
    )


# --- heads ------------------------------------------------------------------------------------------


def test_pieces_that_neighbours_share() -> None:
    state = parse_state("S(0)x2")
    whole = torch.arange(8.0).view(4, 2)
    assert str(state) == "S(0)x2" and local_shape((4, 2), state, 4) == (2, 2)
    pieces = [cut_tensor(whole, state, rank, 4) for rank in range(4)]
    assert torch.equal(pieces[0], pieces[1]) and torch.equal(pieces[3], whole[2:])
    assert torch.equal(join_tensors(pieces, state), whole)
    assert not divides((4, 2), state, 3)


class Repeated(nn.Module):
    """Attention on 8 query heads and 2 key-value heads, repeated as models do it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.q, self.k, self.v = nn.Linear(32, 32), nn.Linear(32, 8), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.how == "expanded":
            k, v = (y[:, :, None].expand(2, 2, 4, 6, 4).reshape(2, 8, 6, 4) for y in (k, v))
        if self.how == "interleaved":
            k, v = (y.repeat_interleave(4, 1) for y in (k, v))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=self.how == "grouped")


@pytest.mark.parametrize("how", ["expanded", "interleaved", "grouped"])
def test_heads_are_shared_however_they_are_repeated(how: str) -> None:
    """The projection of a head is stored and computed by the ranks that use it, with nothing sent."""
    torch.manual_seed(0)
    module, x = Repeated(how).double(), torch.rand(2, 6, 32, dtype=torch.float64)
    graph = functional_graph(module, [x])
    assert tp_degrees(graph) == (1, 2, 4, 8)
    stored = {n.name: parse_state("S(0)x2") for n in graph.graph.nodes if n.name.startswith(("p_k", "p_v"))}
    layout = choose_layout(graph, 4, FlatPrices(), pinned_parameters=stored)
    assert layout.tp.rules["scaled_dot_product_attention"] == "S(1),S(1)x2,S(1)x2->S(1)"
    assert layout.collectives_forward == {"all_gather": 1} and layout.tp.parameters["p_q_weight"] == "S(0)"
    shared = made_divisible(graph, 4)
    values: Mapping[str, Any] = {name: p.detach() for name, p in module.named_parameters()}
    inputs = [values.get(str(n.meta["source"]), x) for n in shared.graph.nodes if n.op == "placeholder"]
    (found,) = shared(*inputs)
    torch.testing.assert_close(found, module(x))


def test_degrees_of_heads() -> None:
    """Degrees that divide both head counts, or that key-value heads divide."""
    graph = functional_graph(Repeated("grouped"), [torch.rand(2, 6, 32)])
    node = next(n for n in graph.graph.nodes if n.name.startswith("scaled_dot_product"))
    assert cut_degrees(node, 16, 2) == (1, 2, 4, 8, 16)
    assert cut_degrees(node, 40, 8) == (1, 2, 4, 8, 40)
    assert cut_degrees(node, 52, 52) == (1, 2, 4, 13, 26, 52)
