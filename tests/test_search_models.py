"""Models that constrain their plans: too large, batch norm, losses over pairs, none to train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autoplan.errors import BadInputError, InfeasibleError
from autoplan.planner.driver import search_plan
from autoplan.runtime.check import run_check


def test_nothing_fits_says_what_does(tmp_path: Path) -> None:
    """The answer to a model too large names the limit, three contributors and a cluster that fits."""
    model = tmp_path / "wide.py"
    model.write_text(
        "import torch\nfrom torch import nn\n\n\nclass Wide(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.blocks = nn.ModuleList(nn.Linear(16384, 16384) for _ in range(16))\n\n"
        "    def forward(self, x):\n        for block in self.blocks:\n            x = x + block(x)\n"
        "        return x.square().mean()\n\n\n"
        "def build_model():\n    return Wide()\n\n\n"
        "def example_inputs(batch_size):\n    return {'x': torch.randn(batch_size, 16384)}\n"
    )
    with pytest.raises(InfeasibleError) as caught:
        search_plan(model, hw="cpu", devices=2, global_batch=8)
    message = str(caught.value)
    assert caught.value.exit_code == 1
    assert message.count(" GiB  ") == 3 and "--devices 6 (the smallest count that fits): " in message
    assert message.count(" a step") == 1, "the change that fits comes with its time"
    assert search_plan(model, hw="cpu", devices=6, global_batch=8).workload.devices == 6
    plan = search_plan(model, hw="cpu", global_batch=8)
    assert plan.workload.devices == 8
    assert any("--devices" in assumption for assumption in plan.assumptions)


SMALL = """
from torch import nn, randn

class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Conv1d(8, 8, 1), nn.BatchNorm1d(8), nn.Conv1d(8, 1, 1)

    def forward(self, x):
        return self.last(self.norm(self.first(x))).square().mean()

def build_model():
    return Small()

def example_inputs(batch_size):
    return {"x": randn(batch_size, 8, 4)}
"""


def test_batch_norm_is_told_and_its_way_out_holds(tmp_path: Path) -> None:
    """A plan for batch norm failed `check` without a word on why."""
    model = tmp_path / "small.py"
    model.write_text(SMALL)
    pins = ("dp=1", "micro_batch=8")
    plan = search_plan(model, hw="cpu", devices=2, global_batch=8, pins=pins)
    assert any(text.startswith("batch norm") for text in plan.assumptions)
    assert run_check(plan, model).ok


PAIRS = """
import torch
from torch import nn

class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.text, self.image = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))

    def forward(self, x, y):
        logits = self.text(x) @ self.image(y).T
        return nn.functional.cross_entropy(logits, torch.arange(len(x)))

def build_model():
    return Pairs()

def example_inputs(batch_size):
    return {"x": torch.randn(batch_size, 8), "y": torch.randn(batch_size, 8)}
"""


ALONE = PAIRS.replace("@ self.image(y).T", "* self.image(y)").replace("torch.arange(len(x))", "y.softmax(1)")


def test_a_loss_over_pairs_of_samples_keeps_the_batch_whole(tmp_path: Path) -> None:
    """A contrastive loss was planned with dp and micro-batches, and trained on another loss."""
    model = tmp_path / "pairs.py"
    model.write_text(PAIRS)
    plan = search_plan(model, hw="cpu", devices=2, global_batch=48)
    (part,) = plan.parts
    assert (part.mesh.dp, part.micro_batch, part.microbatches) == (1, 48, 1)
    assert any(text.startswith("dp=1 and micro_batch=48") for text in plan.assumptions)
    assert run_check(plan, model).ok


@pytest.mark.parametrize(
    ("text", "options", "says"),
    [
        (PAIRS, {"pins": ("dp=2",)}, r"--pin dp=2: at .*pairs.py:11.*pin dp=1"),
        (PAIRS, {"pins": ("micro_batch=2",)}, r"--pin micro_batch=2: at .*pairs.py:11.*pin micro_batch=8"),
        (PAIRS, {"devices": 64}, r"pairs.py:11: the loss pairs.*--devices \d+` or"),
        (ALONE, {"pins": ("micro_batch=1",)}, "fewer than 2 samples. Type --pin micro_batch=2"),
        (ALONE, {"global_batch": 1}, "multiple of dp x micro-batch .2, 4."),
    ],
)
def test_what_the_batch_cannot_be_is_refused(
    tmp_path: Path, text: str, options: dict[str, Any], says: str
) -> None:
    """The model decides which batches mean the same; a pin against that gave a wrong plan."""
    model = tmp_path / "pairs.py"
    model.write_text(text)
    chosen: dict[str, Any] = {"hw": "cpu", "devices": 2, "global_batch": 8, **options}
    with pytest.raises(BadInputError, match=says):
        search_plan(model, **chosen)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("return Small()", "return Small().requires_grad_(False)", "requires_grad, and none is"),
        (".square()", ".square().detach()", "its loss depends on none"),
    ],
)
def test_a_model_that_cannot_train_is_refused(tmp_path: Path, old: str, new: str, says: str) -> None:
    """It was planned, and training it ended in a traceback."""
    model = tmp_path / "small.py"
    model.write_text(SMALL.replace(old, new))
    with pytest.raises(BadInputError, match=says):
        search_plan(model, hw="cpu", devices=2)


def test_paired_samples_are_priced_with_their_square(tmp_path: Path) -> None:
    """A contrastive batch was priced linearly: 0.4 MB where one [B, B] tensor takes 67 MB."""
    model = tmp_path / "pairs.py"
    model.write_text(
        "import torch\nfrom torch import nn\nfrom torch.nn import functional as F\n\n\n"
        "class Pairs(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)\n\n"
        "    def forward(self, x, y):\n        scores = self.a(x) @ self.b(y).T\n"
        "        return F.cross_entropy(scores, torch.arange(len(scores)))\n\n\n"
        "def build_model():\n    return Pairs()\n\n\n"
        "def example_inputs(batch_size):\n    x, y = torch.randn(2, batch_size, 8)\n"
        "    return {'x': x, 'y': y}\n"
    )
    peaks = []
    for batch in (1024, 2048):
        plan = search_plan(model, hw="cpu", devices=1, global_batch=batch)
        (stage,) = plan.parts[0].stages
        assert stage.prediction is not None and plan.parts[0].micro_batch == batch
        peaks.append(stage.prediction.memory_peak_bytes)
    assert peaks[1] > 3.5 * peaks[0] and peaks[0] > 3 * 1024 * 1024 * 4
