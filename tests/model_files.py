"""Small model files made of a few lines of ``forward``, for the tests of capture."""

from __future__ import annotations

from pathlib import Path

from autoplan.capture import Capture


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
