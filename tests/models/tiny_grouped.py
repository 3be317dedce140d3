"""One layer of four query heads on two kv heads, causal by flag, and an MLP."""

import torch
from torch import nn
from torch.nn import functional as F


class TinyGrouped(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.out = nn.Embedding(20, 16), nn.Linear(16, 20)
        self.q, self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 8)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, tokens, labels):
        x = self.tokens(tokens)
        q, k, v = (f(x).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + y.transpose(1, 2).flatten(2)
        x = x + self.down(F.gelu(self.up(x)))
        return F.cross_entropy(self.out(x).flatten(0, 1), labels.flatten())


def build_model():
    return TinyGrouped()


def example_inputs(batch_size, sequence=16):
    tokens, labels = torch.randint(20, (2, batch_size, sequence))
    return {"tokens": tokens, "labels": labels}
