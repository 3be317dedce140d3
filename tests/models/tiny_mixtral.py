"""A tiny Mixtral from the transformers library: four experts, two a token."""

import torch
from transformers import MixtralConfig, MixtralForCausalLM


def build_model():
    config = MixtralConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        num_local_experts=4,
        num_experts_per_tok=2,
        vocab_size=96,
        max_position_embeddings=32,
        sliding_window=None,
        tie_word_embeddings=False,
    )
    return MixtralForCausalLM(config)


def example_inputs(batch_size, sequence=16):
    ids = torch.randint(96, (batch_size, sequence))
    return {"input_ids": ids, "labels": ids}
