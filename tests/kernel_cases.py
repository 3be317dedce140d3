"""Every fused operator beside the unfused PyTorch it stands for, on the inputs that go wrong first."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import autoplan_codegen.kernels
from autoplan_codegen.kernels.gated import uniform
from autoplan_codegen.kernels.rotary import rotate_half
from autoplan_codegen.kernels.sparse import index_scores

assert autoplan_codegen.kernels.OPERATORS
OPS = torch.ops.autoplan
Make = Callable[["Inputs"], tuple[Any, ...]]


class Inputs:
    """Random tensors of one dtype; parameters and activations want gradients."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.generator = dtype, torch.Generator().manual_seed(5)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        wide = torch.randn(shape, dtype=torch.float64, generator=self.generator) * scale
        return wide.to(self.dtype).requires_grad_()

    def strided(self, *shape: int) -> Tensor:
        """The first of two halves of the last dim: rows that do not follow each other."""
        return self.normal(*shape[:-1], 2 * shape[-1]).chunk(2, -1)[0]

    def swapped(self, *shape: int) -> Tensor:
        """[samples, heads, rows, size] as attention has it: a view of [samples, rows, heads, size]."""
        samples, heads, rows, size = shape
        return self.normal(samples, rows, heads, size).transpose(1, 2)

    def labels(self, rows: int, classes: int, ignored: int = 0) -> Tensor:
        made = torch.randint(classes, (rows,), generator=self.generator)
        return made.index_fill(0, torch.arange(ignored), -100)

    def plain(self, *shape: int) -> Tensor:
        return self.normal(*shape).detach()


@dataclass(frozen=True)
class Case:
    """``operator(*inputs)`` against ``reference(*inputs)``; both give a tensor or several."""

    operator: Callable[..., Any]
    reference: Callable[..., Any]
    inputs: Make
    checked: int | None = None
    """How many of the outputs are compared (all)."""
    slack: float = field(default=1.0)
    """Factor on the tolerance, where the unfused form itself rounds more often."""


# --- references: what a model would have said --------------------------------------------------------


def rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    wide = x.float() if x.dtype != torch.float64 else x
    hat = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return hat.to(x.dtype) if weight is None else weight * hat.to(x.dtype)


def add_rms(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return rms(x + residual, weight, eps), x + residual


def layer(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def add_layer(x: Tensor, residual: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return layer(x + residual, *rest), x + residual


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    part, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    return torch.cat([part * cos + rotate_half(part) * sin, rest], -1).to(x.dtype)


def losses(logits: Tensor, labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    wide = logits.float() if logits.dtype != torch.float64 else logits
    found = F.cross_entropy(wide, labels, ignore_index=ignore_index, reduction="none")
    return found, wide.logsumexp(-1)


def linear_losses(hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    return losses(F.linear(hidden, weight, bias), *rest)


def slice_pieces(logits: Tensor, labels: Tensor, start: int) -> tuple[Tensor, Tensor]:
    wide = logits.float() if logits.dtype != torch.float64 else logits
    hot = (labels.unsqueeze(-1) - start) == torch.arange(logits.shape[-1])
    return wide.logsumexp(-1), (wide * hot).sum(-1)


def linear_slice_pieces(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor]:
    return slice_pieces(F.linear(hidden, weight, bias), *rest)


def dropped(x: Tensor, bias: Tensor | None, p: float, seed: Tensor | None, approximate: str) -> Tensor:
    y = F.gelu(x if bias is None else x + bias, approximate=approximate)
    return y if seed is None else y * (uniform(seed, *x.shape) >= p) / (1 - p)


def attended(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int, scale: float) -> Tensor:
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    mask = mask & (j <= i) if causal else mask
    mask = mask & (j > i - window) if causal and window else mask
    return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)


def sparsely(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, scale: float) -> Tensor:
    mask = torch.zeros(q.shape[0], q.shape[2], k.shape[2] + 1, dtype=torch.bool)
    mask.scatter_(2, torch.where(keys < 0, k.shape[2], keys).long(), True)
    return F.scaled_dot_product_attention(q, k, v, mask[:, None, :, :-1], scale=scale, enable_gqa=True)


def by_expert(x: Tensor, rows: Tensor | None, weight: Tensor, ends: Tensor) -> Tensor:
    x = x if rows is None else x[rows]
    expert = torch.searchsorted(ends, torch.arange(x.shape[0]), right=True)
    return torch.einsum("ni,nio->no", x, weight[expert])


def combined(y: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    return (y[places] * weights.unsqueeze(-1)).sum(1)


# --- inputs ------------------------------------------------------------------------------------------

SEED, EPS = torch.tensor(11 + (7 << 32)), 1e-6
TABLE = torch.tensor([[2, 0, 1, -1], [1, 2, 0, 3], [3, 1, -1, -1]], dtype=torch.int32)


def tables(i: Inputs, *shape: int) -> tuple[Tensor, Tensor]:
    angle = torch.randn(shape, generator=i.generator, dtype=torch.float64)
    return angle.cos().to(i.dtype), angle.sin().to(i.dtype)


def routed(i: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Six tokens, two choices each of four experts; the second expert has none."""
    ends = torch.tensor([5, 5, 9, 12], dtype=torch.int32)
    rows = torch.tensor([0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5])
    return i.normal(6, 16), rows, i.normal(4, 16, 24, scale=0.25), ends


def grouped_heads(i: Inputs, heads: int = 4, shared: int = 2, rows: int = 20, size: int = 16) -> list[Tensor]:
    return [i.swapped(1, n, rows, size) for n in (heads, shared, shared)]


_CE, _LCE = (OPS.cross_entropy, losses), (OPS.linear_cross_entropy, linear_losses)
CASES: dict[str, Case] = {
    "rms_norm": Case(OPS.rms_norm, rms, lambda i: (i.normal(5, 40), i.normal(40), EPS), slack=2),
    "rms_norm, no weight": Case(OPS.rms_norm, rms, lambda i: (i.normal(2, 3, 7), None, EPS)),
    "rms_norm, strided": Case(OPS.rms_norm, rms, lambda i: (i.strided(5, 24), i.normal(24), EPS), slack=2),
    "rms_norm, swapped": Case(
        OPS.rms_norm, rms, lambda i: (i.swapped(2, 3, 5, 8), i.normal(8), EPS), slack=2
    ),
    "swiglu, swapped": Case(
        OPS.swiglu,
        lambda g, u: F.silu(g) * u,
        lambda i: (i.swapped(1, 2, 3, 8), i.swapped(1, 2, 3, 8)),
        slack=2,
    ),
    "rms_norm, empty": Case(OPS.rms_norm, rms, lambda i: (i.normal(0, 8), i.normal(8), EPS)),
    "add_rms_norm": Case(
        OPS.add_rms_norm, add_rms, lambda i: (i.normal(5, 40), i.normal(5, 40), i.normal(40), EPS), slack=2
    ),
    "layer_norm": Case(OPS.layer_norm, layer, lambda i: (i.normal(5, 40), i.normal(40), i.normal(40), EPS)),
    "layer_norm, bare": Case(OPS.layer_norm, layer, lambda i: (i.normal(2, 3, 7), None, None, EPS)),
    "layer_norm, no bias": Case(OPS.layer_norm, layer, lambda i: (i.normal(3, 33), i.normal(33), None, EPS)),
    "add_layer_norm": Case(
        OPS.add_layer_norm,
        add_layer,
        lambda i: (i.normal(5, 20), i.normal(5, 20), i.normal(20), i.normal(20), EPS),
        slack=2,
    ),
    "swiglu": Case(
        OPS.swiglu, lambda g, u: F.silu(g) * u, lambda i: (i.normal(5, 33), i.normal(5, 33)), slack=2
    ),
    "swiglu, halves": Case(
        OPS.swiglu, lambda g, u: F.silu(g) * u, lambda i: i.normal(2, 3, 32).chunk(2, -1), slack=2
    ),
    "swiglu, empty": Case(OPS.swiglu, lambda g, u: F.silu(g) * u, lambda i: (i.normal(0, 8), i.normal(0, 8))),
    "geglu": Case(
        OPS.geglu,
        lambda g, u, a: F.gelu(g, approximate=a) * u,
        lambda i: (i.normal(3, 20), i.normal(3, 20), "none"),
        slack=2,
    ),
    "geglu, tanh": Case(
        OPS.geglu,
        lambda g, u, a: F.gelu(g, approximate=a) * u,
        lambda i: (i.normal(3, 20), i.normal(3, 20), "tanh"),
        slack=2,
    ),
    "rotary": Case(OPS.rotary, turned, lambda i: (i.swapped(2, 3, 5, 16), *tables(i, 1, 1, 5, 16)), slack=2),
    "rotary, heads last": Case(
        OPS.rotary, turned, lambda i: (i.normal(2, 5, 3, 8), *tables(i, 2, 5, 1, 8)), slack=2
    ),
    "rotary, partial": Case(
        OPS.rotary, turned, lambda i: (i.swapped(1, 2, 3, 12), *tables(i, 1, 1, 3, 8)), slack=2
    ),
    "rotary, no heads": Case(OPS.rotary, turned, lambda i: (i.normal(4, 6), *tables(i, 4, 6)), slack=2),
    "rotary, tables of every head": Case(
        OPS.rotary, turned, lambda i: (i.swapped(2, 3, 5, 8), *tables(i, 2, 3, 5, 8)), slack=2
    ),
    "cross_entropy": Case(*_CE, lambda i: (i.normal(5, 37, scale=3), i.labels(5, 37, 2), -100)),
    "cross_entropy, strided": Case(*_CE, lambda i: (i.strided(3, 40), i.labels(3, 40), -100)),
    "cross_entropy, all ignored": Case(*_CE, lambda i: (i.normal(3, 8), i.labels(3, 8, 3), -100)),
    "cross_entropy, empty": Case(*_CE, lambda i: (i.normal(0, 8), i.labels(0, 8), -100)),
    "cross_entropy_pieces": Case(
        OPS.cross_entropy_pieces, slice_pieces, lambda i: (i.normal(6, 20), i.labels(6, 60), 20)
    ),
    "linear_cross_entropy": Case(
        *_LCE, lambda i: (i.normal(7, 12), i.normal(530, 12), None, i.labels(7, 530, 2), -100), slack=2
    ),
    "linear_cross_entropy, bias": Case(
        *_LCE, lambda i: (i.normal(3, 8), i.normal(21, 8), i.normal(21), i.labels(3, 21), -100), slack=2
    ),
    "linear_cross_entropy_pieces": Case(
        OPS.linear_cross_entropy_pieces,
        linear_slice_pieces,
        lambda i: (i.normal(4, 8), i.normal(30, 8), None, i.labels(4, 90), 30),
        slack=2,
    ),
    "bias_gelu_dropout": Case(
        OPS.bias_gelu_dropout, dropped, lambda i: (i.normal(5, 36), i.normal(36), 0.3, SEED, "none"), slack=2
    ),
    "bias_gelu_dropout, tanh": Case(
        OPS.bias_gelu_dropout, dropped, lambda i: (i.normal(3, 20), None, 0.0, None, "tanh"), slack=2
    ),
    "attention": Case(
        OPS.attention, attended, lambda i: (*grouped_heads(i), False, 0, 0.25), checked=1, slack=2
    ),
    "attention, causal": Case(
        OPS.attention, attended, lambda i: (*grouped_heads(i), True, 0, 0.25), checked=1, slack=2
    ),
    "attention, window": Case(
        OPS.attention, attended, lambda i: (*grouped_heads(i), True, 5, 0.25), checked=1, slack=2
    ),
    "grouped_linear": Case(OPS.grouped_linear, by_expert, routed, slack=2),
    "grouped_linear, in place": Case(
        OPS.grouped_linear,
        by_expert,
        lambda i: (i.normal(9, 16), None, i.normal(3, 16, 8, scale=0.25), torch.tensor([2, 2, 9]).int()),
        slack=2,
    ),
    "combine_experts": Case(
        OPS.combine_experts,
        combined,
        lambda i: (i.normal(6, 20), torch.tensor([[5, 0], [2, 3], [1, 4]]), i.normal(3, 2)),
        slack=2,
    ),
    "index_scores": Case(
        lambda q, k, w: index_scores(q, k, w, TABLE[None]).masked_fill(TABLE[None] < 0, 0),
        lambda q, k, w: _scored(q, k, w),
        lambda i: (i.normal(1, 3, 2, 8), i.normal(1, 4, 8), i.normal(1, 3, 2)),
    ),
    "sparse_attention": Case(
        OPS.sparse_attention,
        sparsely,
        lambda i: (i.normal(1, 4, 3, 16), i.normal(1, 2, 4, 16), i.normal(1, 2, 4, 16), TABLE[None], 0.25),
        checked=1,
        slack=2,
    ),
}


def _scored(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    every = torch.einsum("brhc,brh->brc", torch.einsum("brhd,bcd->brhc", q, k).relu(), weights)
    found = every.gather(2, TABLE[None].clamp(min=0).long())
    return found.masked_fill(TABLE[None] < 0, 0)


# --- comparing ---------------------------------------------------------------------------------------

TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def outputs(case: Case, function: Callable[..., Any], inputs: Sequence[Any]) -> list[Tensor]:
    made = function(*inputs)
    made = list(made) if isinstance(made, (tuple, list)) else [made]
    return made[: case.checked] if case.checked else made


def with_gradients(case: Case, function: Callable[..., Any], inputs: Sequence[Any]) -> list[Tensor]:
    """Outputs, then the gradient of every input that wants one."""
    wanted = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    made = outputs(case, function, inputs)
    generator = torch.Generator().manual_seed(7)
    seeds = [torch.randn(y.shape, generator=generator).to(y.dtype) for y in made]
    return [*made, *torch.autograd.grad(made, wanted, seeds)]


def assert_equal_within_rounding(case: Case, dtype: torch.dtype) -> None:
    """The operator's error against fp64 is rounding: of its own dtype, relative to the largest entry."""
    inputs = case.inputs(Inputs(dtype))
    exact = [x.detach().double().requires_grad_(x.requires_grad) if _floats(x) else x for x in inputs]
    found, expected = with_gradients(case, case.operator, inputs), with_gradients(case, case.reference, exact)
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected):
        assert mine.shape == theirs.shape
        largest = max(1.0, theirs.abs().max().item() if theirs.numel() else 0.0)
        error = (mine.double() - theirs).abs().max().item() if mine.numel() else 0.0
        assert math.isfinite(error) and error <= case.slack * TOLERANCE[dtype] * largest, (error, largest)


def _floats(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


# --- operators that are no function of floats ----------------------------------------------------------


def assert_selects_the_best(dtype: torch.dtype) -> None:
    """Three of five columns, of those that a causal row sees."""
    made = Inputs(dtype)
    q, k, weights = made.plain(2, 5, 3, 8), made.plain(2, 5, 8), made.plain(2, 5, 3)
    chosen = OPS.select_keys(q, k, weights, 3, True)
    scores = torch.einsum("brhc,brh->brc", torch.einsum("brhd,bcd->brhc", q, k).relu(), weights)
    for sample in range(2):
        for row in range(5):
            best = scores[sample, row, : row + 1].argsort(descending=True)[:3].tolist()
            assert chosen[sample, row].tolist() == best + [-1] * (3 - len(best))


def assert_adamw_is_torchs(dtype: torch.dtype) -> None:
    """Three steps; tensors of more and of less than one block."""
    made = Inputs(dtype)
    parameters = [made.plain(5, 3), made.plain(2500)]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    masters = [] if dtype == wide else [x.to(wide) for x in parameters]
    expected = [x.to(wide).clone().requires_grad_() for x in parameters]
    optimizer = torch.optim.AdamW(expected, lr=0.1, betas=(0.8, 0.95), eps=1e-7, weight_decay=0.2)
    first, second = ([torch.zeros_like(x) for x in expected] for _ in range(2))
    for step in (1, 2, 3):
        gradients = [made.plain(*x.shape) for x in parameters]
        for x, g in zip(expected, gradients):
            x.grad = g.to(wide) * 0.5
        optimizer.step()
        rest = (0.1, 0.8, 0.95, 1e-7, 0.2, step, 0.5)
        OPS.adamw_step(parameters, gradients, first, second, masters, *rest)
    for x, y, z in zip(masters or parameters, expected, parameters):
        torch.testing.assert_close(x, y.detach())
        torch.testing.assert_close(
            z.to(wide), x, rtol=2**-7 if masters else 0, atol=0
        )  # cut off, interpreted
