"""A small decoder with a large vocabulary."""

import torch
from torch import nn
from torch.nn import functional as F

VOCAB, HIDDEN = 131072, 512


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-5)
        self.gate, self.up = (nn.Linear(HIDDEN, 2048, bias=False) for _ in range(2))
        self.down = nn.Linear(2048, HIDDEN, bias=False)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(VOCAB, HIDDEN), nn.RMSNorm(HIDDEN, eps=1e-5)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens, labels):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), labels.flatten())


def build_model():
    return Net()


def example_inputs(batch_size, sequence=4096):
    tokens, labels = torch.randint(VOCAB, (2, batch_size, sequence))
    return {"tokens": tokens, "labels": labels}
