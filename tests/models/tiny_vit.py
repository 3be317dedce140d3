"""A tiny ViT classifier."""

import torch
from transformers import ViTConfig, ViTForImageClassification


def build_model():
    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=16,
        patch_size=4,
        num_labels=8,
        problem_type="single_label_classification",
    )
    return ViTForImageClassification(config)


def example_inputs(batch_size):
    return {"pixel_values": torch.randn(batch_size, 3, 16, 16), "labels": torch.randint(8, (batch_size,))}
