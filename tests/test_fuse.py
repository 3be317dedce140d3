"""Chains of ops become fused ones however they are written, and only where the result stays the same."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from autoplan.capture import Capture, capture_model
from autoplan.capture.normalise import drop_identities
from autoplan.errors import InfeasibleError
from autoplan.hardware import load_profile
from autoplan.plan import Plan
from autoplan.planner.driver import Request, search_capture, search_plan
from autoplan.planner.space import parse_pins
from autoplan.planner.what_if import with_memory
from autoplan.runtime.check import run_check
from autoplan_passes import fused_loss
from autoplan_passes.fuse import fuse
from autoplan_passes.fusions import KERNELS
from autoplan_passes.local_ops import find_fake_mode
from autoplan_passes.padding import pad_classes

Tensor = torch.Tensor
HF_LLAMA = Path(__file__).parent / "models" / "tiny_llama_hf.py"
LIVE = (2, 3, 8)


@dataclass(frozen=True)
class Case:
    """A function of tensors of these shapes, and the kernels that it becomes, the ops left in brackets."""

    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    kernels: str
    dtype: torch.dtype = torch.float64


def hf_rms(x: Tensor, w: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * wide.to(x.dtype)


def gemma_rms(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    return (wide * (1.0 + w.float())).type_as(x)


def divided_rms(x: Tensor, w: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * w


def power_rms(x: Tensor, w: Tensor) -> Tensor:
    return w * (x * (1e-5 + x.square().mean(dim=-1, keepdim=True)).pow(-0.5))


def residual_rms(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    total = x + r
    return total * 2, F.rms_norm(total, (8,), w, 1e-5)


def handmade_layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return w * (centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5)) + b


def variance_layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    scale = torch.rsqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-5)
    return (x - x.mean(-1, keepdim=True)) * scale * w + b


def residual_layer_norm(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    total = r + x
    return F.layer_norm(total, (8,), w, b), total.sin()


def rotate_by(halves: Callable[[Tensor], Any]) -> Callable[..., Tensor]:
    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        left, right = halves(x)
        return sin * torch.cat((-right, left), dim=-1) + x * cos

    return rotate


def shifted_loss(x: Tensor, w: Tensor) -> Tensor:
    """The logits of all positions but the last, as some models slice them."""
    target = torch.arange(6) % 5
    logits = F.linear(x, w)[:, :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, 5).float(), target.clone())


def flat_loss(x: Tensor, w: Tensor) -> Tensor:
    target = torch.tensor([0, 4, -100, 1, 2, 3, 3, 1])
    return F.cross_entropy(F.linear(x, w).flatten(0, 1), target, label_smoothing=0.1, reduction="sum")


def odd_loss(x: Tensor, w: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w), torch.arange(4))


def new_gelu(gate: Tensor, up: Tensor) -> Tensor:
    bent = torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * torch.pow(gate, 3.0)))
    return 0.5 * gate * (1.0 + bent) * up


def torch_rms(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, (8,), w)


def torch_layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, (8,), w, b)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def swiglu_wide(gate: Tensor, up: Tensor) -> Tensor:
    return up * F.silu(gate.float()).to(up.dtype)


def swiglu_by_hand(gate: Tensor, up: Tensor) -> Tensor:
    return gate * torch.sigmoid(gate) * up


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate) * up


def geglu_tanh(gate: Tensor, up: Tensor) -> Tensor:
    return up * F.gelu(gate, approximate="tanh")


def by_chunk(x: Tensor) -> Sequence[Tensor]:
    return x.chunk(2, -1)


def by_split(x: Tensor) -> Sequence[Tensor]:
    return torch.split(x, 4, -1)


def by_slices(x: Tensor) -> Sequence[Tensor]:
    return x[..., :4], x[..., 4:]


def by_ends(x: Tensor) -> Sequence[Tensor]:
    return x[..., 0:4], x[..., 4:8]


HALF = (2, 4, 6, 8)
TABLES = (HALF, (1, 1, 6, 8), (1, 1, 6, 8))
HALF_PRECISION = torch.bfloat16
CASES = {
    "hf rms": Case(hf_rms, (LIVE, (8,)), "rms_norm"),
    "hf rms bf16": Case(hf_rms, (LIVE, (8,)), "rms_norm", HALF_PRECISION),
    "gemma bf16": Case(gemma_rms, (LIVE, (8,)), "rms_norm", HALF_PRECISION),
    "x / sqrt": Case(divided_rms, (LIVE, (8,)), "rms_norm"),
    "pow(-0.5)": Case(power_rms, (LIVE, (8,)), "rms_norm"),
    "F.rms_norm": Case(torch_rms, (LIVE, (8,)), "rms_norm"),
    "residual rms": Case(residual_rms, (LIVE, LIVE, (8,)), "rms_norm add_rms_norm"),
    "F.layer_norm": Case(torch_layer_norm, (LIVE, (8,), (8,)), "layer_norm"),
    "layer norm by hand": Case(handmade_layer_norm, (LIVE, (8,), (8,)), "layer_norm"),
    "layer norm by var": Case(variance_layer_norm, (LIVE, (8,), (8,)), "layer_norm"),
    "residual layer": Case(residual_layer_norm, (LIVE, LIVE, (8,), (8,)), "layer_norm add_layer_norm"),
    "silu(g) * u": Case(swiglu, (LIVE, LIVE), "swiglu"),
    "u * silu(g) bf16": Case(swiglu_wide, (LIVE, LIVE), "swiglu", HALF_PRECISION),
    "g sigmoid(g) u": Case(swiglu_by_hand, (LIVE, LIVE), "swiglu"),
    "gelu(g) * u": Case(geglu, (LIVE, LIVE), "geglu"),
    "gelu tanh": Case(geglu_tanh, (LIVE, LIVE), "geglu"),
    "new gelu": Case(new_gelu, (LIVE, LIVE), "geglu"),
    "chunk": Case(rotate_by(by_chunk), TABLES, "rotary"),
    "split": Case(rotate_by(by_split), TABLES, "rotary"),
    "slices": Case(rotate_by(by_slices), TABLES, "rotary"),
    "slices to end": Case(rotate_by(by_ends), TABLES, "rotary"),
    "shifted loss": Case(shifted_loss, ((2, 4, 8), (5, 8)), "linear_cross_entropy"),
    "smoothed sum": Case(flat_loss, ((2, 4, 8), (5, 8)), "linear_cross_entropy"),
}


def own_squares(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return divided_rms(x, w), x * x


def scale_is_used(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    return x * scale * w, scale + 1


def logits_are_used(x: Tensor, w: Tensor) -> Tensor:
    logits = F.linear(x, w)
    return F.cross_entropy(logits, torch.zeros(4, dtype=torch.int64)) + logits.square().mean()


def mean_over_rows(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-5) * w


def swapped(x: Tensor) -> Sequence[Tensor]:
    return x[..., 4:], x[..., :4]


def quarters(x: Tensor) -> Sequence[Tensor]:
    return x[..., :2], x[..., 2:]


# What looks alike and is not: the reason that the report gives (none: it is no such thing at all).
REFUSED: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], str]] = {
    "scale is used": (scale_is_used, (LIVE, (8,)), "rms_norm at mul_1: rsqrt is used by add_1 too"),
    "broadcast gate": (swiglu, ((2, 1, 8), LIVE), "swiglu at mul: gate is broadcast"),
    "two dims": (divided_rms, (LIVE, (3, 8)), "rms_norm at mul_1: the weight has several dims"),
    "logits are used": (
        logits_are_used,
        ((4, 8), (5, 8)),
        "linear_cross_entropy at cross_entropy_loss: linear is used by square too",
    ),
    "mean over rows": (mean_over_rows, (LIVE, (8,)), ""),
    "halves swapped": (rotate_by(swapped), TABLES, ""),
    "quarters": (rotate_by(quarters), TABLES, ""),
}


def tensors(case: Case) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64).to(case.dtype) for shape in case.shapes]


def graph_of(case: Case) -> fx.GraphModule:
    """The graph that a capture would have; tables of positions get no gradient."""
    graph = make_fx(case.function, pre_dispatch=True, tracing_mode="fake")(*tensors(case))
    for node in graph.graph.find_nodes(op="placeholder"):
        rank = case.shapes == TABLES and tuple(node.meta["val"].shape)[:2] == (1, 1)
        node.meta |= {"requires_grad": not rank, "kind": "input"}
    for node in graph.graph.find_nodes(op="get_attr"):
        node.meta["val"] = find_fake_mode(graph.graph).from_tensor(getattr(graph, node.target))
    drop_identities(graph.graph, frozenset())
    graph.graph.eliminate_dead_code()
    return graph


def run(graph: fx.GraphModule, case: Case) -> list[Tensor]:
    """Results, then the gradients of what is differentiable."""
    given = tensors(case)
    count = 1 if case.shapes == TABLES else len(given)
    for tensor in given[:count]:
        tensor.requires_grad_()
    made = graph(*given)
    results = [made] if isinstance(made, Tensor) else list(made)
    generator = torch.Generator().manual_seed(1)
    scaled = [
        (r.double() * torch.randn(r.shape, generator=generator, dtype=torch.float64)).sum() for r in results
    ]
    return [*results, *torch.autograd.grad(torch.stack(scaled).sum(), given[:count])]


@pytest.mark.parametrize("name", CASES)
def test_however_it_is_written(name: str) -> None:
    """Each form becomes the kernel, with the same results and gradients to the last digits."""
    case = CASES[name]
    graph = graph_of(case)
    fused = fuse(graph, KERNELS)
    assert " ".join(fused.kernels) == case.kernels and not fused.missed
    exact = case.dtype == torch.float64
    for found, wanted in zip(run(fused.graph, case), run(graph, case)):
        assert found.dtype == wanted.dtype
        close = 1e-6 if name == "hf rms" or name == "shifted loss" else 1e-12
        torch.testing.assert_close(
            found, wanted, rtol=close if exact else 0.03, atol=close if exact else 0.03
        )


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_fused_says_why(name: str) -> None:
    """A norm's scale that something else reads was lost with the norm."""
    function, shapes, reason = REFUSED[name]
    found = fuse(graph_of(Case(function, shapes, "")), KERNELS)
    assert not found.used and [str(one) for one in found.missed] == [reason][: len(reason)]


def test_others_may_read_what_goes_in() -> None:
    """Squares that something else needs too are no reason: the kernel makes its own."""
    assert fuse(graph_of(Case(own_squares, (LIVE, (8,)), "")), KERNELS).used == ("rms_norm",)


def test_a_chip_without_the_kernel() -> None:
    """The same graph comes out, and the report says what is missing."""
    case = CASES["residual rms"]
    fused = fuse(graph_of(case), ("swiglu", "linear_cross_entropy"))
    assert not fused.used
    assert [str(one) for one in fused.missed] == ["rms_norm at rms_norm: the chip has no kernel for it"]


def test_kernels_of_the_loss_mean_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The registered operators, as an accelerator would run them, against the plain chunks."""
    importlib.import_module("autoplan_codegen.kernels")
    rows, weight = (torch.randn(7, 8, dtype=torch.float64), torch.randn(11, 8, dtype=torch.float64))
    target = torch.tensor([0, 10, -100, 3, 3, 5, 9])

    def run_loss() -> list[Tensor]:
        x, w = rows.clone().requires_grad_(), weight.clone().requires_grad_()
        loss = fused_loss.linear_cross_entropy(x, w, target, -100, 0.0, 1, 3)
        return [loss.detach(), *torch.autograd.grad(loss * 2, [x, w])]

    def kernel(name: str, *_: object) -> object:
        return getattr(torch.ops.autoplan, name)

    plain = run_loss()
    monkeypatch.setattr(fused_loss, "_loss_kernel", kernel)
    for found, wanted in zip(run_loss(), plain):
        torch.testing.assert_close(found, wanted)


def test_classes_that_do_not_divide_are_hidden_inside_the_loss() -> None:
    """A vocabulary of five on two ranks: the sixth row is no class, and stays zero."""
    graph = fuse(graph_of(Case(odd_loss, ((4, 8), (5, 8)), "")), KERNELS).graph
    table = graph.graph.find_nodes(op="placeholder")[1]
    table.meta["kind"] = "parameter"
    padded = pad_classes(graph, 2)
    rows, weight = tensors(Case(odd_loss, ((4, 8), (5, 8)), ""))
    wide = torch.cat([weight, torch.zeros(1, 8, dtype=weight.dtype)]).requires_grad_()
    made = padded(rows, wide)
    torch.testing.assert_close(made, odd_loss(rows, weight))
    (gradient,) = torch.autograd.grad(made, [wide])
    assert not gradient[5].any()
    torch.testing.assert_close(gradient[:5], torch.func.grad(odd_loss, 1)(rows, weight))


# --- in a plan -------------------------------------------------------------------------------------

LARGE_VOCABULARY = Path(__file__).parent / "models" / "large_vocabulary.py"


@pytest.fixture(scope="module")
def capture() -> Capture:
    return capture_model(LARGE_VOCABULARY, dtype="bf16")


def plan_of(capture: Capture, memory_gib: float, *pins: str) -> Plan:
    profile = load_profile("h100")
    profile = with_memory(profile, memory_gib * 2**30 - profile.memory_bytes.value)
    request = Request(str(LARGE_VOCABULARY), "h100", 1, 8, pins=pins)
    return search_capture(capture, profile, request, parse_pins(pins), [], 0.0, lambda _: None)


def test_logits_that_are_never_made_change_the_plan(capture: Capture) -> None:
    """With little memory the loss is fused; kept logits do not fit at all, recompute or not."""
    items = {
        fuse: {
            item.name: item.bytes
            for stage in plan.parts[0].stages
            if stage.prediction
            for item in stage.prediction.memory_items
        }
        for fuse, plan in (
            (fuse, plan_of(capture, 72, f"fuse={fuse}", "micro_batch=2")) for fuse in ("all", "keep_logits")
        )
    }
    logits = 2 * 4096 * 131072 * 4
    assert items["keep_logits"]["log-probabilities of the logits (fp32) saved by head"] == pytest.approx(
        logits
    )
    assert not any("logits" in name for name in items["all"])
    assert sum(items["keep_logits"].values()) - sum(items["all"].values()) > 2 * logits
    free = plan_of(capture, 12, "micro_batch=2")
    assert free.parts[0].fuse == "all"
    assert free.layouts["head"].kernels == ("linear_cross_entropy", "rms_norm")
    with pytest.raises(InfeasibleError):
        plan_of(capture, 12, "micro_batch=2", "fuse=keep_logits")


@pytest.mark.parametrize(
    "pins",
    [
        ("tp=2", "pp=2", "sp=1", "micro_batch=2", "recompute=selective"),
        ("cp=2", "tp=2", "cp_kind=ring", "recompute=full"),
    ],
    ids=["tp sp pp", "cp tp"],
)
def test_a_fused_plan_equals_one_process(pins: tuple[str, ...]) -> None:
    """Norms, gates, rotations and the loss over a cut vocabulary, on gloo ranks in double precision."""
    plan = search_plan(
        HF_LLAMA, hw="kunlun", devices=4, global_batch=4, dtype="fp32", pins=(*pins, "fuse=all")
    )
    kernels = {name for layout in plan.layouts.values() for name in layout.kernels}
    assert kernels == {"linear_cross_entropy", "rms_norm", "add_rms_norm", "swiglu", "rotary"}
    result = run_check(plan, HF_LLAMA)
    assert result.ok and result.dtype == "fp64", result


def test_off_means_off(capture: Capture) -> None:
    """The pin gives the graph as it was written."""
    plan = plan_of(capture, 72, "fuse=off", "micro_batch=2")
    assert plan.parts[0].fuse == "off" and not any(layout.kernels for layout in plan.layouts.values())
