"""Ring attention on four gloo ranks: output and gradients of every case equal one process's, in fp64."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from autoplan.runtime.forked import run_ranks
from autoplan_passes import collectives, ring
from autoplan_passes.recompute import SAVED_OPS, SAVED_OWN_OPS

RANKS, ROWS, HEADS = 4, 8, 4
LIMIT = 1e-12


@dataclass(frozen=True)
class Case:
    """``mask`` is ``rows`` (all of them), ``keys`` (one row for all), ``added`` (numbers) or none."""

    causal: bool = False
    zigzag: bool = True
    kv_heads: int = HEADS
    mask: str = ""
    value_size: int = 8
    keys_a_row: int = 1
    recompute: str = ""


CASES = {
    "causal, zigzag": Case(causal=True),
    "causal, straight": Case(causal=True, zigzag=False),
    "not causal": Case(zigzag=False),
    "grouped heads": Case(causal=True, kv_heads=2),
    "one kv head": Case(kv_heads=1),
    "mask of rows": Case(mask="rows"),
    "mask of rows, straight": Case(mask="rows", zigzag=False),
    "mask of keys": Case(mask="keys", kv_heads=2),
    "added mask": Case(mask="added"),
    "values of another size": Case(causal=True, value_size=6),
    "more keys than queries": Case(keys_a_row=2),
    "full recompute": Case(causal=True, recompute="full"),
    "selective recompute": Case(causal=True, recompute="selective"),
}


def cut(x: Tensor, rank: int, zigzag: bool) -> Tensor:
    """This rank's rows (dim -2)."""
    pieces = x.chunk(2 * RANKS if zigzag else RANKS, -2)
    return torch.cat([pieces[rank], pieces[2 * RANKS - 1 - rank]], -2) if zigzag else pieces[rank]


@cache
def tensors(case: Case) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None, Tensor]:
    """Queries, keys and values, the mask, and the gradient of the output."""
    made = torch.Generator().manual_seed(0)
    rows, keys = RANKS * ROWS, RANKS * ROWS * case.keys_a_row

    def random(*shape: int) -> Tensor:
        return torch.randn(2, *shape, dtype=torch.float64, generator=made)

    inputs = (
        random(HEADS, rows, 8),
        random(case.kv_heads, keys, 8),
        random(case.kv_heads, keys, case.value_size),
    )
    masks = {
        "rows": random(1, rows, keys) > -0.5,
        "keys": random(1, 1, keys) > -0.5,
        "added": random(4, rows, keys),
    }
    return inputs, masks.get(case.mask), random(HEADS, rows, case.value_size)


def on_rank(case: Case, rank: int) -> list[Tensor]:
    """Output and gradients of one rank's rows."""
    inputs, mask, gradient = tensors(case)
    own = [cut(x, rank, case.zigzag).clone().requires_grad_() for x in inputs]
    own_mask = cut(mask, rank, case.zigzag) if mask is not None and mask.shape[-2] > 1 else mask

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ring.ring_attention(q * 1.0, k, v, own_mask, case.causal, 8**-0.5, case.zigzag, "cp")

    if case.recompute == "selective":
        saved = [op for op in map(_operator, (*SAVED_OPS, *SAVED_OWN_OPS.values())) if op is not None]
        contexts = partial(create_selective_checkpoint_contexts, saved)
        out = checkpoint(attend, *own, use_reentrant=False, context_fn=contexts)
    elif case.recompute:
        out = checkpoint(attend, *own, use_reentrant=False)
    else:
        out = attend(*own)
    assert isinstance(out, Tensor)
    out.backward(cut(gradient, rank, case.zigzag))
    return [out.detach(), *(x.grad for x in own if x.grad is not None)]


def _operator(name: str) -> object:
    library, op, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, library), op), overload, None)


@cache
def all_ranks() -> list[dict[str, list[Tensor]]]:
    def body(rank: int) -> dict[str, list[Tensor]]:
        collectives.bind({"cp": dist.group.WORLD})
        return {name: on_rank(case, rank) for name, case in CASES.items()}

    return run_ranks(RANKS, body)


@pytest.mark.parametrize("name", CASES)
def test_ring_equals_attention(name: str) -> None:
    """Gradients of keys that never came home, rows of a fully masked block, halves of a zigzag mixed up."""
    case = CASES[name]
    inputs, mask, gradient = tensors(case)
    full = [x.clone().requires_grad_() for x in inputs]
    out = F.scaled_dot_product_attention(*full, attn_mask=mask, is_causal=case.causal, enable_gqa=True)
    out.backward(gradient)
    wanted = [out.detach(), *(x.grad for x in full if x.grad is not None)]
    for rank, found in enumerate(all_ranks()):
        for mine, whole in zip(found[name], wanted, strict=True):
            assert float((mine - cut(whole, rank, case.zigzag)).abs().max()) < LIMIT, (name, rank)


def pairs(rank: int, zigzag: bool) -> int:
    """Pairs of a query and a key that one rank computes."""
    place = ring.Ring(rank, RANKS, "", True, zigzag)
    q = torch.empty(1, 1, ROWS, 1)
    blocks = [block for step in range(RANKS) if (block := place.block(step, q, q)) is not None]
    sizes = [(rows.stop - rows.start) * (keys.stop - keys.start) for rows, keys, _ in blocks]
    return sum(size // 2 if own else size for size, (_, _, own) in zip(sizes, blocks))


def test_zigzag_is_even() -> None:
    """Cut in order, the last rank computes seven times what the first does."""
    assert len({pairs(rank, zigzag=True) for rank in range(RANKS)}) == 1
    in_order = [pairs(rank, zigzag=False) for rank in range(RANKS)]
    assert in_order[-1] == (2 * RANKS - 1) * in_order[0]


def _no_kernel(*_: object) -> str:
    return ""


def test_blocks_without_a_fused_kernel_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain products in several runs of rows give what the kernel gives, gradients included."""
    inputs, _, gradient = tensors(CASES["causal, zigzag"])
    results: list[list[Tensor]] = []
    for limit, fused in ((2**27, True), (RANKS * ROWS * 20, False)):
        monkeypatch.setattr(ring, "LARGEST_SCORES", limit)
        if not fused:
            monkeypatch.setattr(ring, "fused_kernel", _no_kernel)
        out, log_sum = ring.attend_block(*inputs, None, True, 0.3)
        grads = ring.attend_block_backward(gradient, (*inputs, None), out, log_sum, True, 0.3)
        results.append([out, log_sum, *grads])
    assert all(float((a - b).abs().max()) < LIMIT for a, b in zip(*results, strict=True))
