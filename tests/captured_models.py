"""Example models come in, cut down to run on a CPU; their sources and region-by-region runs go out."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoplan.capture import Capture, ModelSource, capture_model, load_model_source
from autoplan.regions import Region, find_regions, region_graph

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "dropout_rate": 0.0}
DECODER = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
# example -> configuration entries that make it small (no entry: it is small already)
SMALL: dict[str, dict[str, Any]] = {
    "gpt": {},
    "tiny_llama": {},
    "vlm": {},
    "dit": {},
    "llama3_8b": DECODER,
    "mixtral_8x7b": {**DECODER, "num_local_experts": 4},
    "qwen3_30b_a3b": {
        **DECODER,
        "head_dim": 16,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "deepseek_v3": {
        **DECODER,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 32,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "qk_head_dim": 24,
        "head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
    },
    "bert": {**DECODER, **NO_DROPOUT},
    "vit": {**DECODER, **NO_DROPOUT, "image_size": 32, "num_labels": 10},
    "mamba2": {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 3, "num_heads": 8, "head_dim": 8}
    | {"state_size": 16, "chunk_size": 16},
    "t5": {"vocab_size": 128, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_decoder_layers": 3}
    | {"num_hidden_layers": 3, "num_heads": 4, **NO_DROPOUT},
}
SEQUENCE = 48


def small_source(name: str, layers: int | None = None) -> ModelSource:
    """The source of an example with its configuration made small (``layers`` blocks, if it has a config)."""
    source = load_model_source(EXAMPLES / f"{name}.py")
    config = getattr(sys.modules[source.construct.__module__], "config", None)
    for key, value in SMALL[name].items():
        if hasattr(config, key):
            depth = layers is not None and key in ("num_hidden_layers", "num_layers", "num_decoder_layers")
            setattr(config, key, layers if depth else value)
    return source


def small_sizes(source: ModelSource) -> dict[str, int]:
    """The sizes that an example is captured at."""
    return {"sequence": SEQUENCE} if "sequence" in (source.size_names or ()) else {}


@cache
def small_capture(name: str, dtype: str = "fp32") -> Capture:
    """One capture of a small example for all tests of the session."""
    source = small_source(name)
    return capture_model(source, dtype=dtype, sizes=small_sizes(source))


@cache
def small_regions(name: str) -> tuple[Region, ...]:
    """The regions of :func:`small_capture`."""
    return find_regions(small_capture(name))


def run_regions(
    capture: Capture, regions: tuple[Region, ...], model: nn.Module, inputs: Mapping[str, Any]
) -> torch.Tensor:
    """The loss computed region by region on real tensors."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers()), **capture.constants}
    batch = len(next(iter(inputs.values())))
    values: dict[str, torch.Tensor] = {}
    for node in capture.graph.find_nodes(op="placeholder"):
        if node.meta["kind"] == "input":
            values[node.name] = inputs[node.meta["source"]]
    for region in regions:
        graph = region_graph(capture, region, batch)
        held = [
            values[n.meta["source"]] if n.meta["kind"] == "input" else tensors[n.meta["source"]]
            for n in graph.graph.find_nodes(op="placeholder")
        ]
        values.update(zip(region.outputs, graph(*held), strict=True))
    return values[regions[-1].outputs[-1]]
