"""Llama-3.1-405B from its published sizes (https://arxiv.org/abs/2407.21783, table 3), without weights."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    vocab_size=128256,
    hidden_size=16384,
    intermediate_size=53248,
    num_hidden_layers=126,
    num_attention_heads=128,
    num_key_value_heads=8,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_parameters={
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    tie_word_embeddings=False,
)


def build_model():
    return LlamaForCausalLM(config)


def example_inputs(batch_size, sequence=8192):
    tokens = torch.randint(config.vocab_size, (batch_size, sequence))
    return {"input_ids": tokens, "labels": tokens}
