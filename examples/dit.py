"""A small diffusion transformer (https://arxiv.org/abs/2212.09748) that predicts the noise on patches."""

import torch
from torch import nn
from torch.nn import functional as F

CHANNELS, SIZE, PATCH, HIDDEN, HEADS, LAYERS, CLASSES, STEPS = 4, 16, 2, 128, 4, 4, 10, 1000


def sinusoids(t, width):
    angles = t[:, None] * torch.exp(-9.2 * torch.arange(width // 2, device=t.device) / (width // 2))
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = (nn.LayerNorm(HIDDEN, elementwise_affine=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(HIDDEN, 6 * HIDDEN))

    def forward(self, x, condition):
        modulation = self.modulation(condition).unsqueeze(1)
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = modulation.chunk(6, dim=-1)
        y = self.norm_1(x) * (1 + scale_1) + shift_1
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(y).chunk(3, dim=-1))
        x = x + gate_1 * self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + gate_2 * self.mlp(self.norm_2(x) * (1 + scale_2) + shift_2)


class DiT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(CHANNELS, HIDDEN, PATCH, stride=PATCH)
        self.positions = nn.Parameter(0.02 * torch.randn(1, (SIZE // PATCH) ** 2, HIDDEN))
        self.time = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, HIDDEN))
        self.classes = nn.Embedding(CLASSES, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, PATCH * PATCH * CHANNELS)

    def forward(self, images, noise, timesteps, classes):
        keep = torch.cos(0.5 * torch.pi * timesteps / STEPS).to(images.dtype)[:, None, None, None]
        noisy = keep * images + (1 - keep**2).sqrt() * noise
        x = self.patches(noisy).flatten(2).transpose(1, 2) + self.positions
        condition = self.time(sinusoids(timesteps, HIDDEN).to(x.dtype)) + self.classes(classes)
        for block in self.blocks:
            x = block(x, condition)
        patches = self.head(self.norm(x)).transpose(1, 2).unflatten(-1, (SIZE // PATCH, -1))
        return F.mse_loss(F.pixel_shuffle(patches, PATCH), noise)


def build_model():
    return DiT()


def example_inputs(batch_size):
    images, noise = torch.randn(2, batch_size, CHANNELS, SIZE, SIZE)
    timesteps, classes = torch.randint(STEPS, (batch_size,)), torch.randint(CLASSES, (batch_size,))
    return {"images": images, "noise": noise, "timesteps": timesteps, "classes": classes}
