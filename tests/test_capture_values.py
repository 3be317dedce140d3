"""Models that look at values: refused with the line, kept whole, or taken where the value is an input."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_files import net, write

from autoplan.capture import capture_model, load_model_source
from autoplan.errors import CaptureError
from autoplan.regions import find_regions, region_graph

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
