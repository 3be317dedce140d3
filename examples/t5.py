"""T5-3B from its published sizes (https://arxiv.org/abs/1910.10683, section 3.7), without weights."""

import torch
from transformers import T5Config, T5ForConditionalGeneration

config = T5Config(
    vocab_size=32128,
    d_model=1024,
    d_kv=128,
    d_ff=16384,
    num_layers=24,
    num_decoder_layers=24,
    num_heads=32,
    relative_attention_num_buckets=32,
    decoder_start_token_id=0,
    tie_word_embeddings=True,
)


def build_model():
    return T5ForConditionalGeneration(config)


def example_inputs(batch_size, sequence=512):
    return {
        "input_ids": torch.randint(config.vocab_size, (batch_size, sequence)),
        "labels": torch.randint(config.vocab_size, (batch_size, sequence)),
    }
