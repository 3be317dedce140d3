"""Sparse attention in the style of DeepSeek-V3.2: an indexer scores keys, rows attend to the best of them.

Indexer: ``score[i, j] = sum_h weights[i, h] * relu(q[i, h] . k[j])`` with few small heads and one key a
position. ``select_keys`` takes the ``count`` best columns of each row, row block by row block;
``sparse_attention`` attends to them alone: time and memory are linear in the sequence for a fixed count.
The selection has no gradient; ``index_scores`` gives the scores of the selected keys with theirs, for the
indexer's own loss.

q [samples, heads, rows, size], k, v [samples, key-value heads, columns, size], keys [samples, rows, count]
int32, -1 where a row sees fewer.
"""
# pyright: reportUnknownLambdaType=false
# - an operator's lambdas take what its schema says

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autoplan_codegen.kernels.operators import launcher, operator, runs_triton, wide, wide_dtype

LARGEST_BLOCK = 2**26  # elements of what plain PyTorch holds at once


def _blocks(rows: int, elements_a_row: int) -> list[slice]:
    step = max(1, LARGEST_BLOCK // max(1, elements_a_row))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


# --- the indexer -------------------------------------------------------------------------------------


def _scores(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """[samples, rows, columns] of q [samples, rows, heads, size], k [samples, columns, size]."""
    products = torch.einsum("brhd,bcd->brhc", wide(q), wide(k)).relu()
    return torch.einsum("brhc,brh->brc", products, wide(weights))


def _select(q: Tensor, k: Tensor, weights: Tensor, count: int, causal: bool) -> Tensor:
    samples, rows, columns = q.shape[0], q.shape[1], k.shape[1]
    chosen = torch.full((samples, rows, count), -1, dtype=torch.int32, device=q.device)
    kept = min(count, columns)
    for own in _blocks(rows, samples * columns * (1 if runs_triton(q, k, weights) else q.shape[2] + 1)):
        if runs_triton(q, k, weights):
            scores = launcher("sparse").scores(q[:, own], k, weights[:, own], own.start, causal)
        else:
            scores = _scores(q[:, own], k, weights[:, own])
            place = torch.arange(own.start, own.stop, device=q.device).unsqueeze(-1)
            later = torch.arange(columns, device=q.device) > place
            scores = scores.masked_fill(later, float("-inf")) if causal else scores
        best, index = scores.topk(kept, -1)
        chosen[:, own, :kept] = index.masked_fill(best == float("-inf"), -1).int()
    return chosen


select_keys = operator(
    "select_keys",
    "(Tensor q, Tensor k, Tensor weights, int count, bool causal) -> Tensor",
    _select,
    lambda q, k, weights, count, causal: q.new_empty(q.shape[0], q.shape[1], count, dtype=torch.int32),
)


def gathered(x: Tensor, keys: Tensor) -> Tensor:
    """x [samples, (heads,) columns, size] at keys [samples, rows, count]: columns become rows, count."""
    sample = torch.arange(x.shape[0], device=x.device).view(-1, *[1] * (keys.dim() - 1))
    at = keys.clamp(min=0).long()
    return x[sample, at] if x.dim() == 3 else x.transpose(1, 2)[sample, at].movedim(-2, 1)


def index_scores(q: Tensor, k: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Scores [samples, rows, count] of the selected keys, differentiable; -inf where there is no key."""
    products = torch.einsum("brhd,brnd->brhn", wide(q), gathered(wide(k), keys)).relu()
    scores = torch.einsum("brhn,brh->brn", products, wide(weights))
    return scores.masked_fill(keys < 0, float("-inf"))


# --- attention to the selected keys ------------------------------------------------------------------


def _grouped(q: Tensor, heads: int) -> Tensor:
    return q.unflatten(1, (heads, -1))  # [samples, key-value heads, group, rows, size]


def _probabilities(q: Tensor, k: Tensor, keys: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    scores = torch.einsum("bhgrd,bhrnd->bhgrn", _grouped(wide(q), k.shape[1]), k) * scale
    scores = scores.masked_fill((keys < 0)[:, None, None], float("-inf"))
    log_sum = scores.logsumexp(-1)
    return (scores - log_sum.unsqueeze(-1)).exp().nan_to_num(0.0), log_sum


def _sparse(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    if runs_triton(q, k, v, keys):
        return launcher("sparse").sparse_attention(q, k, v, keys, scale)
    out, log_sum = _fake_sparse(q, k, v, keys, scale)
    for own in _blocks(q.shape[2], q.shape[0] * keys.shape[2] * (k.shape[1] * k.shape[3] + q.shape[1])):
        weights, sums = _probabilities(q[:, :, own], gathered(wide(k), keys[:, own]), keys[:, own], scale)
        rows = torch.einsum("bhgrn,bhrnd->bhgrd", weights, gathered(wide(v), keys[:, own]))
        out[:, :, own], log_sum[:, :, own] = rows.flatten(1, 2).to(q.dtype), sums.flatten(1, 2)
    return out, log_sum


def _fake_sparse(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    return out, q.new_empty(q.shape[:-1], dtype=wide_dtype(q.dtype))


def _sparse_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, out: Tensor, log_sum: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    if runs_triton(d_out, q, k, v, keys):
        return launcher("sparse").sparse_attention_backward(d_out, q, k, v, keys, out, log_sum, scale)
    d_q, d_k, d_v = (wide(torch.zeros_like(x)) for x in (q, k, v))
    heads = k.shape[1]
    for own in _blocks(q.shape[2], q.shape[0] * keys.shape[2] * (heads * k.shape[3] + q.shape[1])):
        at, g = keys[:, own], _grouped(wide(d_out[:, :, own]), heads)
        k_rows, v_rows = gathered(wide(k), at), gathered(wide(v), at)
        weights, _ = _probabilities(q[:, :, own], k_rows, at, scale)
        mean = (g * _grouped(wide(out[:, :, own]), heads)).sum(-1, keepdim=True)
        slope = weights * (torch.einsum("bhgrd,bhrnd->bhgrn", g, v_rows) - mean) * scale
        d_q[:, :, own] = torch.einsum("bhgrn,bhrnd->bhgrd", slope, k_rows).flatten(1, 2)
        own_q = _grouped(wide(q[:, :, own]), heads)
        _add_at(d_k, at, torch.einsum("bhgrn,bhgrd->bhrnd", slope, own_q))
        _add_at(d_v, at, torch.einsum("bhgrn,bhgrd->bhrnd", weights, g))
    return d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype)


def _add_at(total: Tensor, keys: Tensor, rows: Tensor) -> None:
    """Add rows [samples, heads, rows, count, size] to total at their keys; those without a key are 0."""
    at = keys.clamp(min=0).long()[:, None].expand(rows.shape[:-1]).flatten(2)
    total.scatter_add_(2, at.unsqueeze(-1).expand(*at.shape, rows.shape[-1]), rows.flatten(2, 3))


sparse_attention_backward = operator(
    "sparse_attention_backward",
    "(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor keys, Tensor out, Tensor log_sum, float scale)"
    " -> (Tensor, Tensor, Tensor)",
    _sparse_backward,
    lambda d_out, q, k, v, *_: tuple(torch.empty_like(x) for x in (q, k, v)),
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx: Any, d_out: Tensor, _d_log_sum: Tensor) -> Any:
    return *sparse_attention_backward(d_out, *ctx.saved_tensors, ctx.scale), None, None


sparse_attention = operator(
    "sparse_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor keys, float scale) -> (Tensor, Tensor)",
    _sparse,
    _fake_sparse,
    _gradients,
    _save,
)
