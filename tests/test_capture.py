"""Every example is taken as it is: functional graphs of known ops, the loss alone, ties, fingerprints."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from captured_models import EXAMPLES, SMALL, small_capture, small_source
from model_files import net, targets
from torch import nn
from torch.nn import functional as F

from autoplan.capture import capture_model, capture_module, load_model_source
from autoplan.capture.settings import SETTINGS

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


SDPA = torch.ops.aten.scaled_dot_product_attention.default
LAYERS = 4


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
