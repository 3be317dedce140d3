"""A small vision-language model: a ViT over image patches, a projector, and a decoder over both."""

import torch
from torch import nn
from torch.nn import functional as F

SIZE, PATCH, VISION, VISION_LAYERS = 32, 8, 64, 3
VOCAB, HIDDEN, LAYERS, CONTEXT = 256, 96, 4, 64
IMAGE_TOKENS = (SIZE // PATCH) ** 2


class Block(nn.Module):
    def __init__(self, hidden, heads, causal):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class VisionLanguage(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, VISION, PATCH, stride=PATCH)
        self.patch_positions = nn.Parameter(0.02 * torch.randn(1, IMAGE_TOKENS, VISION))
        self.vision = nn.ModuleList(Block(VISION, 4, causal=False) for _ in range(VISION_LAYERS))
        self.projector = nn.Sequential(nn.LayerNorm(VISION), nn.Linear(VISION, HIDDEN), nn.GELU())
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.positions = nn.Parameter(0.02 * torch.randn(1, IMAGE_TOKENS + CONTEXT, HIDDEN))
        self.decoder = nn.ModuleList(Block(HIDDEN, 6, causal=True) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, images, tokens, labels):
        pixels = self.patches(images).flatten(2).transpose(1, 2) + self.patch_positions
        for block in self.vision:
            pixels = block(pixels)
        x = torch.cat((self.projector(pixels), self.embedding(tokens)), dim=1) + self.positions
        for block in self.decoder:
            x = block(x)
        logits = self.head(self.norm(x[:, IMAGE_TOKENS:]))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def build_model():
    return VisionLanguage()


def example_inputs(batch_size):
    tokens, labels = torch.randint(VOCAB, (2, batch_size, CONTEXT))
    return {"images": torch.randn(batch_size, 3, SIZE, SIZE), "tokens": tokens, "labels": labels}
