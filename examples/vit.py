"""ViT-L/16 for image classification, from its published sizes (https://arxiv.org/abs/2010.11929, table 1)."""

import torch
from transformers import ViTConfig, ViTForImageClassification

config = ViTConfig(
    hidden_size=1024,
    num_hidden_layers=24,
    num_attention_heads=16,
    intermediate_size=4096,
    image_size=224,
    patch_size=16,
    num_channels=3,
    num_labels=1000,
)


def build_model():
    return ViTForImageClassification(config)


def example_inputs(batch_size):
    size = config.image_size
    images = torch.randn(batch_size, config.num_channels, size, size)
    return {"pixel_values": images, "labels": torch.randint(config.num_labels, (batch_size,))}
