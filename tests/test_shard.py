"""Sharded graphs on two gloo ranks: outputs and every gradient equal those of the whole graph, in fp64."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from graph_fixture import functional_graph
from shard_models import (
    Adapter,
    Diffusion,
    Embed,
    Experts,
    FusedBlock,
    GroupedBlock,
    Head,
    Rotary,
    Scan,
    grouped_mm,
)
from torch import Tensor, fx, nn

from autoplan.errors import BadPlanError
from autoplan.plan import NO_AXIS, AxisLayout, Layout
from autoplan.planner.layout import Boundary, LayoutSettings, choose_layout
from autoplan.runtime.forked import run_ranks
from autoplan_passes import collectives
from autoplan_passes.candidates import FEATURES_AND_TOKENS, TOKENS_ALONE, Cutting, find_differentiable
from autoplan_passes.conversions import TABLE, chains
from autoplan_passes.dim_kinds import batch_size, find_dim_kinds, token_state
from autoplan_passes.rules import ROWS
from autoplan_passes.shard import parse_rule, shard_region
from autoplan_passes.states import REPLICATE, State, cut_tensor, parse_state

WAYS = 2
SEEDS = range(3)
LIMIT = 1e-9


def hidden() -> Tensor:
    return torch.rand(2, 8, 32, dtype=torch.float64)


def tokens() -> Tensor:
    return torch.randint(0, 64, (2, 8))


def image() -> Tensor:
    return torch.rand(2, 4, 8, 8, dtype=torch.float64)


MODELS: dict[str, tuple] = {
    "fused split": (lambda: FusedBlock("split"), (hidden,)),
    "fused view": (lambda: FusedBlock("view"), (hidden,)),
    "attention by hand": (lambda: FusedBlock("by hand"), (hidden,)),
    "grouped": (lambda: GroupedBlock(2, "repeated"), (hidden,)),
    "grouped native": (lambda: GroupedBlock(2, "native"), (hidden,)),
    "grouped fused": (lambda: GroupedBlock(2, "fused"), (hidden,)),
    "one kv head": (lambda: GroupedBlock(1, "native"), (hidden,)),
    "one kv head fused": (lambda: GroupedBlock(1, "fused"), (hidden,)),
    "latent attention": (Rotary, (hidden,)),
    "embedding": (Embed, (tokens,)),
    "head": (Head, (hidden, tokens)),
    "diffusion": (Diffusion, (image, lambda: torch.rand(2, dtype=torch.float64), image)),
    "experts": (lambda: Experts(grouped_mm), (hidden,)),
    "state space": (Scan, (lambda: torch.rand(2, 8, 16, dtype=torch.float64),)),
    "adapter": (Adapter, (hidden,)),
}


class RandomPrices:
    """Arbitrary times, cut ops cheaper on average: layouts that no one would write by hand."""

    def __init__(self, seed: int) -> None:
        self.random, self.known = random.Random(seed), dict[tuple[str, bool], float]()

    def operation_s(self, node: fx.Node, fraction: float, /) -> float:
        key = (node.name, fraction < 1)
        return self.known.setdefault(key, self.random.random() * (0.4 if fraction < 1 else 1.0))

    def collective_s(self, kind: str, sent_bytes: float, /) -> float:
        return self.random.random() * 0.5


class FlatPrices:
    """Compute costs, sending hardly: everything that can be cut is."""

    def operation_s(self, node: fx.Node, fraction: float, /) -> float:
        return fraction * 1e-3

    def collective_s(self, kind: str, sent_bytes: float, /) -> float:
        return 1e-5 + sent_bytes * 1e-9


@cache
def graph_of(name: str) -> fx.GraphModule:
    torch.manual_seed(0)
    build, inputs = MODELS[name]
    module: nn.Module = build().double()
    graph = functional_graph(module, [make() for make in inputs], needs_gradient=name != "diffusion")
    trained = {key for key, p in module.named_parameters() if p.requires_grad}
    values = dict(module.named_parameters())
    inputs_left = iter(make() for make in inputs)
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            is_parameter = node.meta["kind"] == "parameter"
            node.meta["real"] = values[node.meta["source"]].detach() if is_parameter else next(inputs_left)
            if is_parameter:
                node.meta["requires_grad"] = node.meta["source"] in trained
    return graph


@dataclass
class Run:
    """Outputs of a graph and the gradients of its placeholders, under one fixed random projection."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor | None]


def run(
    graph: fx.GraphModule, whole: fx.GraphModule, layout: AxisLayout = NO_AXIS, rank: int = 0, ways: int = 1
) -> Run:
    real = {n.name: n.meta["real"] for n in whole.graph.nodes if n.op == "placeholder"}
    differentiable = {n.name for n in find_differentiable(whole.graph)}
    leaves: dict[str, Tensor] = {}
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            state = placed(layout, node.name)
            leaves[node.name] = cut_tensor(real[node.name], state, rank, ways).clone()
            leaves[node.name].requires_grad_(node.name in differentiable)
    outputs = list(graph(*leaves.values()))
    generator = torch.Generator().manual_seed(5)
    shapes = [n.meta["val"].shape for n in whole.graph.output_node().all_input_nodes]
    noise = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    own = [cut_tensor(x, output_state(layout, i), rank, ways) for i, x in enumerate(noise)]
    loss = sum((x * y).sum() for x, y in zip(outputs, own))
    assert isinstance(loss, Tensor)
    loss.backward()
    gradients = {name: leaf.grad for name, leaf in leaves.items() if name in differentiable}
    return Run([x.detach() for x in outputs], gradients)


def placed(layout: AxisLayout, name: str) -> State:
    return parse_state({**layout.inputs, **layout.parameters}.get(name, "R"))


def output_state(layout: AxisLayout, position: int) -> State:
    return parse_state(layout.outputs.get(str(position), "R"))


def differences(
    sharded: fx.GraphModule, whole: fx.GraphModule, layout: AxisLayout, reference: Run, rank: int
) -> dict[str, float]:
    """max|d| / max(max|g|, 1e-2 G) of every output and gradient; G the model's largest gradient entry."""
    found = run(sharded, whole, layout, rank, WAYS)
    largest = max(float(g.abs().max()) for g in reference.gradients.values() if g is not None)
    expected = [cut_tensor(y, output_state(layout, i), rank, WAYS) for i, y in enumerate(reference.outputs)]
    result = {
        f"output {i}": float((x - y).abs().max() / y.abs().max())
        for i, (x, y) in enumerate(zip(found.outputs, expected))
    }
    for name, gradient in reference.gradients.items():
        assert gradient is not None, name
        own = found.gradients[name]
        if own is None:
            result[f"no gradient of {name}"] = 1.0
            continue
        if placed(layout, name).kind == "R*":  # summed once a step
            torch.distributed.all_reduce(own)
        wanted = cut_tensor(gradient, placed(layout, name), rank, WAYS)
        result[name] = float((own - wanted).abs().max()) / max(float(gradient.abs().max()), 1e-2 * largest)
    return result


@cache
def layout_of(key: str) -> Layout:
    """``"head/chosen"``: the sensible layout of a model; ``"head/1"``: an odd one, from random prices;
    ``"head/tokens alone chosen"``: one that cuts tokens."""
    ROWS["autoplan_tests.grouped_mm"] = ROWS["aten._grouped_mm"]
    name, kind = key.split("/")
    graph, (cutting, _, how) = graph_of(name), kind.rpartition(" ")
    odd = LayoutSettings(elementwise=1.0, memory_s_per_byte=(0.0,))
    prices = FlatPrices() if how == "chosen" else RandomPrices(int(how))
    if cutting:
        odd = LayoutSettings(1.0, (0.0,), cutting=CUTTINGS[cutting])
        border = token_boundary(graph, CUTTINGS[cutting].zigzag)
        return choose_layout(graph, WAYS, prices, settings=odd, boundary=border)
    return choose_layout(graph, WAYS, prices, settings=None if how == "chosen" else odd)


def layouts() -> dict[str, Layout]:
    """Every layout of every model."""
    cut = [f"{kind} {how}" for kind in CUTTINGS for how in ways_to_choose(kind)]
    keys = [f"{name}/{kind}" for name in MODELS for kind in ("chosen", *SEEDS, *cut)]
    return {key: layout_of(key) for key in keys}


CUTTINGS = {
    "tokens and features": FEATURES_AND_TOKENS,
    "tokens alone": TOKENS_ALONE,
    "tokens round a ring": Cutting(features=False, tokens=True, ring=True),
    "tokens in zigzag": Cutting(features=False, tokens=True, zigzag=True, ring=True),
}


def ways_to_choose(kind: str) -> tuple[str, ...]:
    """By good prices; where that leaves much to choose, by random ones too."""
    return ("chosen",) if CUTTINGS[kind].ring else ("chosen", "0")


RING_MODELS = ("fused split", "grouped", "grouped native", "one kv head", "latent attention")


def token_boundary(graph: fx.GraphModule, zigzag: bool) -> Boundary:
    """What flows in and out is cut along its tokens where it has any."""
    kinds, batch = find_dim_kinds(graph.graph), batch_size(graph.graph)
    differentiable = find_differentiable(graph.graph)

    def state(node: fx.Node) -> State:
        cut = token_state(kinds[node], node.meta["val"].shape, batch, WAYS, zigzag)
        return cut if cut and node in differentiable else REPLICATE

    inputs = [n for n in graph.graph.nodes if n.meta.get("kind") == "input"]
    outputs = graph.graph.output_node().all_input_nodes
    return Boundary({n.name: state(n) for n in inputs}, {i: state(n) for i, n in enumerate(outputs)})


STATES = [parse_state(text) for text in ("R", "R*", "P", "S(0)", "S(1)", "S(1:4+8)", "Z(1)", "Z(1:4+8)")]
PAIRS = [(a, b) for a in STATES for b in STATES if a != b]


def parts_of(value: Tensor, state: State) -> list[Tensor]:
    """What each rank holds of a value; a partial sum is two random parts."""
    if state.kind == "P":
        noise = torch.rand(value.shape, dtype=value.dtype, generator=torch.Generator().manual_seed(9))
        return [noise, value - noise]
    return [cut_tensor(value, state, rank, WAYS).clone() for rank in range(WAYS)]


def gradient_state(state: State) -> State:
    return {"P": parse_state("R"), "R*": parse_state("P")}.get(state.kind, state)


def sample(seed: int) -> Tensor:
    return torch.rand(4, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def convert(source: State, target: State, rank: int) -> tuple[Tensor, Tensor]:
    """This rank's converted piece of the sample, and its piece of the gradient."""
    leaf = parts_of(sample(0), source)[rank].requires_grad_()
    values = {source: leaf}
    for step in chains(source, frozenset({target})):
        sections = step.sections(sample(0).shape)
        values[step.target] = step.function(values[step.source], *step.arguments, "tp", *sections)
    values[target].backward(parts_of(sample(1), gradient_state(target))[rank])
    assert leaf.grad is not None
    return values[target].detach(), leaf.grad


def assert_holds(pieces: Sequence[Tensor], state: State, whole: Tensor) -> None:
    if state.kind == "P":
        pieces = [pieces[0] + pieces[1]] * WAYS
    for rank, piece in enumerate(pieces):
        torch.testing.assert_close(piece, cut_tensor(whole, state, rank, WAYS))


Differences = dict[str, dict[str, float]]
Converted = dict[tuple[State, State], tuple[Tensor, Tensor]]


@dataclass
class Ranks:
    """What both ranks found: differences by layout, pieces by conversion."""

    sharded: dict[str, fx.GraphModule]
    differences: list[Differences]
    converted: list[Converted]

    def worst(self, key: str) -> tuple[str, float]:
        found = [item for found in self.differences for item in found[key].items()]
        return max(found, key=lambda item: item[1])


@pytest.fixture(scope="module")
def ranks() -> Ranks:
    """The processes are started once, for every layout and every conversion."""
    torch.set_num_threads(1)
    sharded = {key: shard_region(graph_of(key.split("/")[0]), layout) for key, layout in layouts().items()}
    references = {name: run(graph_of(name), graph_of(name)) for name in MODELS}

    def body(rank: int) -> tuple[Differences, Converted]:
        torch.set_num_threads(1)
        collectives.bind({"tp": torch.distributed.group.WORLD})
        found: Differences = {}
        for key, graph in sharded.items():
            name = key.split("/")[0]
            found[key] = differences(graph, graph_of(name), layouts()[key].tp, references[name], rank)
        return found, {pair: convert(*pair, rank) for pair in PAIRS}

    answers = run_ranks(WAYS, body)
    return Ranks(sharded, [found for found, _ in answers], [converted for _, converted in answers])


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0]} to {pair[1]}")
def test_conversions_keep_value_and_gradient(pair: tuple[State, State], ranks: Ranks) -> None:
    """Where the gradient of P is taken for partial, sums come out twice as large."""
    source, target = pair
    assert_holds([found[pair][0] for found in ranks.converted], target, sample(0))
    assert_holds([found[pair][1] for found in ranks.converted], gradient_state(source), sample(1))


@pytest.mark.parametrize("name", MODELS)
def test_chosen_layout_equals_one_process(name: str, ranks: Ranks) -> None:
    """Replicated parameters used on shards (norms, rotary heads) must not keep rank-local gradients."""
    tensor, difference = ranks.worst(f"{name}/chosen")
    assert difference <= LIMIT, (tensor, difference)
    assert not layouts()[f"{name}/chosen"].replicated_ops


@pytest.mark.parametrize("name", MODELS)
def test_random_layouts_equal_one_process(name: str, ranks: Ranks) -> None:
    """Odd prices reach rules and conversions that good layouts never use."""
    for seed in SEEDS:
        tensor, difference = ranks.worst(f"{name}/{seed}")
        assert difference <= LIMIT, (seed, tensor, difference)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", CUTTINGS)
def test_cut_tokens_equal_one_process(name: str, kind: str, ranks: Ranks) -> None:
    """Activations cut along their tokens at the region's boundary, and inside as the prices have it; tokens
    merged with samples were cut between samples."""
    for how in ways_to_choose(kind):
        layout = layouts()[f"{name}/{kind} {how}"]
        tensor, difference = ranks.worst(f"{name}/{kind} {how}")
        assert difference <= LIMIT, (how, tensor, difference)
        if CUTTINGS[kind].ring and name in RING_MODELS:
            assert any("ring_attention" in rule for rule in layout.tp.rules.values())
        if kind == "tokens alone":
            assert set(layout.tp.parameters.values()) <= {"R", "R*"}
    cut = {name: layouts()[f"{name}/tokens alone chosen"].tp for name in MODELS}
    assert sum("S(" in text for layout in cut.values() for text in layout.rules.values()) > 200


def test_random_layouts_use_most_conversions(ranks: Ranks) -> None:
    """A fuzz that never converts proves nothing."""
    nodes = [n for graph in ranks.sharded.values() for n in graph.graph.nodes if n.op == "call_function"]
    unused = {function for _, _, function in TABLE.values()} - {node.target for node in nodes}
    assert len(unused) <= 2, unused


def test_one_rank_is_the_graph_itself() -> None:
    """tp=1 changes nothing but views, whose strides may differ by chip."""
    whole = graph_of("fused split")
    alone = shard_region(whole, choose_layout(whole, 1, FlatPrices()))
    targets = [str(n.target).replace("reshape", "view") for n in alone.graph.nodes]
    assert targets == [str(n.target).replace("_unsafe_view", "view") for n in whole.graph.nodes]
    assert {n.meta["state"] for n in alone.graph.nodes if n.meta.get("kind") == "parameter"} == {"R"}


def test_sent_bytes_are_on_the_nodes() -> None:
    """Costs are read off the local graph, so it must say what the layout says."""
    layout = layouts()["grouped/chosen"]
    local = shard_region(graph_of("grouped"), layout)
    sent = [one for n in local.graph.nodes for one in n.meta.get("collective", ())]
    assert sum(forward_bytes for _, _, forward_bytes, _, _ in sent) == layout.collective_bytes_forward
    assert sum(backward_bytes for *_, backward_bytes, _ in sent) == layout.collective_bytes_backward
    for kind, count in layout.collectives_forward.items():
        assert sum(forward == kind for forward, *_ in sent) == count


def test_foreign_layout_is_refused() -> None:
    """A stale plan must not fail deep inside a reshape."""
    graph = graph_of("fused split")
    with pytest.raises(BadPlanError, match="no op of this region"):
        shard_region(graph, Layout("block", {"tp": AxisLayout(WAYS, rules={"nonsense": "R->R"})}))
    with pytest.raises(BadPlanError, match="does not fit"):
        shard_region(graph, Layout("block", {"tp": AxisLayout(WAYS, rules={"linear": "R*,S(0),R->S(2)"})}))


@pytest.mark.parametrize("text", ["R,R->R", "R*,S(0:64+32+32)->S(2)", "S(0),R->P vocab_embedding", "->S(1)"])
def test_rules_are_written_and_read(text: str) -> None:
    assert str(parse_rule(text)) == text
