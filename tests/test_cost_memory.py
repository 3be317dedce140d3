"""Bytes kept for backward and bytes of training state, against real autograd and against reported runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cost_fixture import GIB, Head, LlamaBlock, cost_model, fake_region, region_graph_of
from torch import fx, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel

from autoplan.errors import BadInputError
from autoplan_cost_models import CostModel, Span, measure_region, operations, state_bytes
from autoplan_cost_models.execution import Execution, Keeping, Selective
from autoplan_cost_models.memory import MemoryTrace, trace_memory

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")


class Encoder(nn.Module):
    """Layer norm, biases, GELU and dropout: ops that save inputs, outputs, statistics and masks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.gelu(self.inner(self.norm(x)))
        return x + nn.functional.dropout(self.outer(y), 0.1)


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 1), nn.Tanh()
    )


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "llama block": (lambda: LlamaBlock(32, 4, 4, 48), (2, 16, 32)),
    "encoder": (Encoder, (2, 8, 32)),
    "convolutions": (convolutions, (2, 3, 8, 8)),
}


def really_saved(run: Callable[[], Any], module: nn.Module, x: torch.Tensor) -> int:
    """Bytes of distinct storages autograd saves on real tensors, less parameters', input's and output's."""
    sizes: dict[int, int] = {}
    held: list[torch.Tensor] = []

    def key(tensor: torch.Tensor) -> int:
        held.append(tensor)
        return StorageWeakRef(tensor.untyped_storage()).cdata

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        sizes[key(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = run()
    outside = {key(t) for t in (x, *fx_outputs(output), *module.parameters())}
    return sum(size for where, size in sizes.items() if where not in outside)


def fx_outputs(output: Any) -> tuple[torch.Tensor, ...]:
    return (output,) if isinstance(output, torch.Tensor) else tuple(output)


def run_graph(graph: fx.GraphModule, module: nn.Module, x: torch.Tensor) -> Any:
    named = dict(module.named_parameters())
    places = [node.meta for node in graph.graph.nodes if node.op == "placeholder"]
    return graph(*(named[meta["source"]] if meta["kind"] == "parameter" else x for meta in places))


@pytest.mark.parametrize("name", CASES)
def test_saved_bytes_equal_what_real_autograd_saves(name: str) -> None:
    """Measured on fake tensors, to the byte; flash attention saves q, k, v, out and a number a row."""
    build, shape = CASES[name]
    module, x = build(), torch.randn(*shape, requires_grad=True)
    graph = region_graph_of(module, x)
    trace = trace_memory(graph, operations(graph))
    assert sum(item.bytes for item in trace.saved) == really_saved(
        lambda: run_graph(graph, module, x), module, x
    )
    assert [(item.name, item.bytes) for item in trace.inputs] == [("x", x.nbytes)] or name == "convolutions"


def test_math_attention_saves_the_scores() -> None:
    """A chip without a flash kernel keeps the S x S matrix: equal to real autograd in math mode."""
    module, x = LlamaBlock(32, 4, 2, 48), torch.randn(2, 16, 32, requires_grad=True)
    graph = region_graph_of(module, x)
    plain = trace_memory(graph, operations(graph), fused_attention=False)
    with sdpa_kernel(SDPBackend.MATH):
        assert sum(item.bytes for item in plain.saved) == really_saved(lambda: module(x), module, x)
    fused = trace_memory(graph, operations(graph))
    assert sum(item.bytes for item in fused.saved) < sum(item.bytes for item in plain.saved)


def test_recompute_kinds_are_ordered_and_linear_in_the_batch() -> None:
    """full <= selective <= none in bytes kept; what is not kept comes back while the region runs."""
    graphs = fake_region(
        lambda: LlamaBlock(256, 4, 2, 512),
        lambda batch: (torch.empty(batch, 128, 256, dtype=torch.bfloat16),),
    )
    model, work = cost_model(), measure_region(graphs)
    one, two, eight = (model.region_cost(work, b, {"tp": Span(1)}) for b in (1, 2, 8))
    for kind in ("none", "selective", "full"):
        assert eight.saved_bytes[kind] == 8 * one.saved_bytes[kind]
        assert sum(item.bytes for item in two.transient_items[kind]) == two.transient_bytes[kind]
    saved = one.saved_bytes
    assert saved["full"] == 128 * 256 * 2 < saved["selective"] < saved["none"]
    assert one.transient_bytes["none"] < one.transient_bytes["selective"] < one.transient_bytes["full"]
    again = one.recompute_s
    assert again["none"] == 0 < again["selective"] < again["full"] < one.forward_s


def test_recompute_stops_at_the_last_saved_tensor() -> None:
    """torch's checkpoint stops once everything saved exists again: the block's last product is not rerun."""
    graphs = fake_region(
        lambda: LlamaBlock(4096, 32, 8, 14336),
        lambda batch: (torch.empty(batch, 4096, 4096, dtype=torch.bfloat16),),
    )
    work = measure_region(graphs)
    run_again = {work.operations[i].name for i in work.table.operation[work.run_again["full"]]}
    assert "linear_5" in run_again and "linear_6" not in run_again


class Transposed(nn.Module):
    """A weight used through a view, as experts of a mixture are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, 512))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, self.weight.transpose(0, 1).transpose(0, 1))


def test_a_viewed_weight_has_one_gradient() -> None:
    """A transposed weight's gradient is a view of the weight's, not a second one (15 GB in one model)."""
    graph = region_graph_of(Transposed(), torch.zeros(4, 64))
    extra = trace_memory(graph, operations(graph)).backward.extra_bytes
    weight, output, x = 64 * 512 * 4, 4 * 512 * 4, 4 * 64 * 4
    assert max(extra) == weight + output + x


def test_unknown_batch_form_prices_only_its_own_batch() -> None:
    """A graph known at batch 1 alone must not be extrapolated silently."""
    graphs = {1: region_graph_of(nn.Linear(4, 4), torch.randn(1, 4))}
    work = measure_region(graphs)
    cost_model().region_cost(work, 1, {"tp": Span(1)})
    with pytest.raises(BadInputError, match="--pin micro_batch=1"):
        cost_model().region_cost(work, 2, {"tp": Span(1)})


@pytest.mark.parametrize(("sequence", "logits_gib"), [(4096, 3.914), (3072, 2.936)])
def test_head_names_the_logits_and_their_gradient(sequence: int, logits_gib: float) -> None:
    """An 8B LoRA run on 80 GB died asking for 3.91 GiB: batch 2 of fp32 logits over 128,256 words.

    https://github.com/NVIDIA-NeMo/Automodel/issues/1176
    """
    graphs = fake_region(
        lambda: Head(4096, 128256),
        lambda batch: (
            torch.empty(batch, sequence, 4096, dtype=torch.bfloat16),
            torch.zeros(batch, sequence, dtype=torch.long),
        ),
    )
    cost = cost_model().region_cost(measure_region(graphs), 2, {"tp": Span(1)})
    saved, transient = cost.saved_items["none"][0], {i.name: i.bytes for i in cost.transient_items["none"]}
    assert saved.name == "log-probabilities of the logits (fp32)"
    assert saved.bytes / GIB == pytest.approx(logits_gib, abs=2e-3)
    assert transient["gradient of logits (fp32)"] / GIB == pytest.approx(logits_gib, abs=2e-3)
    assert cost.parameter_bytes / GIB == pytest.approx(1.957 / 2, abs=1e-3)  # [128256, 4096] in bf16


def test_full_recompute_still_keeps_every_region_input() -> None:
    """31B model, 60 layers of width 5,376, 256,000 tokens: 165 GB of layer inputs on one rank.

    https://github.com/hiyouga/LlamaFactory/issues/10475
    """
    graphs = fake_region(
        lambda: LlamaBlock(5376, 32, 16, 21504),
        lambda batch: (torch.empty(batch, 256_000, 5376, dtype=torch.bfloat16),),
    )
    cost = cost_model().region_cost(measure_region(graphs), 1, {"tp": Span(1)})
    assert 60 * cost.saved_bytes["full"] == pytest.approx(165.2e9, rel=0.002)


LLAMA_70B, QWEN_72B = 70.55e9, 72.7e9
STATES = [
    # parameters, policy, devices (all ZeRO-3), GB on one device, where it was reported
    (LLAMA_70B, "bf16-pure", 32, 17.6),  # https://github.com/NVIDIA-NeMo/Automodel/pull/2673
    (QWEN_72B, "bf16", 4, 291.0),  # https://github.com/hiyouga/LlamaFactory/issues/5553
    (LLAMA_70B, "bf16", 16, 70.6),  # https://github.com/InternLM/xtuner/issues/842
    (LLAMA_70B, "bf16", 32, 35.3),
]


@pytest.mark.parametrize(("parameters", "policy", "devices", "gigabytes"), STATES)
def test_states_of_reported_runs(parameters: float, policy: str, devices: int, gigabytes: float) -> None:
    """16 bytes a parameter (8 when all is bf16), divided by the degree."""
    states = state_bytes(2 * parameters, parameters, dtype=policy, optimizer="adamw", zero=3, shards=devices)
    assert states.total / 1e9 == pytest.approx(gigabytes, rel=0.03)


ZERO_STAGES = [(0, 18.0), (1, 6 + 12 / 8), (2, 2 + 16 / 8), (3, 16 / 8)]


@pytest.mark.parametrize(("zero", "per_parameter"), ZERO_STAGES)
def test_zero_divides_states_as_in_the_paper(zero: int, per_parameter: float) -> None:
    """arXiv 1910.02054 figure 1, 8 replicas, gradients in fp32; frozen weights have neither, and under ZeRO-2
    their shards stay beside what is gathered."""
    states = state_bytes(2e9, 1e9, dtype="bf16", optimizer="adamw", zero=zero, shards=8)
    assert states.total == per_parameter * 1e9
    frozen = state_bytes(2e9, 0, dtype="bf16", optimizer="adamw", zero=zero, shards=8)
    assert frozen.total == {2: 2e9 + 2e9 / 8, 3: 2e9 / 8}.get(zero, 2e9)


def test_unknown_dtype_and_optimizer_name_the_known_ones() -> None:
    """A typo must not be priced as if it cost nothing."""
    with pytest.raises(BadInputError, match="--dtype bf17: expected one of fp64"):
        state_bytes(1, 1, dtype="bf17", optimizer="adamw")
    with pytest.raises(BadInputError, match="--optimizer lamb: expected one of adamw"):
        state_bytes(1, 1, dtype="bf16", optimizer="lamb")


def test_pricing_a_measured_region_is_fast() -> None:
    """A search prices thousands: no torch, no graph, under 2 ms each."""
    graphs = fake_region(
        lambda: LlamaBlock(256, 4, 2, 512),
        lambda batch: (torch.empty(batch, 128, 256, dtype=torch.bfloat16),),
    )
    model: CostModel = cost_model()
    work = measure_region(graphs)
    model.region_cost(work, 1, {"tp": Span(1)})
    best = min(
        _seconds(lambda: model.region_cost(work, 3, {"tp": Span(8)}), time.perf_counter) for _ in range(20)
    )
    assert best < 2e-3


def _seconds(run: Callable[[], object], clock: Callable[[], float]) -> float:
    start = clock()
    run()
    return clock() - start


def llama_block_as(keeping: Keeping) -> tuple[fx.GraphModule, MemoryTrace]:
    module, x = LlamaBlock(32, 4, 4, 48), torch.zeros(2, 16, 32, requires_grad=True)
    graph = region_graph_of(module, x)
    found = operations(graph, Execution(keeping=keeping))
    return graph, trace_memory(graph, found, keeping=keeping)


def test_fused_chains_keep_what_enters_and_leaves_them() -> None:
    """silu(gate) and the norms' insides are made again from gate, up and the norms' inputs; each product's
    input stays (a gated block of 70B was priced 50% above what fused layers keep)."""
    rows, width, ffn, heads = 2 * 16, 32, 48, 4
    _, plain = llama_block_as(Keeping())
    _, fused = llama_block_as(Keeping(chains=True))
    kept = {item.name: item.bytes for item in fused.saved}
    assert not any("silu" in name for name in kept) and any("silu" in item.name for item in plain.saved)
    # two normed rows, q, k, v, attention's output and its statistics, the sum after attention, gate, up and
    # their product; each norm's statistic a row
    numbers = rows * (2 * width + 3 * width + width + width + 3 * ffn + heads)
    assert 0 <= sum(kept.values()) - 4 * numbers <= 4 * 2 * 2 * rows


POLICIES: list[tuple[Selective, set[str]]] = [
    ("products", {"linear", "linear_1", "linear_2", "linear_3", "linear_4", "linear_5", "linear_6"}),
    ("every second product", {"linear", "linear_2", "linear_4", "linear_6"}),
]


@pytest.mark.parametrize(("policy", "expected"), POLICIES)
def test_selective_policies_keep_their_products(policy: Selective, expected: set[str]) -> None:
    graph, _ = llama_block_as(Keeping())
    found = operations(graph, Execution(keeping=Keeping(selective=policy)))
    assert {one.name for one in found if one.selective_keeps and one.kind == "gemm"} == expected


def test_recompute_of_core_attention_keeps_all_but_the_scores() -> None:
    """Korthikanti et al., arXiv 2205.05198: 34 sbh stay, the 5 a s / h of scores go."""
    module, x = LlamaBlock(32, 4, 4, 48), torch.zeros(2, 16, 32, requires_grad=True)
    graph = region_graph_of(module, x)
    keeping = Keeping(selective="all but core attention")
    found = operations(graph, Execution(keeping=keeping))
    trace = trace_memory(graph, found, keeping=keeping)
    statistics = 4 * 2 * 4 * 16
    assert sum(one.bytes for one in trace.kept) == sum(one.bytes for one in trace.saved) - statistics
    assert [one.kind for one in found if one.kept is False] == ["attention"]


def test_a_loss_of_its_own_is_counted_a_logit() -> None:
    """An in-place loss holds its logits once; Megatron's an fp32 softmax and a 16-bit gradient."""
    rows, width, vocab = 16, 8, 64

    def inputs(batch: int) -> tuple[torch.Tensor, ...]:
        return torch.empty(batch, rows, width), torch.zeros(batch, rows, dtype=torch.long)

    graph = fake_region(lambda: Head(width, vocab), inputs)[1]
    for saved_bytes, beside in ((2.0, 0.0), (4.0, 2.0), (4.0, 8.0)):
        keeping = Keeping(loss_bytes=(saved_bytes, beside))
        trace = trace_memory(graph, operations(graph), keeping=keeping)
        saved = {item.name: item.bytes for item in trace.saved}
        assert max(saved.values()) == saved_bytes * rows * vocab
        assert trace.backward.extra_bytes[1] == pytest.approx(beside * rows * vocab, abs=64)
