# --8<-- [start:model]
"""A character-level language model: reads 32 characters, says which comes next."""

import torch
from torch import nn
from torch.nn import functional as F

TEXT = "the quick brown fox jumps over the lazy dog. "
LETTERS = sorted(set(TEXT))
CONTEXT, WIDTH, HEADS, BLOCKS = 32, 64, 4, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (
            t.view(batch, length, HEADS, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.letters, self.places = nn.Embedding(len(LETTERS), WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, len(LETTERS))

    def forward(self, ids):
        x = self.letters(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x)
# --8<-- [end:model]


# --8<-- [start:autoplan]
def build_model():
    return Reader()


def example_inputs(batch_size):
    text = torch.randint(len(LETTERS), (batch_size, CONTEXT + 1))
    return {"ids": text[:, :-1], "text": text}


def loss_fn(logits, inputs):
    return F.cross_entropy(logits.flatten(0, 1), inputs["text"][:, 1:].flatten())
# --8<-- [end:autoplan]
