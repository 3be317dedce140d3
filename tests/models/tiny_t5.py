"""A tiny T5: encoder and decoder of unequal length, relative position biases, tied embeddings."""

import torch
from transformers import T5Config, T5ForConditionalGeneration


def build_model():
    config = T5Config(
        vocab_size=96,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        decoder_start_token_id=0,
        dropout_rate=0.0,
        tie_word_embeddings=True,
    )
    return T5ForConditionalGeneration(config)


def example_inputs(batch_size, sequence=16):
    return {
        "input_ids": torch.randint(96, (batch_size, sequence)),
        "labels": torch.randint(96, (batch_size, sequence // 2)),
    }
