"""A tiny BERT for masked-language modelling, with attention mask, dropout and tied embeddings."""

import torch
from transformers import BertConfig, BertForMaskedLM


def build_model():
    config = BertConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        vocab_size=96,
        max_position_embeddings=32,
    )
    return BertForMaskedLM(config)


def example_inputs(batch_size, sequence=16):
    ids = torch.randint(96, (batch_size, sequence))
    mask = torch.ones(batch_size, sequence, dtype=torch.long)
    mask[:, -3:] = 0
    hidden = torch.rand(batch_size, sequence) < torch.linspace(0.1, 0.6, batch_size)[:, None]
    labels = torch.where(hidden, ids, -100)  # micro-batches count different numbers of tokens
    labels[:, 0] = ids[:, 0]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}
