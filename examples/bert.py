"""BERT-large with its masked-language head, from its published sizes (https://arxiv.org/abs/1810.04805)."""

import torch
from transformers import BertConfig, BertForMaskedLM

config = BertConfig(
    vocab_size=30522,
    hidden_size=1024,
    num_hidden_layers=24,
    num_attention_heads=16,
    intermediate_size=4096,
    max_position_embeddings=512,
    type_vocab_size=2,
)


def build_model():
    return BertForMaskedLM(config)


def example_inputs(batch_size, sequence=512):
    tokens = torch.randint(config.vocab_size, (batch_size, sequence))
    return {"input_ids": tokens, "labels": tokens}
