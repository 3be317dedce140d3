"""Every example is taken as it is, nothing is lost silently, and bad input gives one clear sentence."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from captured_models import EXAMPLES, SMALL, small_capture, small_source
from torch import nn
from torch.nn import functional as F

from autoplan.capture import Capture, capture_model, capture_module, load_model_source
from autoplan.capture.settings import SETTINGS
from autoplan.errors import AutoplanError, BadInputError, CaptureError
from autoplan.regions import find_regions, region_graph

SDPA = torch.ops.aten.scaled_dot_product_attention.default
BIG = (
    "llama3_8b",
    "llama3_70b",
    "llama3_405b",
    "mixtral_8x7b",
    "qwen3_30b_a3b",
    "deepseek_v3",
    "bert",
    "vit",
    "mamba2",
    "t5",
)
LAYERS = 4


def targets(capture: Capture) -> list[str]:
    return [str(node.target) for node in capture.graph.nodes if node.op == "call_function"]


def write(folder: Path, text: str, name: str = "model.py") -> Path:
    path = folder / name
    path.write_text("import torch\nfrom torch import nn\nfrom torch.nn import functional as F\n" + text)
    return path


NET = """
class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.inner = nn.Linear(width, width)
    def forward(self, x):
        {body}

def build_model():
    return Net()

def example_inputs(batch_size):
    return {{"x": torch.randn(batch_size, 8)}}
"""


def net(folder: Path, body: str, extra: str = "") -> Path:
    return write(folder, extra + NET.format(body=body.replace("\n", "\n        ")))


# --- models that are taken as they are ------------------------------------------------------------


@pytest.mark.parametrize("name", BIG)
def test_published_sizes_capture_in_bf16(name: str) -> None:
    """Real widths, a few of the layers (all layers are timed by hand: depth changes nothing but time)."""
    source = load_model_source(EXAMPLES / f"{name}.py")
    config = sys.modules[source.construct.__module__].config
    for key in ("num_hidden_layers", "num_layers", "num_decoder_layers"):
        if hasattr(config, key):
            setattr(config, key, LAYERS)
    sizes = {"sequence": 512} if "sequence" in (source.size_names or ()) else {}
    capture = capture_model(source, dtype="bf16", sizes=sizes)
    assert capture.batch_form.known and not capture.warnings
    assert capture.graph.output_node().args[0].meta["val"].shape == ()
    assert {p.dtype for p in capture.parameters.values() if not p.is_buffer} == {torch.bfloat16}
    assert not [t for t in targets(capture) if t.startswith("aten._assert") or t.endswith("_.default")]
    masks = [
        node.args[3]
        for node in capture.graph.find_nodes(op="call_function", target=SDPA)
        if len(node.args) > 3
    ]
    assert name == "t5" or not any(masks)


@pytest.mark.parametrize("name", SMALL)
def test_graph_is_functional_and_of_the_known_kinds(name: str) -> None:
    """Codegen and sharding know aten ops and getitem alone; an in-place op would break recompute."""
    for node in small_capture(name).graph.nodes:
        if node.op == "placeholder":
            assert node.meta["kind"] in ("parameter", "buffer", "constant", "input") and node.meta["source"]
        elif node.op == "call_function":
            assert "val" in node.meta
            overload = node.target
            assert not isinstance(overload, torch._ops.OpOverload) or not overload._schema.is_mutable, node
    assert small_capture(name).fingerprint


def test_the_loss_is_the_only_output() -> None:
    """Logits kept alive by a second output were once priced with the activations."""
    assert [str(a) for a in small_capture("llama3_8b").graph.output_node().args] == ["cross_entropy_loss"]


def test_parameters_keep_ties_and_freezing() -> None:
    """A tied head counted twice doubles the optimizer memory of a small model."""
    capture = small_capture("gpt")
    assert capture.parameters["embedding.weight"].tied_names == ("head.weight",)
    assert "head.weight" not in capture.parameters
    source = small_source("gpt")
    model = source.construct_checked()
    model.positions.weight.requires_grad_(False)
    frozen = capture_module(model, source.example_inputs(1), name="gpt").parameters
    assert [name for name, p in frozen.items() if not p.trainable] == ["positions.weight"]


def test_a_captured_module_is_left_as_it_was() -> None:
    """Capturing a module put fakes in place of its parameters."""
    source = small_source("vit")
    model = source.construct_checked().eval()
    before = {name: (id(p), p.dtype) for name, p in model.named_parameters()}
    config = {name: getattr(model.config, name, None) for name in SETTINGS}
    capture = capture_module(model, source.example_inputs(2), name="vit", dtype="bf16")
    assert {name: (id(p), p.dtype) for name, p in model.named_parameters()} == before
    assert {name: getattr(model.config, name, None) for name in SETTINGS} == config and not model.training
    assert capture.batch == 2 and capture.dtype == "bf16"


def test_fingerprint_follows_the_model_and_not_the_batch() -> None:
    """A plan made at another micro-batch was once called foreign."""
    one = small_capture("gpt").fingerprint
    sizes = dict(small_capture("gpt").sizes)
    assert capture_model(small_source("gpt"), dtype="fp32", sizes=sizes, batch=3).fingerprint == one
    assert capture_model(small_source("gpt"), dtype="bf16", sizes=sizes).fingerprint != one
    assert capture_model(small_source("gpt"), dtype="fp32", sizes={"sequence": 32}).fingerprint != one


def test_a_file_that_reads_options_sees_none_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """argparse in model.py met autoplan's own options and left."""
    monkeypatch.setattr(sys, "argv", ["autoplan", "search", "model.py"])
    options = "import argparse\nargparse.ArgumentParser().parse_args()\n"
    assert load_model_source(net(tmp_path, "return self.inner(x).mean()", options)).build()
    assert sys.argv == ["autoplan", "search", "model.py"]


# --- what tracing loses silently ------------------------------------------------------------------

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


# --- models that look at values -------------------------------------------------------------------

MOE = """
class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
    def forward(self, x):
        weight, index = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for e in F.one_hot(index, 4).sum(0).nonzero():
            (hit,) = torch.where(index == e)
            out = out.index_add(0, hit, self.experts[int(e)](x[hit]) * weight[hit, None])
        return out

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.moe = nn.LayerNorm(8), MoE()
    def forward(self, x):
        return x + self.moe(self.norm(x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
    def forward(self, x):
        return self.blocks(x).pow(2).mean()

def build_model():
    return Net()

def example_inputs(batch_size):
    return (torch.randn(batch_size, 8),)
"""


def test_a_loop_over_hit_experts_is_refused_and_can_be_kept_whole(tmp_path: Path) -> None:
    """Tracing bakes in the experts that the example happened to hit, or fails with a torch traceback."""
    path = write(tmp_path, MOE)
    line = path.read_text().splitlines().index("        for e in F.one_hot(index, 4).sum(0).nonzero():") + 1
    with pytest.raises(CaptureError) as error:
        capture_model(path, dtype="fp32", sizes={})
    message = str(error.value)
    assert f"{path}:{line}" in message and "nonzero" in message and "loop over every expert" in message
    assert "--opaque 'blocks.*.moe'" in message and "Traceback" not in message and "u0" not in message
    for name in ("blocks.*.moe", "MoE"):
        capture = capture_model(path, dtype="fp32", sizes={}, opaque=(name,))
        marked = [n for n in capture.graph.nodes if "opaque" in n.meta]
        assert [n.meta["opaque"] for n in marked] == ["blocks.0.moe", "blocks.1.moe"]
        assert all(n.meta["flops"] > 0 for n in marked) and capture.batch_form.known
        assert len({n.target for n in marked}) == 1


def test_opaque_modules_compute_what_they_stand_for(tmp_path: Path) -> None:
    """Loss and gradients, with another routing than the one seen while its shapes were found."""
    source = load_model_source(write(tmp_path, MOE))
    capture = capture_model(source, dtype="fp32", sizes={}, opaque=("MoE",))
    model, (x,) = source.build(), source.example_inputs(16)
    expected = model(x)
    expected.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    values = {"x_0": x}
    for region in find_regions(capture):
        graph = region_graph(capture, region, 16)
        parameters = dict(model.named_parameters())
        held = graph.graph.find_nodes(op="placeholder")
        values.update(
            zip(
                region.outputs,
                graph(*(parameters.get(n.meta["source"], values.get(n.meta["source"])) for n in held)),
            )
        )
    loss = list(values.values())[-1]
    torch.testing.assert_close(loss, expected)
    loss.backward()
    for name, gradient in gradients.items():
        torch.testing.assert_close(model.get_parameter(name).grad, gradient)


# body -> words of the message
VALUE_READERS = {
    "y = self.inner(x)\nif y.sum() > 0:\n    y = y * 2\nreturn y.mean()": (
        "a branch on a tensor's value",
        "torch.where",
    ),
    "y = self.inner(x)\nreturn y.mean() * y.max().item()": (
        "a Python number read from a tensor",
        "keep it a tensor",
    ),
    "y = self.inner(x)\nreturn y[y > 0].mean()": ("an index whose size depends on values", "static size"),
    "y = self.inner(x)\nfor _ in range(int(x.max())):\n    y = y + 1\nreturn y.mean()": (
        "a Python number",
        "tensor",
    ),
    "return self.inner(torch.from_numpy(x.numpy())).mean()": ("numpy", "torch function"),
    "return self.inner(x[:, :3]).mean()": ("forward failed while it was traced", "reduction dim"),
}


@pytest.mark.parametrize("body", VALUE_READERS, ids=range(len(VALUE_READERS)))
def test_code_that_reads_values_is_refused_with_its_line(body: str, tmp_path: Path) -> None:
    """A number read from a tensor was once part of the graph as a symbol."""
    path = net(tmp_path, body)
    with pytest.raises(CaptureError) as error:
        capture_model(path, dtype="fp32", sizes={})
    assert f"{path}:" in str(error.value)
    for words in VALUE_READERS[body]:
        assert words in str(error.value)
    assert "--opaque" not in str(error.value) and ".." not in str(error.value)  # no sub-module is to blame


def test_a_small_integer_input_may_shape_the_graph(tmp_path: Path) -> None:
    """Image grids decide sizes: their values become part of the graph, and that is said."""
    path = net(tmp_path, "h, w = grid.tolist()\nreturn self.inner(x).view(-1, h, w).amax(2).mean()")
    text = path.read_text().replace("forward(self, x)", "forward(self, x, grid)")
    path.write_text(text.replace("8)}", '8), "grid": torch.tensor([2, 4])}'))
    capture = capture_model(path, dtype="fp32", sizes={})
    assert capture.input_names == ("x",) and capture.batch_form.known
    assert "the values of grid" in capture.warnings[0]


def test_an_op_without_fake_implementation_is_refused_by_name(tmp_path: Path) -> None:
    """The tracer's own message speaks of data pointers."""
    extra = """
@torch.library.custom_op("capture_test::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2
"""
    with pytest.raises(CaptureError, match=r"capture_test::twice cannot be traced.*register_fake"):
        capture_model(net(tmp_path, "return twice(self.inner(x)).mean()", extra), dtype="fp32", sizes={})


# --- bad input ------------------------------------------------------------------------------------

GOOD = NET.format(body="return self.inner(x).mean()")
# what the file holds -> words of the one message
BAD_FILES = {
    "def build_model(:\n": ("model.py:4: syntax error",),
    "import nothing_like_this\n": ("`nothing_like_this` cannot be imported", "pip install"),
    "raise SystemExit(3)\n": ("exits while it is imported", "__main__"),
    "1 / 0\n": ("model.py:4", "ZeroDivisionError"),
    "class Inner(nn.Module):\n    pass\n"
    "class Net(nn.Module):\n    def __init__(self, width, depth=2):\n        self.i = Inner()\n"
    "    def forward(self, tokens, mask):\n        pass\n": (
        "defines no build_model()",
        "return Net(width=..., depth=2)",
        '"tokens": torch.zeros(batch_size, ...)',
    ),
    GOOD.replace("def example_inputs", "def other"): (
        "defines no example_inputs(batch_size)",
        '{"x": torch.zeros(batch_size',
    ),
    GOOD.replace("return Net()", "return 3"): ("should return a torch.nn.Module", "returned an int (3)"),
    GOOD.replace("return Net()", "Net()"): ("should return a torch.nn.Module", "returned None"),
    GOOD.replace("return Net()", "return torch.load('w.pt')"): (
        "model.py:",
        "needs weights",
        "architecture alone",
    ),
    GOOD.replace("return Net()", "return Net().cuda()"): (
        "model.py:13: build_model() failed",
        "leave out .cuda()",
    ),
    GOOD.replace("return Net()", "raise SystemExit"): ("model.py:13: build_model() exits",),
    GOOD.replace("build_model()", "build_model(x)"): ("model.py:12: build_model() must take no arg", "'x'"),
    GOOD + "\0": ("model.py: syntax error: source code",),
    GOOD.replace("return Net()", "return Net(1, 2, 3)"): ("model.py:", "build_model() failed", "TypeError"),
    GOOD.replace('{"x": torch.randn(batch_size, 8)}', '{"x": [1, 2]}'): ("entry `x` is a list",),
    GOOD.replace('{"x": torch.randn(batch_size, 8)}', "None"): ("dict or tuple of tensors", "returned None"),
    GOOD.replace('{"x": torch.randn(batch_size, 8)}', "{}"): ("no tensor at all",),
    GOOD.replace("torch.randn(batch_size, 8)", "torch.randn(batch, 8)"): (
        "example_inputs(1) failed at",
        "NameError",
    ),
    GOOD.replace("example_inputs(batch_size)", "example_inputs()"): ("should take the batch size",),
    GOOD.replace("randn(batch_size", "randn(4"): ("model.py:15: example_inputs()", "x of shape (4, 8)"),
    GOOD.replace("randn(batch_size", "randn(1"): ("for 1 and for 2 it returned x of shape (1, 8)",),
    GOOD.replace('"x":', '"z":'): ("model.py:15: example_inputs() gives z", "Net.forward() takes x"),
    GOOD.replace(", 8)}", ", 8), 'y': None}"): ("example_inputs() gives x, y", "takes x"),
    GOOD.replace("mean()", "mean(1)"): ("no scalar loss", "shape (2,)", "loss.mean()"),
    GOOD.replace(".mean()", ""): ("no scalar loss", "shape (1, 8)", "def loss_fn(outputs, inputs)"),
    GOOD.replace("return self.inner(x).mean()", "return {'logits': x}"): ("no scalar loss", "['logits']"),
    GOOD + "\ndef loss_fn(outputs):\n    return outputs\n": ("model.py:18: loss_fn() must take outputs and",),
    GOOD + "\ndef loss_fn(outputs, inputs):\n    return inputs['x']\n": (
        "loss_fn(outputs, inputs) should return a scalar",
    ),
}


@pytest.mark.parametrize("text", BAD_FILES, ids=range(len(BAD_FILES)))
def test_bad_model_files_give_one_clear_message(text: str, tmp_path: Path) -> None:
    """Each used to end in a traceback."""
    with pytest.raises(AutoplanError) as error:
        capture_model(write(tmp_path, text), dtype="fp32", sizes={})
    assert error.value.exit_code == 2
    for words in BAD_FILES[text]:
        assert words in str(error.value)


def test_from_pretrained_is_refused_without_asking_the_network(tmp_path: Path) -> None:
    """It fell back to a real build and tried to download."""
    body = "from transformers import AutoModel\n    return AutoModel.from_pretrained('no/such')"
    text = GOOD.replace("return Net()", body)
    with pytest.raises(BadInputError, match=r"needs weights \(from_pretrained"):
        capture_model(write(tmp_path, text), dtype="fp32", sizes={})


def test_bad_paths_sizes_dtypes_and_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options that do not fit the model name what does."""
    monkeypatch.chdir(tmp_path)
    path = net(tmp_path, "return self.inner(x).mean()")
    cases = (
        (lambda: load_model_source(tmp_path / "modle.py"), "no such file.*model.py"),
        (lambda: load_model_source("nowhere/model.py"), r"no such file.*Near it: model.py\."),
        (lambda: load_model_source(tmp_path), "is a folder.*model.py"),
        (lambda: load_model_source(write(tmp_path, "", "model.txt")), "not `.txt`"),
        (lambda: capture_model(path, dtype="fp32", sizes={"sequence": 8}), "Leave out --sequence 8"),
        (lambda: capture_model(path, dtype="fp32", sizes={"image": 3}), "takes no.*Leave out --size image=3"),
        (lambda: capture_model(path, dtype="int8", sizes={}), "bf16, fp16, fp32, fp64"),
        (
            lambda: capture_model(path, dtype="fp32", sizes={}, opaque=("iner",)),
            "`iner` is not in the model; nearest: inner",
        ),
    )
    for call, words in cases:
        with pytest.raises(BadInputError, match=words):
            call()


# --- config.json ----------------------------------------------------------------------------------

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
WHISPER = {
    "architectures": ["WhisperForConditionalGeneration"],
    "model_type": "whisper",
    "d_model": 32,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "vocab_size": 64,
    "max_source_positions": 50,
    "pad_token_id": 0,
}
VIT = {
    "architectures": ["ViTForImageClassification"],
    "model_type": "vit",
    "hidden_size": 32,
    "num_hidden_layers": 2,
}
VIT |= {"num_attention_heads": 4, "intermediate_size": 48, "image_size": 32, "patch_size": 8}
# config -> (sizes, inputs)
CONFIGS = (
    (LLAMA, {"sequence": 16}, ("input_ids", "labels")),
    (WHISPER, {"sequence": 16}, ("input_features", "labels")),
    (VIT, {}, ("pixel_values", "labels")),
)


@pytest.mark.parametrize("config, sizes, names", CONFIGS, ids=[c[0]["model_type"] for c in CONFIGS])
def test_config_json_is_a_model(
    config: dict[str, object], sizes: dict[str, int], names: tuple[str, ...], tmp_path: Path
) -> None:
    """Decoder start tokens, labels and images are made for the user."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    capture = capture_model(path, dtype="bf16", sizes=sizes)
    assert capture.input_names == names and capture.batch_form.known
    assert capture.tokens_per_sample == sizes.get("sequence", 1)
    assert len(find_regions(capture)) >= 4


def test_bad_configs_give_one_clear_message(tmp_path: Path) -> None:
    """Each names the entry to change."""
    path = tmp_path / "config.json"
    cases = (
        ("{", "config.json:1: not valid JSON"),
        ("[]", "not a Hugging Face model config"),
        (json.dumps({"model_type": "llama"}), "`architectures` is missing"),
        (json.dumps({**LLAMA, "architectures": ["LlamaForCasualLM"]}), "nearest: LlamaForCausalLM"),
        (json.dumps({**LLAMA, "architectures": ["LlamaModel"]}), "computes no loss"),
        (json.dumps(LLAMA), "the size `sequence` is needed: add --sequence N"),
    )
    for text, words in cases:
        path.write_text(text)
        with pytest.raises(BadInputError, match=words):
            capture_model(path, dtype="fp32", sizes={})


class Returns(nn.Module):
    """Returns the loss in one of the accepted ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.inner = how, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> object:
        y = self.inner(x)
        loss = F.mse_loss(y, x)
        return {"scalar": loss, "dict": {"logits": y, "loss": loss}, "tuple": (loss, y), "outputs": y}[
            self.how
        ]


@pytest.mark.parametrize("how", ("scalar", "dict", "tuple", "outputs"))
def test_the_loss_is_found_where_it_is(how: str) -> None:
    """Only the loss stays: the op count is the same for all."""
    loss_fn = (lambda outputs, inputs: F.mse_loss(outputs, inputs[0])) if how == "outputs" else None
    capture = capture_module(Returns(how), (torch.randn(2, 4),), name=how, loss_fn=loss_fn)
    assert targets(capture) == ["aten.linear.default", "aten.mse_loss.default"]
