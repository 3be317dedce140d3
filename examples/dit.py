"""A small diffusion transformer (https://arxiv.org/abs/2212.09748) that predicts the noise on patches."""

import torch
from torch import nn
from torch.nn import functional as F

CHANNELS, SIZE, PATCH, HIDDEN, HEADS, LAYERS, CLASSES, STEPS = 4, 16, 2, 128, 4, 4, 10, 1000


def sinusoids(t):
    angles = t[:, None] * torch.exp(-9.2 * torch.arange(HIDDEN // 2, device=t.device) / (HIDDEN // 2))
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(HIDDEN, 6 * HIDDEN))

    def forward(self, x, condition):
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = self.modulation(condition).chunk(6, dim=-1)
        qkv = self.qkv(self.norm(x) * (1 + scale_1) + shift_1).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in qkv)
        x = x + gate_1 * self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + gate_2 * self.mlp(self.norm(x) * (1 + scale_2) + shift_2)


class DiT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(CHANNELS, HIDDEN, PATCH, stride=PATCH)
        self.positions = nn.Parameter(0.02 * torch.randn(1, (SIZE // PATCH) ** 2, HIDDEN))
        self.time = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, HIDDEN))
        self.classes = nn.Embedding(CLASSES, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, CHANNELS * PATCH**2)

    def forward(self, images, noise, timesteps, classes):
        keep = torch.cos(0.5 * torch.pi * timesteps / STEPS).to(images.dtype)[:, None, None, None]
        x = self.patches(keep * images + (1 - keep**2).sqrt() * noise)
        x = x.flatten(2).transpose(1, 2) + self.positions
        condition = (self.time(sinusoids(timesteps).to(x.dtype)) + self.classes(classes))[:, None]
        for block in self.blocks:
            x = block(x, condition)
        x = self.head(self.norm(x)).transpose(1, 2).unflatten(-1, (SIZE // PATCH, -1))
        return F.mse_loss(F.pixel_shuffle(x, PATCH), noise)


def build_model():
    return DiT()


def example_inputs(batch_size):
    images, noise = torch.randn(2, batch_size, CHANNELS, SIZE, SIZE)
    steps, classes = torch.randint(STEPS, (batch_size,)), torch.randint(CLASSES, (batch_size,))
    return {"images": images, "noise": noise, "timesteps": steps, "classes": classes}
