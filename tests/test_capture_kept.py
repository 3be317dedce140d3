"""What tracing would lose silently is kept, or said: masks, gradients, casts, checkpoints, paired samples."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from captured_models import small_source
from model_files import net, targets

from autoplan.capture import Capture, capture_model, load_model_source
from autoplan.errors import CaptureError
from autoplan.regions import find_regions, region_graph

SDPA = torch.ops.aten.scaled_dot_product_attention.default


ATTENTION = """
h = self.inner(x)[:, None, :, None] * torch.ones(8)
y = F.scaled_dot_product_attention(h, h, h, attn_mask={mask})
return y.pow(2).mean()
"""


# mask expression -> (is_causal, keeps a mask)
MASKS = {
    "torch.ones(8, 8, dtype=torch.bool).tril()": (True, False),
    "torch.ones(1, 1, 8, 8, dtype=torch.bool)": (False, False),
    "torch.zeros(8, 8).masked_fill(torch.ones(8, 8).triu(1).bool(), float('-inf'))": (True, False),
    "torch.full((8, 8), torch.finfo(torch.float32).min).triu(1)": (True, False),
    "torch.arange(8)[None, :] <= torch.arange(8)[:, None]": (True, False),
    "torch.ones(8, 8, dtype=torch.bool).tril().triu(-3)": (False, True),
    "(x[:, None, None, :] > -9).expand(-1, 1, 8, 8)": (False, True),
    "torch.ones(8, 8).tril()": (False, True),
}


@pytest.mark.parametrize("mask", MASKS)
def test_masks_become_flags_only_where_proven(mask: str, tmp_path: Path) -> None:
    """A sliding window is no causal mask, and a mask of the input's values is unknown."""
    causal, kept = MASKS[mask]
    capture = capture_model(net(tmp_path, ATTENTION.format(mask=mask).strip()), dtype="fp32", sizes={})
    node = capture.graph.find_nodes(op="call_function", target=SDPA)[0]
    given = [*node.args[3:], None, 0.0, False][:3] if len(node.args) < 6 else node.args[3:6]
    assert (given[2] is True, isinstance(given[0], torch.fx.Node)) == (causal, kept)


def test_a_causal_mask_kept_in_a_buffer_is_proven(tmp_path: Path) -> None:
    """Buffers are fakes after a meta build; their values must come from the constructor."""
    path = net(tmp_path, ATTENTION.format(mask="self.mask[:8, :8]").strip())
    text = path.read_text().replace(
        "self.inner =", 'self.register_buffer("mask", torch.ones(16, 16).tril().bool()); self.inner ='
    )
    path.write_text(text)
    capture = capture_model(path, dtype="fp32", sizes={})
    assert capture.graph.find_nodes(op="call_function", target=SDPA)[0].args[5] is True
    assert not [p for p in capture.parameters.values() if p.is_buffer]


def test_long_masks_are_proven_without_being_made() -> None:
    """A boolean mask of 128k tokens has 16 GiB; a window of 4 must still be seen."""
    source = small_source("llama3_8b")
    capture = capture_model(source, dtype="bf16", sizes={"sequence": 131072})
    assert all(node.args[5] is True for node in capture.graph.find_nodes(op="call_function", target=SDPA))


def run_both(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], Capture]:
    """Gradients of the plain model and of the captured graph."""
    source = load_model_source(path)
    capture = capture_model(source, dtype="fp32", sizes={})
    torch.manual_seed(0)
    model, inputs = source.build(), source.example_inputs(2)
    source.run(model, inputs).backward()
    eager = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    (region,) = find_regions(capture)
    graph = region_graph(capture, region, 2)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers()), **capture.constants, **inputs}
    graph(*(tensors[n.meta["source"]] for n in graph.graph.find_nodes(op="placeholder")))[0].backward()
    return eager, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, capture


# what the graph must do, in words -> body of forward
KEPT = {
    "no_grad": """
with torch.no_grad():
    t = self.inner(x)
return (self.inner(x) - t.abs()).pow(2).mean()""",
    "no_grad inside autocast": """
with torch.autocast('cpu', enabled=False):
    with torch.no_grad():
        t = self.inner(x).cos()
return (self.inner(x) * t).mean()""",
    "detach": """
y = self.inner(x).detach()
return (self.inner(x) - y).pow(2).mean() + self.inner(x).mean()""",
    "writes to a slice": """
y = self.inner(x)
y[:, 1:3] = 0
y.mul_(2)
return y.pow(2).mean()""",
    "writes through a view of a slice": """
y = torch.zeros_like(x)
v = y.view(-1)
v[2:8].add_(self.inner(x)[0, :6])
return (y.t() @ y).mean()""",
    "views that went stale": """
y = self.inner(x).clone()
a, b = y[:, :4], y[:, 4:]
z = a + b
y += 1
return (z + a).pow(2).mean()""",
    "in-place relu": """
y = self.inner(x).add_(1).relu_().clone()
y[0] = x[0]
return y.transpose(0, 1).reshape(-1).pow(2).mean()""",
    "compound views": """
y = self.inner(x).unflatten(1, (2, 4)).movedim(1, 0).flatten(1)
return y.contiguous().cumsum(1).mean()""",
    "copy_": """
y = torch.empty(2, *x.shape)
y[0] = self.inner(x)
y[1].copy_(x)
return torch.einsum('kbi,kbj->', y, y) / 9""",
}


@pytest.mark.parametrize("case", KEPT)
def test_gradients_are_those_of_the_plain_model(case: str, tmp_path: Path) -> None:
    """no_grad blocks were once differentiable in the graph, and writes through views were dropped."""
    eager, traced, capture = run_both(net(tmp_path, KEPT[case].strip()))
    assert eager.keys() == traced.keys()
    for name, gradient in eager.items():
        torch.testing.assert_close(traced[name], gradient, rtol=1e-6, atol=1e-7)
    assert capture.batch_form.known, capture.warnings


def test_inference_mode_is_kept_out_of_the_gradient(tmp_path: Path) -> None:
    """It leaves no trace in an exported graph."""
    body = "with torch.inference_mode():\n    t = self.inner(x)\nreturn (self.inner(x) * t).mean()"
    capture = capture_model(net(tmp_path, body), dtype="fp32", sizes={})
    assert "aten.detach.default" in targets(capture)


def test_autocast_becomes_casts(tmp_path: Path) -> None:
    """The exporter hides an autocast block in a sub-graph without module names."""
    block = "with torch.autocast('cuda', dtype=torch.bfloat16):\n    y = self.inner(x).softmax(-1)"
    body = block + "\nreturn y.mean()"
    capture = capture_model(net(tmp_path, body), dtype="fp32", sizes={})
    dtypes = {
        str(n.target).split(".")[1]: n.meta["val"].dtype
        for n in capture.graph.nodes
        if n.op == "call_function"
    }
    assert dtypes["linear"] is torch.bfloat16 and dtypes["softmax"] is torch.float32
    assert all(node.op != "get_attr" for node in capture.graph.nodes)


CUSTOM = """
class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def backward(ctx, g):
        return g * 3
"""


def test_a_custom_function_is_refused_by_name_or_kept_whole(tmp_path: Path) -> None:
    """Its backward vanishes from a traced graph without a word."""
    path = net(tmp_path, "return Twice.apply(self.inner(x)).mean()", CUSTOM)
    with pytest.raises(CaptureError, match=rf"{path}:\d+: Twice is a custom autograd.Function.*--opaque"):
        capture_model(path, dtype="fp32", sizes={})
    path.write_text(
        path.read_text()
        .replace(
            "self.inner = nn.Linear(width, width)",
            "self.inner = nn.Linear(width, width); self.twice = Double()",
        )
        .replace("Twice.apply(self.inner(x))", "self.twice(self.inner(x))")
        .replace(
            "class Net",
            "class Double(nn.Module):\n    def forward(self, x):\n        return Twice.apply(x)\n\nclass Net",
        )
    )
    source = load_model_source(path)
    capture = capture_model(source, dtype="fp32", sizes={}, opaque=("twice",))
    (region,) = find_regions(capture)
    model = source.build()
    inputs = source.example_inputs(2)
    graph = region_graph(capture, region, 2)
    tensors = {**dict(model.named_parameters()), **inputs}
    graph(*(tensors[n.meta["source"]] for n in graph.graph.find_nodes(op="placeholder")))[0].backward()
    found = model.inner.bias.grad.clone()
    model.zero_grad()
    source.run(model, inputs).backward()
    torch.testing.assert_close(found, model.inner.bias.grad)


def test_the_models_own_checkpoint_calls_are_said(tmp_path: Path) -> None:
    """They are silently dropped by the exporter; the plan decides about recompute."""
    extra = "from torch.utils.checkpoint import checkpoint\n"
    for mode in ("True", "False"):
        path = net(tmp_path, f"return checkpoint(self.inner, x, use_reentrant={mode}).mean()", extra)
        capture = capture_model(path, dtype="fp32", sizes={})
        assert any(f"{path}:" in w and "checkpoint" in w for w in capture.warnings), mode
        assert targets(capture) == ["aten.linear.default", "aten.mean.default"]


def test_batch_statistics_are_said(tmp_path: Path) -> None:
    """Micro-batches change a batch norm's statistics; the buffers are not carried from step to step."""
    path = net(tmp_path, "return self.norm(self.inner(x)).pow(2).mean()")
    path.write_text(path.read_text().replace("self.inner =", "self.norm = nn.BatchNorm1d(8); self.inner ="))
    capture = capture_model(path, dtype="fp32", sizes={}, batch=2)
    assert "norm.running_mean" in capture.warnings[0] and "one micro-batch" in capture.warnings[0]


def test_a_constructor_that_needs_values_is_built_for_real(tmp_path: Path) -> None:
    """`.item()` in __init__ fails on meta."""
    path = net(tmp_path, "return self.inner(x).mean()")
    path.write_text(
        path.read_text().replace(
            "super().__init__()", "super().__init__(); self.k = nn.Linear(2, 2).weight.sum().item()"
        )
    )
    capture = capture_model(path, dtype="fp32", sizes={})
    assert "its constructor needs values" in capture.warnings[0]


def test_the_batch_growth_falls_back_when_batch_one_is_special(tmp_path: Path) -> None:
    """`if batch > 1` is baked in at batch 1: larger batches have another graph."""
    capture = capture_model(
        net(tmp_path, "y = self.inner(x)\nreturn (y.sin() if len(x) > 1 else y).mean()"),
        dtype="fp32",
        sizes={},
    )
    assert capture.batch == 2 and capture.batch_form.known and "batch 1 differs" in capture.warnings[0]
    capture = capture_model(
        net(tmp_path, "y = self.inner(x)\nfor _ in x:\n    y = y.sin()\nreturn y.mean()"),
        dtype="fp32",
        sizes={},
    )
    assert capture.batch == 1 and not capture.batch_form.known and "fixed at 1" in capture.warnings[0]
    capture = capture_model(
        net(tmp_path, "return F.batch_norm(self.inner(x), None, None, training=True).pow(2).mean()"),
        dtype="fp32",
        sizes={},
    )
    assert (capture.batch, capture.least_batch, capture.batch_form.known) == (2, 2, True)
    assert "batch 1 cannot be traced" in capture.warnings[0]


# the loss of a batch -> the code that pairs its samples, "" where none does
LOSSES = {
    "y = self.inner(x)\nz = y @ x.T\nreturn F.cross_entropy(z, torch.arange(len(x)))": "z = y @ x.T",
    "y = self.inner(x)\nreturn (y[:, None] - y[None]).pow(2).mean()": "return (y[:, None]",
    # packed samples under a mask, which keeps them apart
    "h = self.inner(x).view(1, 1, -1, 4)\nowner = torch.arange(2 * len(x)) // 2\n"
    "return F.scaled_dot_product_attention(h, h, h, owner[:, None] == owner[None]).mean()": "",
    "y = self.inner(x)[:, :, None]\nreturn (y @ y.mT).mean()": "",
}


@pytest.mark.parametrize("body", LOSSES, ids=range(len(LOSSES)))
def test_samples_that_meet_in_the_loss_are_said(body: str, tmp_path: Path) -> None:
    """A contrastive loss was cut into micro-batches, whose mean is another loss."""
    path = net(tmp_path, body)
    capture = capture_model(path, dtype="fp32", sizes={})
    told = [warning for warning in capture.warnings if "each pair of samples" in warning]
    assert bool(capture.coupled_at) == bool(LOSSES[body]) == bool(told) and capture.batch_form.known
    assert all(warning.startswith(f"{path}:") and LOSSES[body] in warning for warning in told)
