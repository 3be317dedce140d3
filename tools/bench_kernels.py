"""Times every fused operator on this GPU against its roofline, PyTorch eager, torch.compile and Liger-Kernel.

Prints a table: milliseconds forward and forward + backward, the fraction of the *measured* copy bandwidth
(of products: of the measured bf16 rate), and one Llama block's step fused against unfused. At most 6 minutes.
Without a CUDA device or Triton it says so and ends.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.nn import functional as F

import autoplan_codegen.kernels
from autoplan_codegen.kernels.operators import has_triton
from autoplan_codegen.kernels.rotary import rotate_half

assert autoplan_codegen.kernels.OPERATORS
OPS = torch.ops.autoplan
LIMIT_S = 330.0
Function = Callable[..., Tensor]


@dataclass(frozen=True)
class Sizes:
    """What the operators run on: a 7B model's, or less."""

    tokens: int = 8192
    hidden: int = 4096
    inner: int = 14336
    heads: int = 32
    shared_heads: int = 8
    head: int = 128
    vocabulary: int = 128256


@dataclass(frozen=True)
class Row:
    """``moved``: bytes of one forward, FLOPs where ``flops``; ``liger``: its module and function there."""

    fused: Function
    eager: Function | None
    inputs: Callable[[Sizes, torch.device], Sequence[Any]]
    moved: Callable[[Sizes], float]
    flops: bool = False
    random: bool = False
    liger: tuple[str, Callable[[Any], Function]] | None = None


def normal(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.bfloat16).mul_(0.5).requires_grad_()


def eager_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def eager_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + rotate_half(x) * sin


def eager_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _rows(s: Sizes, d: torch.device) -> Tensor:
    return normal(s.tokens, s.hidden, device=d)


def _labels(s: Sizes, d: torch.device) -> Tensor:
    return torch.randint(s.vocabulary, (s.tokens,), device=d)


def _positions(s: Sizes, d: torch.device) -> list[Tensor]:
    angles = torch.randn(1, 1, s.tokens, s.head, device=d)
    return [angles.cos().bfloat16(), angles.sin().bfloat16()]


def step_adamw(*tensors: Tensor) -> Tensor:
    OPS.adamw_step(*([x] for x in tensors), [], 1e-3, 0.9, 0.95, 1e-8, 0.1, 10, 1.0)
    return tensors[0]


def eager_adamw(parameter: Tensor, gradient: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """What ``torch.optim.AdamW`` does, op by op."""
    parameter.mul_(1 - 1e-4)
    first.lerp_(gradient, 0.1)
    second.mul_(0.95).addcmul_(gradient, gradient, value=0.05)
    denominator = (second.sqrt() / (1 - 0.95**10) ** 0.5).add_(1e-8)
    return parameter.addcdiv_(first, denominator, value=-1e-3 / (1 - 0.9**10))


def _moments(s: Sizes, d: torch.device) -> list[Tensor]:
    made = [torch.randn(s.inner * s.hidden, device=d) for _ in range(3)]
    return [*made, made[0].square()]


def _routed(s: Sizes, d: torch.device) -> list[Tensor]:
    """Each token twice, to eight experts of a quarter of the inner width, evenly."""
    rows = torch.randperm(2 * s.tokens, device=d) % s.tokens
    ends = torch.arange(1, 9, device=d, dtype=torch.int32) * (s.tokens // 4)
    return [_rows(s, d), rows, normal(8, s.hidden, s.inner // 4, device=d), ends]


def eager_experts(x: Tensor, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(x[rows], weight, offs=ends)


def _selected(s: Sizes, d: torch.device) -> list[Tensor]:
    count = min(2048, s.tokens)
    keys = torch.randint(s.tokens, (1, s.tokens, count), device=d, dtype=torch.int32)
    return [*(normal(1, n, s.tokens, s.head, device=d) for n in (16, 1, 1)), keys]


def _attention(s: Sizes, d: torch.device) -> list[Tensor]:
    return [
        normal(1, heads, s.tokens, s.head, device=d) for heads in (s.heads, s.shared_heads, s.shared_heads)
    ]


ROWS: dict[str, Row] = {
    "rms_norm": Row(
        lambda x, w: OPS.rms_norm(x, w, 1e-6),
        eager_norm,
        lambda s, d: [_rows(s, d), normal(s.hidden, device=d)],
        lambda s: 4.0 * s.tokens * s.hidden,
        liger=("rms_norm", lambda m: lambda x, w: m.LigerRMSNormFunction.apply(x, w, 1e-6)),
    ),
    "add_rms_norm": Row(
        lambda x, r, w: OPS.add_rms_norm(x, r, w, 1e-6)[0],
        lambda x, r, w: eager_norm(x + r, w),
        lambda s, d: [_rows(s, d), _rows(s, d), normal(s.hidden, device=d)],
        lambda s: 8.0 * s.tokens * s.hidden,
    ),
    "add_layer_norm": Row(
        lambda x, r, w, b: OPS.add_layer_norm(x, r, w, b, 1e-6)[0],
        lambda x, r, w, b: F.layer_norm(x + r, w.shape, w, b, 1e-6),
        lambda s, d: [_rows(s, d), _rows(s, d), normal(s.hidden, device=d), normal(s.hidden, device=d)],
        lambda s: 8.0 * s.tokens * s.hidden,
    ),
    "swiglu": Row(
        OPS.swiglu,
        lambda g, u: F.silu(g) * u,
        lambda s, d: [normal(s.tokens, s.inner, device=d) for _ in range(2)],
        lambda s: 6.0 * s.tokens * s.inner,
        liger=("swiglu", lambda m: m.LigerSiLUMulFunction.apply),
    ),
    "bias_gelu": Row(
        lambda x, b: OPS.bias_gelu_dropout(x, b, 0.0, None, "tanh"),
        lambda x, b: F.gelu(x + b, approximate="tanh"),
        lambda s, d: [normal(s.tokens, s.inner, device=d), normal(s.inner, device=d)],
        lambda s: 4.0 * s.tokens * s.inner,
    ),
    "rotary": Row(
        OPS.rotary,
        eager_rotary,
        lambda s, d: [normal(1, s.tokens, s.heads, s.head, device=d).transpose(1, 2), *_positions(s, d)],
        lambda s: 4.0 * s.tokens * s.heads * s.head,
    ),
    "cross_entropy": Row(
        lambda x, y: OPS.cross_entropy(x, y, -100)[0].mean(),
        eager_loss,
        lambda s, d: [normal(s.tokens, s.vocabulary, device=d), _labels(s, d)],
        lambda s: 2.0 * s.tokens * s.vocabulary,
    ),
    "linear_cross_entropy": Row(
        lambda x, w, y: OPS.linear_cross_entropy(x, w, None, y, -100)[0].mean(),
        lambda x, w, y: eager_loss(F.linear(x, w), y),
        lambda s, d: [_rows(s, d), normal(s.vocabulary, s.hidden, device=d), _labels(s, d)],
        lambda s: 2.0 * s.tokens * s.hidden * s.vocabulary,
        flops=True,
        liger=(
            "fused_linear_cross_entropy",
            lambda m: lambda x, w, y: m.LigerFusedLinearCrossEntropyFunction.apply(x, w, y)[0],
        ),
    ),
    "dropout of bias + gelu": Row(
        lambda x, b, seed: OPS.bias_gelu_dropout(x, b, 0.1, seed, "tanh"),
        lambda x, b, _: F.dropout(F.gelu(x + b, approximate="tanh"), 0.1),
        lambda s, d: [
            normal(s.tokens, s.inner, device=d),
            normal(s.inner, device=d),
            torch.tensor(7, device=d),
        ],
        lambda s: 4.0 * s.tokens * s.inner,
        random=True,
    ),
    "adamw, fp32": Row(step_adamw, eager_adamw, _moments, lambda s: 28.0 * s.inner * s.hidden),
    "grouped_linear": Row(
        OPS.grouped_linear,
        eager_experts,
        _routed,
        lambda s: 4.0 * s.tokens * s.hidden * (s.inner // 4),
        flops=True,
    ),
    "sparse_attention, 2048 of the keys": Row(
        lambda q, k, v, at: OPS.sparse_attention(q, k, v, at, q.shape[-1] ** -0.5)[0],
        None,
        _selected,
        lambda s: 64.0 * s.tokens * min(2048, s.tokens) * s.head,
        flops=True,
    ),
    "attention, causal": Row(
        lambda q, k, v: OPS.attention(q, k, v, True, 0, q.shape[-1] ** -0.5)[0],
        causal,
        _attention,
        lambda s: 2.0 * s.tokens * s.tokens * s.heads * s.head,
        flops=True,
    ),
}


# --- one block of Llama --------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention and feed-forward of Llama; ``fused`` says which ops they are made of."""

    def __init__(self, s: Sizes, device: torch.device) -> None:
        super().__init__()
        self.s = s
        shapes = {"q": s.heads * s.head, "k": s.shared_heads * s.head, "v": s.shared_heads * s.head}
        widths = {name: (s.hidden, out) for name, out in shapes.items()}
        widths |= {"o": (s.heads * s.head, s.hidden), "gate": (s.hidden, s.inner), "up": (s.hidden, s.inner)}
        widths |= {"down": (s.inner, s.hidden)}
        self.linears = nn.ModuleDict(
            {n: nn.Linear(*w, bias=False, device=device, dtype=torch.bfloat16) for n, w in widths.items()}
        )
        norms = [nn.Parameter(torch.ones(s.hidden, device=device, dtype=torch.bfloat16)) for _ in range(2)]
        self.norms = nn.ParameterList(norms)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, fused: bool) -> Tensor:
        first, second, s = *self.norms, self.s
        normed = OPS.rms_norm(x, first, 1e-6) if fused else eager_norm(x, first)
        q, k, v = (self.linears[n](normed).unflatten(-1, (-1, s.head)).transpose(1, 2) for n in "qkv")
        turn = OPS.rotary if fused else eager_rotary
        attended = causal(turn(q, cos, sin), turn(k, cos, sin), v).transpose(1, 2).flatten(2)
        out = self.linears["o"](attended)
        if fused:
            normed, total = OPS.add_rms_norm(out, x, second, 1e-6)
        else:
            total = out + x
            normed = eager_norm(total, second)
        gate, up = self.linears["gate"](normed), self.linears["up"](normed)
        return total + self.linears["down"](OPS.swiglu(gate, up) if fused else F.silu(gate) * up)


def block_step(block: Block, fused: bool, device: torch.device) -> Callable[[], None]:
    x = normal(1, block.s.tokens, block.s.hidden, device=device)
    cos, sin = _positions(block.s, device)

    def step() -> None:
        block(x, cos, sin, fused).sum().backward()

    return step


# --- timing ------------------------------------------------------------------------------------------


def milliseconds(function: Callable[[], Any]) -> float:
    from triton.testing import do_bench

    return float(do_bench(function, warmup=20, rep=80, return_mode="median"))


def both_ways(function: Function, inputs: Sequence[Any]) -> Callable[[], None]:
    wanted = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    seed: list[Tensor] = []

    def run() -> None:
        y = function(*inputs)
        seed[:] = seed or [torch.ones_like(y)]
        torch.autograd.grad(y, wanted, seed[0])

    return run


def contenders(row: Row) -> dict[str, Function]:
    found: dict[str, Function] = {"autoplan": row.fused}
    if row.eager is not None:
        found |= {"eager": row.eager, "compile": torch.compile(row.eager)}
    if row.liger and importlib.util.find_spec("liger_kernel") is not None:
        found["liger"] = row.liger[1](importlib.import_module(f"liger_kernel.ops.{row.liger[0]}"))
    return found


def measure(name: str, sizes: Sizes, device: torch.device, rates: dict[str, float]) -> list[list[Any]]:
    """Rows of the table: operator, contender, ms forward, ms forward + backward, fraction of the roofline."""
    row, lines = ROWS[name], list[list[Any]]()
    inputs = row.inputs(sizes, device)
    for contender, function in contenders(row).items():
        try:
            forward = milliseconds(lambda function=function: function(*inputs))
            trained = any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
            whole = milliseconds(both_ways(function, inputs)) if trained else ""
        except (torch.OutOfMemoryError, RuntimeError) as error:
            lines.append([name, contender, type(error).__name__, "", ""])
            continue
        best_s = row.moved(sizes) / rates["flops_per_s" if row.flops else "bytes_per_s"]
        lines.append([name, contender, forward, whole, best_s * 1e3 / forward])
    return lines


def machine_rates(device: torch.device) -> dict[str, float]:
    """Measured here: bytes/s of a copy (read + written), FLOP/s of a large bf16 product."""
    x, y = (torch.empty(2**29, device=device, dtype=torch.bfloat16) for _ in range(2))
    copied = 2 * x.numel() * 2 / (milliseconds(lambda: y.copy_(x)) / 1e3)
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    return {"bytes_per_s": copied, "flops_per_s": 2 * 8192**3 / (milliseconds(lambda: a @ a) / 1e3)}


def run(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    started, lines, left = time.monotonic(), list[list[Any]](), list[str]()
    rates = machine_rates(device)
    for name in ROWS:
        if time.monotonic() - started > LIMIT_S - 60:
            left.append(name)
            continue
        lines += measure(name, sizes, device, rates)
        torch.cuda.empty_cache()
    block = Block(sizes, device)
    for fused in (True, False):
        step_ms = milliseconds(block_step(block, fused, device))
        lines.append(["Llama block step", "fused" if fused else "unfused", "", step_ms, ""])
    versions = {"torch": torch.__version__, "card": torch.cuda.get_device_name(device)}
    return {**versions, **rates, "rows": lines, "left_out": left, "wall_s": time.monotonic() - started}


def missing() -> str:
    """What this machine lacks, or nothing."""
    if not torch.cuda.is_available():
        return "a CUDA device (torch.cuda.is_available() is False)"
    return "" if has_triton() else "Triton (pip install triton)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tokens", type=int, default=Sizes.tokens)
    given = parser.parse_args()
    if missing():
        skipped = f"skipped: the kernels are timed on a GPU, and this machine lacks {missing()}"
        print(json.dumps({"skipped": skipped}) if given.json else skipped)
        return
    found = run(torch.device("cuda", torch.cuda.current_device()), Sizes(tokens=given.tokens))
    if given.json:
        print(json.dumps(found))
        return
    print(f"{found['card']}, torch {found['torch']}, {time.strftime('%Y-%m-%d')}")
    print(
        f"copy {found['bytes_per_s'] / 1e9:.0f} GB/s, bf16 product {found['flops_per_s'] / 1e12:.0f} TFLOP/s"
    )
    headers = ["operator", "by", "forward ms", "forward + backward ms", "of roofline, forward"]
    print(tabulate(found["rows"], headers, floatfmt=".3f"))
    if found["left_out"]:
        print("left out, for time:", ", ".join(found["left_out"]))


if __name__ == "__main__":
    main()
