"""A Llama from the transformers library whose head is its embedding table, 3 blocks."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def build_model():
    config = LlamaConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        vocab_size=96,
        max_position_embeddings=32,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def example_inputs(batch_size, sequence=16):
    ids = torch.randint(96, (batch_size, sequence))
    return {"input_ids": ids, "labels": ids}
