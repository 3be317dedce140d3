"""A model as it is fine-tuned: frozen blocks with adapters, skips over blocks, a shared module, buffers."""

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, RANK, VOCABULARY = 32, 4, 64


class Adapted(nn.Module):
    """A frozen product and the trained product of two small ones beside it."""

    def __init__(self, inner, outer):
        super().__init__()
        self.base = nn.Linear(inner, outer)
        self.base.requires_grad_(False)
        self.lora_a, self.lora_b = nn.Linear(inner, RANK, bias=False), nn.Linear(RANK, outer, bias=False)

    def forward(self, x):
        return self.base(x) + 0.5 * self.lora_b(self.lora_a(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (Adapted(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = Adapted(WIDTH, 64), Adapted(64, WIDTH)
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))

    def forward(self, x, mixer):
        y = self.norm(x)
        q, k, v = (f(y).unflatten(-1, (4, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2)) * self.scale
        return mixer(x + self.down(F.gelu(self.up(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.embedding.requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.mixer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shift", torch.linspace(-1, 1, WIDTH), persistent=False)

    def forward(self, tokens, labels):
        x = self.embedding(tokens) + self.shift
        skips = []
        for i, block in enumerate(self.blocks):
            x = block(x, self.mixer)
            if i < 2:
                skips.append(x)
            else:
                x = x + skips.pop()
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def build_model():
    return Net()


def example_inputs(batch_size):
    tokens, labels = torch.randint(VOCABULARY, (2, batch_size, 8))
    return {"tokens": tokens, "labels": labels}
