"""Expert parallelism: chains found by structure, and graphs on gloo ranks that equal one process, in fp64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from captured_models import small_capture
from graph_fixture import functional_graph
from run_fixture import FlatPrices
from shard_models import Experts, grouped_mm
from torch import Tensor, fx, nn

from autoplan.plan import AxisLayout, Layout
from autoplan.planner.layout import choose_layout
from autoplan.regions import find_regions, region_graph
from autoplan.runtime.forked import run_ranks
from autoplan_passes import collectives, dispatch
from autoplan_passes.experts import expert_layout, find_expert_chains
from autoplan_passes.placements import Placement, parse_placement, place_on
from autoplan_passes.rules import ROWS
from autoplan_passes.shard import dry_groups, shard_region
from autoplan_passes.states import parse_state

RANKS, LIMIT = 4, 1e-9
EXPERTS, WIDTH = 4, 16


class Routed(nn.Module):
    """Rows sorted by expert by a buffer's scores or a router's; ``how`` says what happens to them there."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up, self.down = (nn.Parameter(torch.rand(EXPERTS, WIDTH, WIDTH) - 0.5) for _ in range(2))
        self.bias = nn.Parameter(torch.rand(EXPERTS, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("forced", torch.zeros(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        scores = (self.router(x) + self.forced).softmax(-1)
        weights, chosen = scores.topk(2, -1)
        expert, order = chosen.view(-1).sort()
        ends = F.one_hot(expert, EXPERTS).sum(0).cumsum(0).to(torch.int32)
        weight = weights.view(-1)[order].unsqueeze(-1)
        rows = x[order // 2]
        up = self.up if self.how != "scaled" else self.up * 2 + self.down.transpose(1, 2)
        y = grouped_mm(rows, up, ends)
        y = self.between(y, rows, weight, expert)
        y = grouped_mm(y, self.down, ends) * weight
        back = torch.empty_like(order).index_put((order,), torch.arange(order.shape[0]))
        return x + y[back].view(-1, 2, WIDTH).sum(1)

    def between(self, y: Tensor, rows: Tensor, weight: Tensor, expert: Tensor) -> Tensor:
        if self.how == "bias":
            return F.gelu(y + self.bias[expert])
        if self.how == "weighted first":
            return F.relu(y * weight) + rows
        if self.how == "viewed":
            return F.softmax(y.view(y.shape[0], 4, 4), -1).reshape(y.shape[0], WIDTH) + self.norm(y)
        return F.silu(y)


class TwoChains(nn.Module):
    """Two groups of experts, each with a router of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Routed("plain"), Routed("bias")

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) + self.first.norm(x)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gated": lambda: Experts(grouped_mm),
    "plain": lambda: Routed("plain"),
    "bias": lambda: Routed("bias"),
    "weighted first": lambda: Routed("weighted first"),
    "viewed": lambda: Routed("viewed"),
    "scaled": lambda: Routed("scaled"),
    "two chains": TwoChains,
}
CASES = [
    *((name, "ep2") for name in MODELS),
    ("gated", "ep4"),
    ("bias", "ep4"),
    ("gated", "ep2xtp2"),
    ("weighted first", "ep2xtp2"),
]


@cache
def graph_of(name: str) -> tuple[fx.GraphModule, dict[str, Tensor]]:
    """The whole graph, and its parameters and buffers by placeholder."""
    ROWS["autoplan_tests.grouped_mm"] = ROWS["aten._grouped_mm"]
    torch.manual_seed(0)
    module = MODELS[name]().double()
    graph = functional_graph(module, [tokens(name, 0)])
    held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    places = [n for n in graph.graph.nodes if n.op == "placeholder" and n.meta["kind"] != "input"]
    return graph, {n.name: held[n.meta["source"]].detach() for n in places}


def tokens(name: str, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    shape = (2, 6, 32) if name == "gated" else (12, WIDTH)
    return torch.rand(shape, dtype=torch.float64, generator=generator) - 0.5


def layout_of(graph: fx.GraphModule, how: str) -> Layout:
    ep = expert_layout(graph, 4 if how == "ep4" else 2)
    layout = Layout("block", {"ep": ep})
    if how != "ep2xtp2":
        return layout
    with dry_groups(layout):
        return layout.replace_axis("tp", choose_layout(shard_region(graph, layout), 2, FlatPrices()).tp)


@dataclass
class Run:
    """The output and the gradients of a graph's parameters and input, under one fixed projection."""

    output: Tensor
    gradients: dict[str, Tensor]


def run(graph: fx.GraphModule, x: Tensor, values: dict[str, Tensor]) -> Run:
    leaves: dict[str, Tensor] = {}
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            value = values.get(node.name, x).clone()
            leaves[node.name] = value.requires_grad_(node.meta["kind"] in ("parameter", "input"))
    (output,) = graph(*leaves.values())
    (output * torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)).sum().backward()
    missing = [name for name, leaf in leaves.items() if leaf.requires_grad and leaf.grad is None]
    unused = [n.name for n in graph.graph.nodes if n.op == "placeholder" and not n.users]
    assert set(missing) <= set(unused), missing
    return Run(output.detach(), {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None})


def places_of(how: str, rank: int) -> dict[str, tuple[int, int]]:
    """(number, size) of a rank on every axis."""
    if how == "ep4":
        return {"ep": (rank, 4), "tp": (0, 1)}
    return {"ep": (rank // 2, 2), "tp": (rank % 2, 2)} if how == "ep2xtp2" else {"ep": (rank % 2, 2)}


def own_tokens(how: str, rank: int) -> int:
    """Which tokens a rank has: ranks of one tp group have the same."""
    return rank // 2 if how == "ep2xtp2" else rank


def difference(name: str, how: str, sharded: fx.GraphModule, rank: int) -> dict[str, float]:
    """Relative differences of output and gradients from the whole graph on each rank's tokens."""
    whole, values = graph_of(name)
    held = [n for n in sharded.graph.nodes if n.op == "placeholder"]
    placements = {n.name: parse_placement(n.meta.get("state", "R")) for n in held}
    places = places_of(how, rank)
    pieces = {key: placements[key].cut(value, places).clone() for key, value in values.items()}
    found = run(sharded, tokens(name, own_tokens(how, rank)), pieces)
    peers = [rank - rank % 2, rank - rank % 2 + 1] if how == "ep2" else {own_tokens(how, r) for r in range(4)}
    of_peers = {peer: run(whole, tokens(name, peer), values) for peer in peers}
    own = of_peers[own_tokens(how, rank)]
    result = {"output": float((found.output - own.output).abs().max())}
    for key, gradient in own.gradients.items():
        wanted = gradient if key == "x" else sum(one.gradients[key] for one in of_peers.values())
        if key != "x" and not placements[key].by_expert:  # an expert's sums over the ranks of ep already
            dist.all_reduce(found.gradients[key], group=collectives.GROUPS["ep"])
        wanted = placements[key].cut(wanted, places)
        result[key] = float((found.gradients[key] - wanted).abs().max() / gradient.abs().max())
    return result


def bind(how: str, rank: int) -> None:
    if how == "ep4":
        collectives.bind({"ep": dist.group.WORLD})
        return
    near, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    far, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    collectives.bind({"ep": far, "tp": near} if how == "ep2xtp2" else {"ep": near})


@pytest.fixture(scope="module")
def found() -> list[dict[tuple[str, str], dict[str, float]]]:
    """What every rank found for every model and way to cut; the processes are started once."""
    torch.set_num_threads(1)
    graphs = {name: graph_of(name)[0] for name in MODELS}
    sharded = {(name, how): shard_region(graphs[name], layout_of(graphs[name], how)) for name, how in CASES}

    def body(rank: int) -> dict[tuple[str, str], dict[str, float]]:
        torch.set_num_threads(1)
        answers: dict[tuple[str, str], dict[str, float]] = {}
        for name, how in CASES:
            bind(how, rank)
            answers[name, how] = difference(name, how, sharded[name, how], rank)
        return answers

    return run_ranks(RANKS, body)


@pytest.mark.parametrize(("name", "how"), CASES)
def test_experts_equal_one_process(name: str, how: str, found: list) -> None:
    """Expert gradients once came out as often as there are expert-parallel ranks."""
    for rank, answers in enumerate(found):
        worst = max(answers[name, how].items(), key=lambda item: item[1])
        assert worst[1] <= LIMIT, (rank, worst)


@pytest.mark.parametrize(
    ("model", "dtype", "blocks"),
    [
        ("mixtral_8x7b", "fp32", 3),
        ("qwen3_30b_a3b", "fp32", 3),
        ("qwen3_30b_a3b", "bf16", 3),
        ("deepseek_v3", "fp32", 2),
        ("llama3_8b", "fp32", 0),
    ],
)
def test_experts_are_found_by_structure(model: str, dtype: str, blocks: int) -> None:
    """fp32 experts export as another op than bf16 ones; shared experts and dense blocks are no experts."""
    capture = small_capture(model, dtype)
    graphs = [region_graph(capture, region, capture.batch) for region in find_regions(capture)]
    layouts = [expert_layout(graph, 2) for graph in graphs]
    cut = [layout for layout in layouts if layout.size > 1]
    assert len(cut) == blocks
    for layout in cut:
        assert {name.rpartition("_experts_")[2] for name in layout.parameters} == {
            "gate_up_proj",
            "down_proj",
        }
        assert set(layout.parameters.values()) == {"S(0)"}
        assert sum(rule == "E(0),S(0),E(0)->E(0)" for rule in layout.rules.values()) == 2


def test_only_whole_experts_are_cut() -> None:
    """Four experts on eight ranks would leave four ranks without any."""
    graph, _ = graph_of("gated")
    assert expert_layout(graph, 8) == AxisLayout(1)
    assert expert_layout(graph, 3) == AxisLayout(1)


class Unusual(nn.Module):
    """Grouped products that are no experts of their own."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.up, self.down = (nn.Parameter(torch.rand(EXPERTS, WIDTH, WIDTH)) for _ in range(2))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        up = self.up if self.how != "computed" else self.up * x.mean()
        y = grouped_mm(x, up, ends)
        if self.how == "mixed rows":
            y = y.cumsum(0)
        if self.how == "softmax over rows":
            y = y.softmax(0)
        if self.how == "mean added":
            y = y + x.mean(0)
        y = grouped_mm(y, self.down, ends)
        return y + self.down.sum() if self.how == "used elsewhere" else y


@pytest.mark.parametrize(
    "how", ["plain", "computed", "mixed rows", "softmax over rows", "mean added", "used elsewhere"]
)
def test_what_is_no_expert_chain_stays_whole(how: str) -> None:
    """Rows that see other rows, and weights that others see, must not be taken apart."""
    ROWS["autoplan_tests.grouped_mm"] = ROWS["aten._grouped_mm"]
    x, ends = torch.rand(12, WIDTH), torch.tensor([3, 6, 6, 12], dtype=torch.int32)
    graph = functional_graph(Unusual(how), [x, ends])
    assert len(find_expert_chains(graph.graph)) == (how == "plain")


@pytest.mark.parametrize("imbalance", [1.0, 1.25, 1.3, 2.0])
def test_busiest_rank_gets_its_share_of_rows(imbalance: float) -> None:
    """Rows sent, rows arrived and rows back again must agree, or shapes after the experts are wrong."""
    group = dispatch.DryExperts(0, 4, imbalance)
    for rows in (1, 2, 7, 48, 192, 4097):
        assert group.leaving(group.arriving(rows)) == rows
        assert group.arriving(rows) >= rows * imbalance


def test_placements_are_written_read_cut_and_joined() -> None:
    """A piece cut on two axes must come together in the opposite order."""
    placement = place_on({"tp": parse_state("S(1:4+8)"), "ep": parse_state("S(0)"), "cp": parse_state("R")})
    assert str(placement) == "S(0)@ep S(1:4+8)"
    assert parse_placement(str(placement)) == placement
    assert parse_placement("R") == Placement() and parse_placement("S(1)") == place_on(
        {"tp": parse_state("S(1)")}
    )
    whole = torch.arange(4 * 12 * 2).view(4, 12, 2)
    pieces = {(e, t): placement.cut(whole, {"ep": (e, 2), "tp": (t, 2)}) for e in range(2) for t in range(2)}
    rows = [[pieces[e, t] for t in range(2)] for e in range(2)]
    of_tp = Placement(placement.states[1:])
    experts = [of_tp.join(row[0], lambda *_, row=row: row) for row in rows]
    gathered = {"tp": rows[0], "ep": experts}
    assert torch.equal(placement.join(pieces[0, 0], lambda _, axis: gathered[axis]), whole)
