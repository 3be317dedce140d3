"""Sixty layers of hidden size 5,376, for samples of a quarter of a million tokens (planned, never run)."""

import torch
from torch import nn
from torch.nn import functional as F

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, FFN = 32768, 5376, 60, 32, 16, 21504
HEAD = HIDDEN // HEADS


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.q, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(HIDDEN, KV_HEADS * HEAD, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(HIDDEN, FFN, bias=False) for _ in range(2))
        self.down = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x):
        y = self.norm_1(x)
        q, k, v = (f(y).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Long(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.norm = nn.Embedding(VOCAB, HIDDEN), nn.RMSNorm(HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens, labels):
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def build_model():
    return Long()


def example_inputs(batch_size, sequence=256000):
    tokens = torch.randint(VOCAB, (batch_size, sequence))
    return {"tokens": tokens, "labels": tokens}
