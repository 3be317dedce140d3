"""Attention over a sequence that is cut along a mesh axis: keys and values travel round a ring of ranks.

Queries, keys and values of a rank's piece in, the attention output of the piece out, differentiable; in
plain PyTorch: generated stage modules carry a copy. Blocks are merged by their log-sum-exp, and each
block's backward uses the output and log-sum-exp of the whole row: FlashAttention (arXiv 2205.14135), round
a ring (arXiv 2310.01889). Cut in zigzag (piece r of 2n and its mirror image), all ranks do equal causal work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autoplan_passes.collectives import GROUPS, DryGroup, Tensor, rank_of, size_of

LARGEST_SCORES = 2**27  # elements of one block of scores, where no fused kernel computes them
SIXTEEN_BIT = (torch.bfloat16, torch.float16)


# --- one block: queries of this rank against keys of another ---------------------------------------


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in SIXTEEN_BIT else x


def fused_kernel(q: Tensor, v: Tensor, mask: Tensor | None) -> str:
    """The kernel that serves a block: of the CPU, of CUDA, or none."""
    if mask is not None or q.shape[-1] != v.shape[-1]:
        return ""
    if q.device.type == "cpu":
        return "cpu"
    fits = q.dtype in SIXTEEN_BIT and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return "cuda" if q.device.type == "cuda" and fits else ""


def attend_block(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of one block."""
    aten, fused = torch.ops.aten, fused_kernel(q, v, mask)
    if fused == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    if fused == "cuda":
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)[:2]
    parts: list[tuple[Tensor, Tensor]] = []
    for rows in _row_blocks(q, k):
        scores = _scores(q, k, mask, causal, scale, rows)
        log_sum = scores.logsumexp(-1)
        weights = (scores - log_sum.unsqueeze(-1)).exp().nan_to_num(0.0)
        parts.append(((weights.to(v.dtype) @ v), log_sum))
    return torch.cat([out for out, _ in parts], -2), torch.cat([log_sum for _, log_sum in parts], -1)


def attend_block_backward(
    gradient: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None],
    out: Tensor,
    log_sum: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one block's queries, keys and values; ``out`` and ``log_sum`` are of whole rows."""
    q, k, v, mask = inputs
    aten, fused = torch.ops.aten, fused_kernel(q, v, mask)
    if fused == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, q, k, v, out, log_sum, 0.0, causal, scale=scale
        )
    if fused == "cuda":
        seed = torch.empty(2, dtype=torch.uint64, device=q.device)  # of dropout, which there is none of
        lengths = (None, None, q.shape[-2], k.shape[-2])
        return aten._scaled_dot_product_flash_attention_backward(
            gradient, q, k, v, out, log_sum, *lengths, 0.0, causal, seed, seed[0], scale=scale
        )
    d_q, d_k, d_v = torch.zeros_like(_wide(q)), torch.zeros_like(_wide(k)), torch.zeros_like(_wide(v))
    for rows in _row_blocks(q, k):
        own, g = log_sum[..., rows].unsqueeze(-1), gradient[..., rows, :]
        weights = (_scores(q, k, mask, causal, scale, rows) - own).exp().nan_to_num(0.0)
        d_v += _wide(weights.to(v.dtype).mT @ g)
        mean = (_wide(g) * _wide(out[..., rows, :])).sum(-1, keepdim=True)
        slope = (weights * (_wide(g @ v.mT) - mean) * scale).to(q.dtype)
        d_q[..., rows, :] = _wide(slope @ k)
        d_k += _wide(slope.mT @ q[..., rows, :])
    return d_q, d_k, d_v


def _row_blocks(q: Tensor, k: Tensor) -> list[slice]:
    """Rows of queries whose scores may be held at once."""
    rows = q.shape[-2]
    step = max(1, LARGEST_SCORES // max(1, q[..., 0, 0].numel() * k.shape[-2]))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float, rows: slice) -> Tensor:
    scores = _wide(q[..., rows, :] @ k.mT) * scale
    if causal:
        place = torch.arange(rows.start, rows.stop, device=q.device).unsqueeze(-1)
        later = torch.arange(k.shape[-2], device=q.device) > place
        scores = scores.masked_fill(later, float("-inf"))
    if mask is None:
        return scores
    own = mask[..., rows, :] if mask.shape[-2] > 1 else mask
    return scores.masked_fill(~own, float("-inf")) if own.dtype == torch.bool else scores + own


def _merge(out: Tensor, log_sum: Tensor, more: Tensor, more_log_sum: Tensor) -> tuple[Tensor, Tensor]:
    """Two blocks of the same queries as one; a block without keys has log-sum-exp -inf."""
    total = torch.logaddexp(log_sum, more_log_sum)
    kept, added = ((part - total).exp().nan_to_num(0.0).unsqueeze(-1) for part in (log_sum, more_log_sum))
    return out * kept + _wide(more) * added, total


def _grouped(x: Tensor, heads: int) -> Tensor:
    """Each key-value head once for every query head of its group."""
    return x if x.shape[-3] == heads else x.repeat_interleave(heads // x.shape[-3], -3)


def _ungrouped(x: Tensor, heads: int) -> Tensor:
    """The gradient of :func:`_grouped`."""
    return x if x.shape[-3] == heads else x.unflatten(-3, (heads, -1)).sum(-3)


# --- the ring ----------------------------------------------------------------------------------------


class Ring:
    """This rank's place: what it computes at each step, and passing tensors on to the next rank."""

    def __init__(self, rank: int, size: int, group: str, causal: bool, zigzag: bool) -> None:
        self.rank, self.size, self.group = rank, size, group
        self.causal, self.zigzag = causal, zigzag

    def source(self, step: int) -> int:
        """Whose keys and values are here at this step."""
        return (self.rank - step) % self.size

    def block(self, step: int, q: Tensor, k: Tensor) -> tuple[slice, slice, bool] | None:
        """Rows of the queries, columns of the keys here, and whether the block is causal in itself."""
        source, rows, columns = self.source(step), slice(0, q.shape[-2]), slice(0, k.shape[-2])
        if not self.causal or source == self.rank:
            return rows, columns, self.causal
        if self.zigzag:
            half = q.shape[-2] // 2
            earlier, later = slice(0, half), slice(half, q.shape[-2])
            return (rows, earlier, False) if source < self.rank else (later, columns, False)
        return (rows, columns, False) if source < self.rank else None

    def columns(self, mask: Tensor | None, step: int) -> Tensor | None:
        """The columns of a mask that belong to the keys here."""
        if mask is None or mask.shape[-1] == 1:
            return mask
        source = self.source(step)
        if not self.zigzag:
            return mask.chunk(self.size, -1)[source]
        pieces = mask.chunk(2 * self.size, -1)
        return torch.cat([pieces[source], pieces[2 * self.size - 1 - source]], -1)

    def send(self, tensors: Sequence[Tensor]) -> Tensor:
        """Start passing tensors on; :meth:`receive` gives those of the rank before."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        if not self.group:
            return flat
        to, from_ = [0] * self.size, [0] * self.size
        to[(self.rank + 1) % self.size] = from_[(self.rank - 1) % self.size] = flat.numel()
        return torch.ops._c10d_functional.all_to_all_single(flat, from_, to, self.group)

    def receive(self, sent: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
        flat = torch.ops._c10d_functional.wait_tensor(sent) if self.group else sent
        return [part.view(shape) for part, shape in zip(flat.split([s.numel() for s in shapes]), shapes)]


def _ring_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    zigzag: bool,
    rank: int,
    size: int,
    group: str,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of the rows of this rank."""
    ring = Ring(rank, size, group, causal, zigzag)
    shapes, heads, held = [k.shape, v.shape], q.shape[-3], [k, v]
    out = _wide(q.new_zeros(*q.shape[:-1], v.shape[-1]))
    log_sum = torch.full_like(out[..., 0], float("-inf"))
    for step in range(size):
        ahead = ring.send(held) if step < size - 1 else None
        block = ring.block(step, q, k)
        if block is not None:
            rows, columns, diagonal = block
            k_here, v_here = (_grouped(x[..., columns, :], heads) for x in held)
            more = attend_block(q[..., rows, :], k_here, v_here, ring.columns(mask, step), diagonal, scale)
            merged = _merge(out[..., rows, :], log_sum[..., rows], *more)
            out[..., rows, :], log_sum[..., rows] = merged
        held = ring.receive(ahead, shapes) if ahead is not None else held
    return out.to(q.dtype), log_sum


def _ring_backward(
    gradient: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None],
    out: Tensor,
    log_sum: Tensor,
    ring: Ring,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values travel as before, their gradients one step behind them until they are home."""
    q, k, v, mask = inputs
    shapes, heads, held = [k.shape, v.shape], q.shape[-3], [k, v]
    d_q, travelling = torch.zeros_like(_wide(q)), None
    log_sum = log_sum.masked_fill(log_sum.isinf(), float("inf"))  # rows that see no key have no gradient
    for step in range(ring.size):
        ahead = ring.send(held) if step < ring.size - 1 else None
        own = [torch.zeros_like(_wide(x)) for x in held]
        block = ring.block(step, q, k)
        if block is not None:
            rows, columns, diagonal = block
            here = tuple(_grouped(x[..., columns, :], heads) for x in held)
            block_inputs = (q[..., rows, :], here[0], here[1], ring.columns(mask, step))
            block_rows = (out[..., rows, :], log_sum[..., rows].contiguous())
            d_rows, *d_held = attend_block_backward(
                gradient[..., rows, :], block_inputs, *block_rows, diagonal, scale
            )
            d_q[..., rows, :] += d_rows
            for total, part, x in zip(own, d_held, held):
                total[..., columns, :] += _ungrouped(_wide(part), x.shape[-3])
        if travelling is not None:
            own = [a + b for a, b in zip(own, ring.receive(travelling, shapes))]
        travelling = ring.send(own)
        held = ring.receive(ahead, shapes) if ahead is not None else held
    assert travelling is not None
    d_k, d_v = ring.receive(travelling, shapes)
    return d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype)


def _ring_operator() -> Any:
    """The forward as one operator, so that selective recompute keeps its result and compilers see one op."""
    schema = (
        "(Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, float scale, bool zigzag, "
        "int rank, int size, str group) -> (Tensor, Tensor)"
    )
    if hasattr(torch.ops.autoplan, "ring_forward"):  # another stage's: a second one would take it away
        return torch.ops.autoplan.ring_forward.default
    operator = torch.library.custom_op(
        "autoplan::ring_forward", _ring_forward, mutates_args=(), schema=schema
    )

    def fake(q: Tensor, _k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        return out, _wide(q.new_empty(0)).new_empty(q.shape[:-1])

    operator.register_fake(fake)
    return operator


RING_FORWARD = _ring_operator()


class _RingAttention(torch.autograd.Function):
    """Saves queries, keys, values, output and log-sum-exp of this rank's rows."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        options: tuple[bool, float, bool],
        axis: str,
    ) -> Tensor:
        causal, scale, zigzag = options
        group = GROUPS[axis]
        name = "" if isinstance(group, DryGroup) else group.group_name
        out, log_sum = RING_FORWARD(q, k, v, mask, *options, rank_of(axis), size_of(axis), name)
        ctx.save_for_backward(q, k, v, mask, out, log_sum)
        ctx.ring, ctx.scale = Ring(rank_of(axis), size_of(axis), name, causal, zigzag), scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        q, k, v, mask, out, log_sum = ctx.saved_tensors
        inputs = (q, k, v, mask)
        return *_ring_backward(gradients[0], inputs, out, log_sum, ctx.ring, ctx.scale), None, None, None


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, zigzag: bool, axis: str
) -> Tensor:
    """Attention of [samples, heads, rows, size] pieces; fewer key-value heads serve groups of query heads.

    ``mask`` has this rank's rows and all columns. ``zigzag``: the rank's rows are piece r of 2n and piece
    2n - 1 - r; else piece r of n.
    """
    return _RingAttention.apply(q, k, v, mask, (causal, scale, zigzag), axis)  # pyright: ignore[reportReturnType] - torch types apply as Any
