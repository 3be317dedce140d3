"""Small modules whose graphs between them hold every op family that gets cut; each is under 30 lines."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@torch.library.custom_op("autoplan_tests::grouped_mm", mutates_args=())
def grouped_mm(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """What ``_grouped_mm`` does, in double precision: rows of expert e times its weight."""
    pieces = rows.tensor_split(ends[:-1].to(torch.int64).cpu())
    return torch.cat([piece @ weight for piece, weight in zip(pieces, weights)])


@grouped_mm.register_fake
def _(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[2])


def _grouped_backward(ctx, gradient: Tensor):
    rows, weights, ends = ctx.saved_tensors
    pieces = [part.tensor_split(ends[:-1].to(torch.int64)) for part in (rows, gradient)]
    by_weight = torch.stack([x.T @ g for x, g in zip(*pieces)])
    return grouped_mm(gradient, weights.transpose(1, 2), ends), by_weight, None


grouped_mm.register_autograd(
    _grouped_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


class FusedBlock(nn.Module):
    """Pre-norm block with one query-key-value weight: ``split``, a view, or attention written out."""

    def __init__(self, how: str, h: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.how, self.heads = how, heads
        self.norms = nn.ModuleList([nn.LayerNorm(h), nn.LayerNorm(h)])
        self.qkv, self.out = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, x: Tensor) -> Tensor:
        b, t, h = x.shape
        y = self.qkv(self.norms[0](x))
        if self.how == "split":
            q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in y.split(h, -1))
        else:
            q, k, v = y.view(b, t, 3, self.heads, h // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        if self.how == "by hand":
            future = torch.ones(t, t, dtype=torch.bool).triu(1)
            scores = (q @ k.transpose(-1, -2) / 3).masked_fill(future, float("-inf"))
            a = scores.softmax(-1) @ v
        else:
            a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, h))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class GroupedBlock(nn.Module):
    """Grouped-query block: q norm, repeated or native kv heads, separate or fused weights, fused gate-up."""

    def __init__(self, kv: int, how: str, h: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.kv, self.d, self.how = heads, kv, h // heads, how
        self.qkv = nn.Linear(h, (heads + 2 * kv) * self.d, bias=False) if how == "fused" else None
        self.q = nn.Linear(h, h, bias=False) if how != "fused" else None
        self.k, self.v = (nn.Linear(h, kv * self.d) if how != "fused" else None for _ in range(2))
        self.out, self.gate_up = nn.Linear(h, h, bias=False), nn.Linear(h, 4 * h, bias=False)
        self.down, self.norm = nn.Linear(2 * h, h, bias=False), nn.RMSNorm(h)
        self.q_scale = nn.Parameter(torch.rand(self.d))

    def forward(self, x: Tensor) -> Tensor:
        b, t, h = x.shape
        y = self.norm(x)
        if self.qkv is not None:
            sizes = [self.heads, self.kv, self.kv]
            q, k, v = self.qkv(y).view(b, t, -1, self.d).split(sizes, 2)
        else:
            q, k, v = (m(y).view(b, t, -1, self.d) for m in (self.q, self.k, self.v) if m is not None)
        q = q * torch.rsqrt(q.pow(2).mean(-1, keepdim=True) + 1e-6) * self.q_scale
        q, k, v = (z.transpose(1, 2) for z in (q, k, v))
        native = self.how == "native"
        if not native:
            shape = (b, self.kv, self.heads // self.kv, t, self.d)
            k, v = (z[:, :, None].expand(shape).reshape(b, self.heads, t, self.d) for z in (k, v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=native)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, h))
        gate, up = self.gate_up(self.norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Rotary(nn.Module):
    """Low-rank keys with one shared rotary head (multi-head latent attention in small)."""

    def __init__(self, h: int = 32, heads: int = 4, rank: int = 8) -> None:
        super().__init__()
        self.heads, self.rank = heads, rank
        self.q, self.out = nn.Linear(h, h, bias=False), nn.Linear(h // 2, h, bias=False)
        self.down, self.up = nn.Linear(h, rank + 4, bias=False), nn.Linear(rank, heads * 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.q(x).view(b, t, self.heads, 8).transpose(1, 2)
        low, shared = self.down(x).split([self.rank, 4], -1)
        k, v = self.up(low).view(b, t, self.heads, 8).transpose(1, 2).split([4, 4], -1)
        k = torch.cat([k, shared.view(b, 1, t, 4).expand(b, self.heads, t, 4)], -1)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(a.transpose(1, 2).reshape(b, t, -1))


class Embed(nn.Module):
    def __init__(self, h: int = 32, vocabulary: int = 64) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, h, padding_idx=3), nn.Embedding(8, h)

    def forward(self, ids: Tensor) -> Tensor:
        return self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))


class Head(nn.Module):
    def __init__(self, h: int = 32, vocabulary: int = 64) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(h), nn.Linear(h, vocabulary)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.out(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=5, label_smoothing=0.1)


class Diffusion(nn.Module):
    """Patches by convolution, time embedding, six modulations in one weight, einsum back to pixels."""

    def __init__(self, h: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.patch, self.position = nn.Conv2d(4, h, 2, 2), nn.Parameter(torch.rand(1, 16, h))
        self.time = nn.Sequential(nn.Linear(16, h), nn.SiLU(), nn.Linear(h, h))
        self.modulation, self.qkv, self.out = nn.Linear(h, 6 * h), nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.up, self.down, self.pixels = nn.Linear(h, 4 * h), nn.Linear(4 * h, h), nn.Linear(h, 16)
        self.norm = nn.LayerNorm(h, elementwise_affine=False)

    def forward(self, image: Tensor, time: Tensor, target: Tensor) -> Tensor:
        x = self.patch(image).flatten(2).transpose(1, 2) + self.position
        b, t, h = x.shape
        angles = time[:, None] * torch.exp(-torch.arange(8, dtype=image.dtype) / 8)[None]
        parts = self.modulation(F.silu(self.time(torch.cat([angles.cos(), angles.sin()], -1)))).chunk(6, 1)
        s1, b1, g1, s2, b2, g2 = (part.unsqueeze(1) for part in parts)
        y = self.norm(x) * (1 + s1) + b1
        q, k, v = self.qkv(y).reshape(b, t, 3, self.heads, h // self.heads).permute(2, 0, 3, 1, 4)
        x = x + g1 * self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, h))
        x = x + g2 * self.down(F.gelu(self.up(self.norm(x) * (1 + s2) + b2), approximate="tanh"))
        y = self.pixels(self.norm(x)).reshape(b, 4, 4, 2, 2, 4)
        return F.mse_loss(torch.einsum("nhwpqc->nchpwq", y).reshape(b, 4, 8, 8), target)


class Experts(nn.Module):
    """Top-2 routing by sorted rows and grouped products over fused gate-up weights, with a shared expert."""

    def __init__(self, grouped: Callable[..., Tensor], h: int = 32, f: int = 16, experts: int = 4) -> None:
        super().__init__()
        self.grouped, self.experts = grouped, experts
        self.router, self.one, self.two = nn.Linear(h, experts, bias=False), nn.Linear(h, f), nn.Linear(f, h)
        shapes = ((experts, 2 * f, h), (experts, h, f))
        self.gate_up, self.down = (nn.Parameter(torch.rand(shape) - 0.5) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        y = x.reshape(-1, x.shape[-1])
        weights, chosen = self.router(y).softmax(-1).topk(2, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        expert, order = chosen.view(-1).sort()
        counts = torch.histc(expert.float(), self.experts, 0, self.experts - 1)
        ends = counts.cumsum(0).to(torch.int32)
        gate, up = self.grouped(y[order // 2], self.gate_up.transpose(-2, -1), ends).chunk(2, -1)
        rows = self.grouped(F.silu(gate) * up, self.down.transpose(-2, -1), ends)
        rows = rows * weights.view(-1)[order].unsqueeze(-1)
        back = torch.empty_like(order).index_put((order,), torch.arange(order.shape[0]))
        out = rows[back].view(-1, 2, y.shape[-1]).sum(1)
        return x + (out + self.two(F.relu(self.one(y)))).view_as(x)


class Scan(nn.Module):
    """A state-space block in small: depthwise convolution, sections of a weight, cumulative sums, einsum."""

    def __init__(self, h: int = 16, heads: int = 4, groups: int = 2, n: int = 4) -> None:
        super().__init__()
        self.h, self.heads, self.groups, self.n = h, heads, groups, n
        self.into = nn.Linear(h, 2 * h + 2 * groups * n + heads, bias=False)
        self.mix = nn.Conv1d(h + 16, h + 16, 3, groups=h + 16, padding=2)
        self.out = nn.Linear(h, h, bias=False)
        self.rate, self.skip = nn.Parameter(torch.rand(heads)), nn.Parameter(torch.rand(heads))

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        gate, inner, step = self.into(x).split([self.h, self.h + 2 * self.groups * self.n, self.heads], -1)
        inner = F.silu(self.mix(inner.transpose(1, 2))[..., :t]).transpose(1, 2)
        value, key, query = inner.split([self.h, self.groups * self.n, self.groups * self.n], -1)
        value = value.view(b, t, self.heads, -1)
        key, query = (z.view(b, t, self.groups, self.n) for z in (key, query))
        key, query = (z.repeat_interleave(self.heads // self.groups, 2) for z in (key, query))
        decay = (F.softplus(step) * -self.rate.exp()).permute(0, 2, 1).cumsum(-1)
        weight = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).tril().exp().tril()
        scores = torch.einsum("bthn,bshn->bhts", query, key) * weight
        mixed = torch.einsum("bhts,bshp->bthp", scores, value) + value * self.skip[:, None]
        return x + self.out(mixed.reshape(b, t, -1) * F.silu(gate))


class Adapter(nn.Module):
    """A frozen linear map and a trained low-rank one."""

    def __init__(self, h: int = 32) -> None:
        super().__init__()
        self.base, self.a = nn.Linear(h, 2 * h), nn.Linear(h, 4, bias=False)
        self.b = nn.Linear(4, 2 * h, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.base(x) + self.b(self.a(x)) * 2).tanh().sum(-1).mean()
