"""A tiny causal model on padded samples: explicit mask, positions given, loss of the next token inside."""

import torch
from torch import nn
from torch.nn import functional as F

HIDDEN, HEADS, KV_HEADS, HEAD, VOCAB, MOST = 16, 4, 2, 4, 40, 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.q, self.o = nn.Linear(HIDDEN, HEADS * HEAD), nn.Linear(HEADS * HEAD, HIDDEN, bias=False)
        self.k, self.v = (nn.Linear(HIDDEN, KV_HEADS * HEAD, bias=False) for _ in range(2))
        self.up, self.down = nn.Linear(HIDDEN, 24), nn.Linear(24, HIDDEN)

    def forward(self, x, mask):
        y = self.norm_1(x)
        q, k, v = (f(y).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Padded(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(MOST, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, input_ids, attention_mask, position_ids, labels):
        length = input_ids.shape[1]
        earlier = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).tril()
        mask = earlier & attention_mask.bool()[:, None, None, :]
        x = self.tokens(input_ids) + self.positions(position_ids)
        for layer in self.layers:
            x = layer(x, mask)
        logits = self.head(x)[:, :-1].contiguous()
        return F.cross_entropy(logits.view(-1, VOCAB), labels[:, 1:].reshape(-1), ignore_index=-1)


def build_model():
    return Padded()


def example_inputs(batch_size, sequence=16):
    """Samples of different lengths, packed from the left; of every other one only the end is learned."""
    ids = torch.randint(VOCAB, (batch_size, sequence))
    lengths = sequence - torch.arange(batch_size) % 4
    present = torch.arange(sequence) < lengths[:, None]
    learned = present & (
        (torch.arange(sequence) > sequence // 2) | (torch.arange(batch_size) % 2)[:, None].bool()
    )
    positions = torch.arange(sequence).flip(0).expand(batch_size, -1).contiguous()
    labels = torch.where(learned, ids, -1)
    return {"input_ids": ids, "attention_mask": present.long(), "position_ids": positions, "labels": labels}
