"""The smallest GPT: two blocks, a head tied to the embedding, dropout."""

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        y = self.norm_1(x)
        q, k, v = (f(y).unflatten(-1, (4, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1 if self.training else 0.0)
        x = x + F.dropout(self.out(y.transpose(1, 2).flatten(2)), 0.1, self.training)
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class TinyGPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens, labels):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def build_model():
    return TinyGPT()


def example_inputs(batch_size):
    tokens, labels = torch.randint(64, (2, batch_size, 8))
    return {"tokens": tokens, "labels": labels}
