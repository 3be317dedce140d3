"""A GPT of sizes that few degrees divide: 51 tokens, 3 blocks, 8 query heads on 2 key-value heads; tied."""

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY, WIDTH, HEADS, KV_HEADS = 51, 32, 8, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        size = WIDTH // HEADS
        self.q, self.k, self.v = (nn.Linear(WIDTH, n * size) for n in (HEADS, KV_HEADS, KV_HEADS))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x):
        y = self.norm_1(x)
        size = WIDTH // HEADS
        q, k, v = (f(y).unflatten(-1, (-1, size)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class OddGPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens, labels):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float().to(logits.dtype), labels.flatten())


def build_model():
    return OddGPT()


def example_inputs(batch_size):
    tokens, labels = torch.randint(VOCABULARY, (2, batch_size, 8))
    return {"tokens": tokens, "labels": labels}
