"""A GPT on packed rows: documents of several lengths side by side, told apart by their numbers; positions
start again in each."""

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, HEADS, VOCABULARY, LENGTH = 32, 4, 64, 16
LENGTHS = ((5, 3, 8), (9, 7), (2, 14), (4, 4, 4, 4))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x, mask):
        y = self.norm_1(x)
        q, k, v = (f(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class PackedGPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens, documents, positions, labels):
        order = torch.arange(tokens.shape[1], device=tokens.device)
        same = documents[:, :, None] == documents[:, None, :]
        mask = (same & (order[:, None] >= order[None, :]))[:, None]
        x = self.embedding(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x, mask)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def build_model():
    return PackedGPT()


def example_inputs(batch_size):
    tokens, labels = torch.randint(VOCABULARY, (2, batch_size, LENGTH))
    lengths = [LENGTHS[i % len(LENGTHS)] for i in range(batch_size)]
    rows = [torch.tensor([i for i, n in enumerate(row) for _ in range(n)]) for row in lengths]
    positions = [torch.cat([torch.arange(n) for n in row]) for row in lengths]
    labels = labels.clone()
    for row, ends in zip(labels, lengths):
        row[torch.tensor(ends).cumsum(0) - 1] = -100
    return {
        "tokens": tokens,
        "documents": torch.stack(rows),
        "positions": torch.stack(positions),
        "labels": labels,
    }
