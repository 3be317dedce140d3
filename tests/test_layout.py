"""The linear program finds the layouts that people found, at the costs that arithmetic gives."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from graph_fixture import functional_graph
from shard_models import Embed, FusedBlock, GroupedBlock, Head
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autoplan.errors import BadInputError
from autoplan.plan import Layout
from autoplan.planner.layout import (
    Boundary,
    Builder,
    LayoutSettings,
    attention_heads,
    choose_layout,
    price_layout,
    tp_degrees,
)
from autoplan.planner.layout_pricing import SEQUENCE_SETTINGS
from autoplan_passes.calls import Call, op_name, shape_of, tensor_inputs
from autoplan_passes.rules import Rule
from autoplan_passes.states import State, parse_state, shard

HIDDEN, FFN, HEADS, KV, TOKENS, VOCABULARY = 4096, 14336, 32, 8, 8192, 128256
ACTIVATION_BYTES = HIDDEN * TOKENS * 2


@dataclass(frozen=True)
class ChipPrices:
    """A 250 TFLOP/s chip with 2 TB/s of memory; ``tp`` ranks at 200 GB/s and 10 us."""

    tp: int
    flops_per_s: float = 250e12
    memory_bytes_per_s: float = 2e12
    link_bytes_per_s: float = 200e9
    latency_s: float = 10e-6

    def operation_s(self, node: fx.Node, fraction: float, /) -> float:
        call = Call(node)
        if op_name(node) == "aten.linear":
            flops = 2 * node.meta["val"].numel() * call.shapes[1][1]
        elif op_name(node) == "aten.scaled_dot_product_attention":
            b, h, t, d = call.shapes[0]
            flops = 2 * b * h * t * t * d
        else:
            read = () if op_name(node) == "aten.embedding" else call.tensors
            values = [n.meta["val"] for n in (*read, node)]
            moved = sum(value.nbytes for value in values if isinstance(value, Tensor))
            return 3 * fraction * moved / self.memory_bytes_per_s
        return 3 * fraction * flops / self.flops_per_s

    def collective_s(self, kind: str, sent_bytes: float, /) -> float:
        passes = 2 if kind == "all_reduce" else 1
        return self.latency_s + passes * (self.tp - 1) / self.tp * sent_bytes / self.link_bytes_per_s


class LlamaBlock(nn.Module):
    """A block of the published 8B sizes, as anyone would write it."""

    def __init__(self) -> None:
        super().__init__()
        d = HIDDEN // HEADS
        self.q, self.k, self.v, self.o = (
            nn.Linear(HIDDEN, n, bias=False) for n in (HIDDEN, KV * d, KV * d, HIDDEN)
        )
        self.gate, self.up = (nn.Linear(HIDDEN, FFN, bias=False) for _ in range(2))
        self.down = nn.Linear(FFN, HIDDEN, bias=False)
        self.norm_1, self.norm_2 = (nn.Parameter(torch.ones(HIDDEN)) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        def norm(y: Tensor, scale: Tensor) -> Tensor:
            z = y.float()
            return scale * (z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + 1e-5)).to(y.dtype)

        def turn(y: Tensor) -> Tensor:
            half = y.shape[-1] // 2
            return y * cos + torch.cat((-y[..., half:], y[..., :half]), -1) * sin

        b, t, _ = x.shape
        y = norm(x, self.norm_1)
        q, k, v = (m(y).view(b, t, -1, HIDDEN // HEADS).transpose(1, 2) for m in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True, enable_gqa=True)
        x = x + self.o(a.transpose(1, 2).reshape(b, t, -1))
        y = norm(x, self.norm_2)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)

    def forward(self, ids: Tensor) -> Tensor:
        return self.tokens(ids)


def unreal_graph(
    module: type[nn.Module], shapes: list[tuple[int, ...]], dtype: torch.dtype
) -> fx.GraphModule:
    """The graph of a bf16 module whose parameters hold no memory."""
    with torch.device("meta"):
        made = module().to(torch.bfloat16)
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = [torch.empty(shape, dtype=dtype) for shape in shapes]
        return functional_graph(made.to_empty(device="cpu"), inputs)


@pytest.fixture(scope="module")
def block() -> fx.GraphModule:
    rotary = (1, 1, TOKENS, HIDDEN // HEADS)
    graph = unreal_graph(LlamaBlock, [(1, TOKENS, HIDDEN), rotary, rotary], torch.bfloat16)
    for node in graph.graph.nodes:
        if node.name in ("cos", "sin"):
            node.meta["requires_grad"] = False
    return graph


@pytest.fixture(scope="module")
def table() -> fx.GraphModule:
    return unreal_graph(Table, [(1, TOKENS)], torch.long)


WEIGHTS = {
    **dict.fromkeys(("p_q_weight", "p_k_weight", "p_v_weight", "p_gate_weight", "p_up_weight"), "S(0)"),
    **dict.fromkeys(("p_o_weight", "p_down_weight"), "S(1)"),
}
MEGATRON = {**WEIGHTS, "p_norm_1": "R", "p_norm_2": "R"}


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_megatron_is_found(block: fx.GraphModule, tp: int) -> None:
    """Columns, rows, two all-reduces each way: nobody tells the solver, and the price is what it costs."""
    started_s = time.perf_counter()
    prices = ChipPrices(tp)
    settings = LayoutSettings(elementwise=0.0, memory_s_per_byte=(0.0,))
    priced = price_layout(block, tp, prices, {}, settings)
    assert time.perf_counter() - started_s < 3  # 0.05 s on an idle core
    layout = priced.layout
    assert layout.tp.parameters == MEGATRON
    assert layout.collectives_forward == {"all_reduce": 2}
    assert layout.collectives_backward == {"all_reduce": 2}
    assert layout.collective_bytes_forward == layout.collective_bytes_backward == 2 * ACTIVATION_BYTES
    assert priced.integral and not layout.replicated_ops
    compute_s = sum(
        prices.operation_s(n, 1 / tp)
        for n in block.graph.nodes
        if op_name(n) in ("aten.linear", "aten.scaled_dot_product_attention")
    )
    assert priced.objective_s == pytest.approx(
        compute_s + 4 * prices.collective_s("all_reduce", ACTIVATION_BYTES), rel=1e-4
    )


def test_megatron_is_found_under_default_settings(block: fx.GraphModule) -> None:
    """The prices of memory and of elementwise work must not pull the optimum away."""
    layout = choose_layout(block, 8, ChipPrices(8), region_class="block")
    assert layout.tp.parameters == MEGATRON
    assert (layout.collectives_forward, layout.region_class) == ({"all_reduce": 2}, "block")


def test_priced_elementwise_work_cuts_the_residual(block: fx.GraphModule) -> None:
    """With elementwise work priced in full, norms on the cut hidden dim pay: a true optimum."""
    whole = LayoutSettings(elementwise=1.0, memory_s_per_byte=(0.0,))
    priced = price_layout(block, 8, ChipPrices(8), {}, whole)
    builder = Builder(block.graph, 8, ChipPrices(8), whole, {})
    builder.build()
    megatron = choose_layout(block, 8, ChipPrices(8))
    assert priced.objective_s < cost_of(builder, megatron) - 1e-4
    assert priced.layout.tp.rules["add_3"] == "S(2),S(2)->S(2)"
    assert priced.layout.collectives_forward["all_reduce"] >= 2  # of one number a token each


@pytest.mark.parametrize("tp", [2, 8])
def test_megatron_with_sequence_parallelism_is_found(block: fx.GraphModule, tp: int) -> None:
    """Tokens cut at the boundary: two gathers and two scattered sums each way, norms on pieces, their
    gradients summed once a step; nobody tells the solver."""
    prices, border = ChipPrices(tp), Boundary({"x": shard(1)}, {0: shard(1)})
    priced = price_layout(block, tp, prices, {}, SEQUENCE_SETTINGS, boundary=border)
    assert priced.layout.tp.parameters == {**WEIGHTS, "p_norm_1": "R*", "p_norm_2": "R*"}
    assert priced.layout.collectives_forward == {"all_gather": 2, "reduce_scatter": 2}
    # the gathers again beside the products, and the duals of what the forward sent
    assert priced.layout.collectives_backward == {"all_gather": 4, "reduce_scatter": 2}
    assert priced.layout.collective_bytes_forward == 4 * ACTIVATION_BYTES
    assert priced.integral


def test_slow_links_still_cut_parameters(block: fx.GraphModule) -> None:
    """At 0.1 GB/s replicating everything is fastest, but a tp group that holds everything twice is wasted."""
    slow = ChipPrices(2, link_bytes_per_s=1e8)
    free = price_layout(block, 2, slow, {}, LayoutSettings(memory_s_per_byte=(0.0,)))
    assert set(free.layout.tp.parameters.values()) == {"R"}
    cut = choose_layout(block, 2, slow).tp.parameters
    assert {name: cut[name] for name in cut if name.endswith("weight")} == WEIGHTS


def test_untied_table_is_cut_along_hidden(table: fx.GraphModule) -> None:
    """Rows of the vocabulary cost an all-reduce, columns an all-gather of half the price."""
    layout = choose_layout(table, 8, ChipPrices(8))
    assert layout.tp.parameters == {"p_tokens_weight": "S(1)"}
    assert layout.collectives_forward == {"all_gather": 1} and not layout.collectives_backward


def test_pinned_table_is_cut_along_the_vocabulary(table: fx.GraphModule) -> None:
    """A table tied to the head is stored as the head wants it; execution follows the pin."""
    pinned = {"p_tokens_weight": parse_state("S(0)")}
    layout = choose_layout(table, 8, ChipPrices(8), pinned_parameters=pinned)
    assert layout.tp.rules["embedding"] == "S(0),R->P vocab_embedding"
    assert layout.collectives_forward == {"all_reduce": 1}
    whole = choose_layout(table, 8, ChipPrices(8), pinned_parameters={"p_tokens_weight": parse_state("R")})
    assert whole.tp.parameters == {"p_tokens_weight": "R"}


@pytest.mark.parametrize(("name", "state"), [("p_tokens_weight", "S(1)"), ("nobody", "R")])
def test_impossible_pins_are_refused(table: fx.GraphModule, name: str, state: str) -> None:
    with pytest.raises(BadInputError, match=name):
        choose_layout(table, 7, ChipPrices(7), pinned_parameters={name: parse_state(state)})


@pytest.mark.parametrize("pin", ["S(0)", "S(1)", "R"])
def test_a_pin_on_storage_leaves_execution_free(pin: str) -> None:
    """A weight pinned whole, or along the wrong dim, must still run: it is converted where it is used."""
    graph = small(FusedBlock("split"), torch.rand(2, 8, 32))
    layout = choose_layout(graph, 2, ChipPrices(2), pinned_parameters={"p_up_weight": parse_state(pin)})
    assert layout.tp.parameters["p_up_weight"] == pin


def small(module: nn.Module, *inputs: Tensor) -> fx.GraphModule:
    return functional_graph(module, inputs)


def test_layers_under_frozen_parameters_are_laid_out() -> None:
    """A contraction with nothing differentiable (a LoRA model's first layer) ended in an empty ``min``."""
    graph = small(nn.Linear(64, 64), torch.rand(2, 8, 64))
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            node.meta |= {"requires_grad": False, "trainable": False}
    assert choose_layout(graph, 2, ChipPrices(2)).tp.size == 2


def test_head_keeps_logits_cut() -> None:
    """Gathered logits are the largest tensor of a model; the loss is computed on their pieces."""
    graph = small(Head(32, 4096), torch.rand(2, 512, 32), torch.zeros(2, 512, dtype=torch.long))
    layout = choose_layout(graph, 2, ChipPrices(2))
    assert layout.tp.rules["cross_entropy_loss"] == "S(1),R->R vocab_cross_entropy"
    assert layout.collectives_forward == {"all_reduce": 2}  # the largest logit, then three sums at once
    assert layout.collectives_backward == {"all_reduce": 1}


def test_logits_are_not_summed_for_an_odd_vocabulary() -> None:
    """4,097 rows cannot be halved; cutting the other dim would send the logits, 128 times the activations."""
    graph = small(Head(32, 4097), torch.rand(2, 512, 32), torch.zeros(2, 512, dtype=torch.long))
    layout = choose_layout(graph, 2, ChipPrices(2))
    assert layout.tp.parameters["p_out_weight"] == "R" and not layout.collectives_forward


def test_positions_are_not_cut() -> None:
    """A position table is a parameter, but its rows are positions, which another axis cuts."""
    graph = small(Embed(), torch.zeros(2, 8, dtype=torch.long))
    layout = choose_layout(graph, 2, ChipPrices(2))
    assert set(layout.tp.parameters.values()) == {"S(1)"}


# --- an oracle: every assignment of rules to nodes of a small graph, priced without the solver ---------


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


def cost_of(builder: Builder, layout: Layout) -> float:
    """Price of a layout by the rules it names, from scratch."""
    stored = {
        n.name: f"->{layout.tp.parameters.get(n.name, 'R')}" for n in builder.rules if n.op == "placeholder"
    }
    texts = {**stored, **layout.tp.rules}
    chosen: dict[fx.Node, Rule] = {}
    for node, rules in builder.rules.items():
        replicated = rules[0]
        chosen[node] = next((rule for rule in rules if str(rule) == texts.get(node.name)), replicated)
    return cost_of_rules(builder, chosen)


def cost_of_rules(builder: Builder, chosen: dict[fx.Node, Rule]) -> float:
    variables = [builder.x[node, builder.rules[node].index(rule)] for node, rule in chosen.items()]
    rules_s = sum(builder.program.costs[variable] for variable in variables)
    steps = [(node, step) for node, chain in builder.conversions_of(chosen) for step in chain]
    return rules_s + sum(builder.pricing.conversion_s(node, step) for node, step in steps)


def assignments(builder: Builder) -> Iterator[dict[fx.Node, Rule]]:
    """Every choice of rules whose cut parameters are used as they are stored."""
    nodes = list(builder.rules)
    for rules in itertools.product(*builder.rules.values()):
        chosen = dict(zip(nodes, rules))
        held = [n for n in nodes if n.meta.get("kind") == "parameter" and chosen[n].output.is_shard]
        if all(wanted(chosen, n) == {chosen[n].output} for n in held):
            yield chosen


def wanted(chosen: dict[fx.Node, Rule], node: fx.Node) -> set[State]:
    return {chosen[u].inputs[tensor_inputs(u).index(node)] for u in node.users if u in chosen}


@dataclass(frozen=True)
class FewPrices:
    """Prices that make each of several layouts best in turn."""

    compute_s: float
    latency_s: float
    second_s: float

    def operation_s(self, node: fx.Node, fraction: float, /) -> float:
        return fraction * self.compute_s * (2.0 if op_name(node) == "aten.linear" else 0.1)

    def collective_s(self, kind: str, sent_bytes: float, /) -> float:
        factor = {"all_reduce": 2.0, "all_to_all": 0.5}.get(kind, 1.0)
        return self.latency_s + factor * sent_bytes * self.second_s


@pytest.mark.parametrize("compute_s", [1.0, 10.0])
@pytest.mark.parametrize("second_s", [1e-3, 1e-1])
def test_brute_force_agrees(compute_s: float, second_s: float) -> None:
    """A program can build a cheap route out of two conversions that no run takes: price every assignment."""
    graph = small(Tiny(), torch.rand(2, 4))
    prices, settings = FewPrices(compute_s, 0.01, second_s), LayoutSettings(1.0, (0.0,))
    builder = Builder(graph.graph, 2, prices, settings, {})
    builder.build()
    best_s = min(cost_of_rules(builder, chosen) for chosen in assignments(builder))
    priced = price_layout(graph, 2, prices, {}, settings)
    assert priced.objective_s == pytest.approx(best_s, rel=1e-6)
    assert cost_of(builder, priced.layout) == pytest.approx(best_s, rel=1e-6)


# --- head counts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "heads", "degrees"),
    [
        (FusedBlock("split"), (4, 4), (1, 2, 4)),
        (FusedBlock("by hand"), (4, 4), (1, 2, 4)),
        (GroupedBlock(2, "repeated"), (4, 2), (1, 2, 4)),
        (GroupedBlock(2, "native"), (4, 2), (1, 2, 4)),
        (GroupedBlock(1, "fused"), (4, 1), (1, 2, 4)),
    ],
    ids=["split", "by hand", "repeated", "native", "one kv head"],
)
def test_degrees_divide_every_head_count(
    module: nn.Module, heads: tuple[int, int], degrees: tuple[int, ...]
) -> None:
    """Fewer kv heads than ranks are shared; other degrees must not fail deep inside attention."""
    graph = small(module, torch.rand(2, 8, 32))
    assert [(q, kv) for _, q, kv in attention_heads(graph)] == [heads]
    assert tp_degrees(graph) == degrees


def test_no_attention_gives_no_degrees(table: fx.GraphModule) -> None:
    assert tp_degrees(table) == () and attention_heads(table) == []
    assert shape_of(next(n for n in table.graph.nodes if n.op == "call_function"))[-1] == HIDDEN
