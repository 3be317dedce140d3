"""Small region graphs and a hand-made hardware profile for the cost tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autoplan.hardware import (
    AttentionRates,
    CollectiveFit,
    Curve,
    GemmRates,
    HardwareProfile,
    Quantity,
    Software,
)
from autoplan_cost_models import CostModel

GIB = 2.0**30
FITS = {
    # NCCL on one DGX H100, fits of ai-dynamo/aiconfigurator@095f58a nccl_perf.parquet (all_reduce).
    2: (5.85e-6, 310.4e9, 25.25e-6, 2965820.0),
    4: (9.31e-6, 350.2e9, 26.89e-6, 4194304.0),
    8: (15.59e-6, 467.3e9, 64.16e-6, 8388608.0),
}


def quantity(value: float, tag: Any = "datasheet") -> Quantity:
    return Quantity(value, tag, "test")


def curve(points: Mapping[float, float]) -> Curve:
    return Curve(tuple(points), tuple(points.values()), "measured", "test")


def fits(scale: float = 1.0) -> tuple[CollectiveFit, ...]:
    return tuple(
        CollectiveFit(ranks, alpha, bandwidth * scale, ramp, ramp_bytes, "measured", "test")
        for ranks, (alpha, bandwidth, ramp, ramp_bytes) in FITS.items()
    )


def network_fits() -> tuple[CollectiveFit, ...]:
    return tuple(CollectiveFit(n, 50e-6, 46e9, 0.0, 1.0, "estimated", "test") for n in (2, 4, 32))


def profile(**changes: Any) -> HardwareProfile:
    """An H100-like chip: round numbers, 8 devices a node, one fast domain."""
    rates = GemmRates(
        by_m=curve({1: 3e12, 128: 300e12, 1024: 780e12, 4096: 795e12}),
        by_n=curve({512: 0.99, 4096: 1.0}),
        by_k=curve({512: 0.8, 4096: 1.0}),
    )
    slow = GemmRates(curve({1: 1e12, 1024: 60e12}), curve({512: 1.0}), curve({512: 1.0}))
    attention = tuple(
        AttentionRates(direction, causal, head, curve({512: top / 2, 16384: top}))
        for direction, top in (("forward", 600e12), ("backward", 520e12))
        for causal in (True, False)
        for head in (64, 128)
    )
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p")
    values: dict[str, Any] = {
        "name": "test-chip",
        "title": "test chip",
        "vendor": "test",
        "aliases": (),
        "devices_per_node": 8,
        "fast_domain": 8,
        "memory_bytes": quantity(80 * GIB),
        "reserve_bytes": quantity(2 * GIB, "estimated"),
        "fragmentation": quantity(0.02),
        "memory_bytes_per_s": quantity(3.35e12),
        "memory_efficiency": curve({65536: 0.02, 1 << 20: 0.27, 1 << 28: 0.88}),
        "launch_s": quantity(3e-6),
        "sustained": {"bf16": quantity(1.0)},
        "variation": quantity(0.0),
        "peak_flops": {"bf16": quantity(989e12), "fp32": quantity(67e12)},
        "gemm": {"bf16": rates, "fp32": slow},
        "attention": attention,
        "collectives": {
            "intra": {kind: fits() for kind in kinds},
            "inter": {kind: network_fits() for kind in kinds},
        },
        "host_bytes_per_s": quantity(60e9),
        "nic_bytes_per_s": quantity(50e9),
        "software": Software("cuda", "nccl", (), {}, "2.11", "test"),
        "kernels": ("flash_attention", "grouped_gemm"),
        "notes": (),
        "fingerprint": "test",
    }
    return HardwareProfile(**{**values, **changes})


def cost_model(**changes: Any) -> CostModel:
    return CostModel(profile(**changes), "bf16")


def region_graph_of(
    module: nn.Module, *inputs: torch.Tensor, gradients: tuple[bool, ...] | None = None
) -> fx.GraphModule:
    """A module exported as a region graph; floating inputs need a gradient unless ``gradients`` says not."""
    program = torch.export.export(module, inputs, strict=False).run_decompositions({})
    graph = program.graph_module.graph
    parameters = program.graph_signature.inputs_to_parameters
    buffers = program.graph_signature.inputs_to_buffers
    needs = iter(gradients or tuple(x.is_floating_point() for x in inputs))
    trainable = dict(module.named_parameters())
    for node in graph.nodes:
        if node.op == "placeholder":
            source = parameters.get(node.name) or buffers.get(node.name) or node.name
            kind = "parameter" if node.name in parameters else "buffer" if node.name in buffers else "input"
            needing = {"input": lambda: next(needs), "buffer": lambda: False}.get(
                kind, lambda name=source: trainable[name].requires_grad
            )()
            node.meta.update(kind=kind, source=source, requires_grad=needing)
        elif "_assert_tensor_metadata" in str(node.target):
            graph.erase_node(node)
    return fx.GraphModule(nn.Module(), graph)


def fake_region(
    build: Callable[[], nn.Module],
    inputs: Callable[[int], tuple[torch.Tensor, ...]],
    dtype: torch.dtype = torch.bfloat16,
) -> dict[int, fx.GraphModule]:
    """Region graphs at micro-batches 1 and 2 of a module too large to allocate."""
    graphs: dict[int, fx.GraphModule] = {}
    for batch in (1, 2):
        with torch.device("meta"):
            module = build().to(dtype)
        with FakeTensorMode(allow_non_fake_inputs=True):
            graphs[batch] = region_graph_of(module.to_empty(device="cpu"), *inputs(batch))
    return graphs


class RmsNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class LlamaBlock(nn.Module):
    """Norm, grouped-query causal attention, norm, gated MLP; no rotary table."""

    def __init__(self, width: int, heads: int, kv_heads: int, ffn: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head = heads, kv_heads, width // heads
        self.norm, self.mlp_norm = RmsNorm(width), RmsNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, kv_heads * self.head, bias=False)
        self.v = nn.Linear(width, kv_heads * self.head, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, ffn, bias=False)
        self.up = nn.Linear(width, ffn, bias=False)
        self.down = nn.Linear(ffn, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (
            layer(y).view(*x.shape[:2], heads, self.head).transpose(1, 2)
            for layer, heads in ((self.q, self.heads), (self.k, self.kv_heads), (self.v, self.kv_heads))
        )
        a = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(a.transpose(1, 2).reshape(x.shape))
        y = self.mlp_norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Head(nn.Module):
    """Final projection and cross-entropy in fp32, as language models have them."""

    def __init__(self, width: int, vocab: int) -> None:
        super().__init__()
        self.lm_head = nn.Linear(width, vocab, bias=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.lm_head(x).float()
        return nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


class Embedding(nn.Module):
    def __init__(self, width: int, vocab: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab, width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids)
