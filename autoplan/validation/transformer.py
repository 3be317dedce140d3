"""A :class:`Shape` of published sizes comes in; a :class:`ModelSource` of that decoder goes out.

One generic source for every published run: classic blocks (layer norm, biases, one activation, learned
positions) or gated ones (RMS norm, no biases, rotary positions), dense or with experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from autoplan.capture.source import ModelSource

# Blocks that are traced; a model's other blocks are equal to them.
TRACED_LAYERS = 2


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder as published; ``ffn`` is the width of one matrix, ``head_dim`` of one head.

    ``attention`` is ``fused`` (one flash kernel) or ``unfused`` (scores in memory); ``activation`` is
    ``gelu`` or ``squared_relu``; ``dropout`` follows an unfused softmax and both halves of a block.
    ``eager`` writes RMS norms and rotary positions out in fp32, op by op, as PyTorch code does without a
    compiler.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    gated: bool
    vocab: int
    tied: bool
    sequence: int
    activation: str = "gelu"
    attention: str = "fused"
    dropout: float = 0.0
    rotary: bool = False
    eager: bool = False


class Attention(nn.Module):
    """Self-attention with query groups."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        bias = not shape.gated
        self.q = nn.Linear(shape.hidden, width, bias=bias)
        self.k = nn.Linear(shape.hidden, narrow, bias=bias)
        self.v = nn.Linear(shape.hidden, narrow, bias=bias)
        self.o = nn.Linear(width, shape.hidden, bias=bias)

    def forward(self, x: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None) -> torch.Tensor:
        shape = self.shape
        q, k, v = (f(x).unflatten(-1, (-1, shape.head_dim)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if cos is not None and sin is not None:
            q, k = _rotated(q, cos, sin, shape.eager), _rotated(k, cos, sin, shape.eager)
        if shape.attention == "unfused":
            scores = torch.matmul(q, k.transpose(-1, -2)).softmax(dim=-1)
            y = torch.matmul(F.dropout(scores, shape.dropout), v)
        else:
            grouped = shape.kv_heads != shape.heads
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return self.o(y.transpose(1, 2).flatten(2))


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eager: bool) -> torch.Tensor:
    wide = x.float() if eager else x
    left, right = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat((-right, left), dim=-1) * sin).type_as(x)


class FeedForward(nn.Module):
    """Two matrices round an activation, or three with a gate."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.activation = shape.activation
        bias = not shape.gated
        self.gate = nn.Linear(shape.hidden, shape.ffn, bias=False) if shape.gated else None
        self.up = nn.Linear(shape.hidden, shape.ffn, bias=bias)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gate is not None:
            return self.down(F.silu(self.gate(x)) * self.up(x))
        y = self.up(x)
        return self.down(F.relu(y).square() if self.activation == "squared_relu" else F.gelu(y))


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and added to its input."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = _norm(shape), _norm(shape)
        self.attention, self.mlp, self.dropout = Attention(shape), FeedForward(shape), shape.dropout

    def forward(self, x: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None) -> torch.Tensor:
        x = x + F.dropout(self.attention(self.norm_1(x), cos, sin), self.dropout)
        return x + F.dropout(self.mlp(self.norm_2(x)), self.dropout)


class EagerNorm(nn.Module):
    """An RMS norm written out in fp32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-5)
        return normed.type_as(x) * self.weight


def _norm(shape: Shape) -> nn.Module:
    if shape.gated:
        return EagerNorm(shape.hidden) if shape.eager else nn.RMSNorm(shape.hidden, eps=1e-5)
    return nn.LayerNorm(shape.hidden)


class Decoder(nn.Module):
    """Embedding, blocks, final norm, output layer and loss."""

    def __init__(self, shape: Shape, layers: int = TRACED_LAYERS) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.positions = None if shape.rotary else nn.Embedding(shape.sequence, shape.hidden)
        self.layers = nn.ModuleList(Block(shape) for _ in range(layers))
        self.norm = _norm(shape)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        if shape.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x, cos, sin = self.embedding(tokens), None, None
        places = torch.arange(tokens.shape[1], device=tokens.device)
        if self.positions is not None:
            x = x + self.positions(places)
        else:
            half = torch.arange(0, self.shape.head_dim, 2, device=tokens.device)
            angles = torch.outer(places, 1e4 ** -(half / self.shape.head_dim)).repeat(1, 2)
            cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def decoder_source(shape: Shape, layers: int = TRACED_LAYERS) -> ModelSource:
    """What the capture needs: the model (built on meta, never with real weights) and its inputs."""

    def make_inputs(batch: int) -> dict[str, Any]:
        tokens = torch.zeros((batch, shape.sequence), dtype=torch.long)
        return {"tokens": tokens, "labels": tokens.clone()}

    return ModelSource("published", __file__, lambda: Decoder(shape, layers), make_inputs, None, ())
