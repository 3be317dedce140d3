"""Mamba-2 2.7B from its published sizes (https://huggingface.co/state-spaces/mamba2-2.7b)."""

import torch
from transformers import Mamba2Config, Mamba2ForCausalLM

config = Mamba2Config(
    vocab_size=50288,
    hidden_size=2560,
    num_hidden_layers=64,
    num_heads=80,
    head_dim=64,
    state_size=128,
    expand=2,
    n_groups=1,
    conv_kernel=4,
    chunk_size=256,
    tie_word_embeddings=True,
)


def build_model():
    return Mamba2ForCausalLM(config)


def example_inputs(batch_size, sequence=2048):
    tokens = torch.randint(config.vocab_size, (batch_size, sequence))
    return {"input_ids": tokens, "labels": tokens}
