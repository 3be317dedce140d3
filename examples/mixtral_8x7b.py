"""Mixtral-8x7B from its published sizes (https://arxiv.org/abs/2401.04088, table 1), without weights."""

import torch
from transformers import MixtralConfig, MixtralForCausalLM

config = MixtralConfig(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    num_local_experts=8,
    num_experts_per_tok=2,
    max_position_embeddings=32768,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    sliding_window=None,
    tie_word_embeddings=False,
)


def build_model():
    return MixtralForCausalLM(config)


def example_inputs(batch_size, sequence=4096):
    tokens = torch.randint(config.vocab_size, (batch_size, sequence))
    return {"input_ids": tokens, "labels": tokens}
