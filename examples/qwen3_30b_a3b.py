"""Qwen3-30B-A3B from its published sizes (https://huggingface.co/Qwen/Qwen3-30B-A3B), without weights."""

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

config = Qwen3MoeConfig(
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=6144,
    moe_intermediate_size=768,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    num_experts=128,
    num_experts_per_tok=8,
    norm_topk_prob=True,
    max_position_embeddings=40960,
    rms_norm_eps=1e-6,
    rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    tie_word_embeddings=False,
)


def build_model():
    return Qwen3MoeForCausalLM(config)


def example_inputs(batch_size, sequence=4096):
    tokens = torch.randint(config.vocab_size, (batch_size, sequence))
    return {"input_ids": tokens, "labels": tokens}
