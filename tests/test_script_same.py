"""A rewritten script prints what the plain one prints.

The scripts run under a stand-in for ``autoplan.parallelize`` that holds one process's model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from script_cases import PARALLELIZE, rewrite

from autoplan_codegen.script import rewrite_script

RUNNABLE = """\
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
    def forward(self, x):
        return self.layer(x)

torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
criterion = nn.CrossEntropyLoss()
for step in range(5):
    x, y = torch.randn(8, 4), torch.randint(3, (8,))
    {body}
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
torch.save(model.state_dict(), "weights.pt")
"""


RUNNABLE_BODIES = {
    "criterion": "loss = criterion(model(x), y)\nloss.backward()",
    "functional": "logits = model(x)\nloss = F.cross_entropy(logits, y)\nloss.backward()",
    "zeroed between": "loss = criterion(model(x), y)\noptimizer.zero_grad()\nloss.backward()",
    "steps and scaling": "out = model(x)\nx2 = out * 2\nloss = criterion(x2, y)\nloss /= 2\nloss.backward()",
    "inputs in the loss": "out = model(x)\nloss = ((out - x[:, :3]) ** 2).mean()\nloss.backward()",
    "loss unnamed": "out = model(x)\nloss = criterion(out, y).clone()\nloss.backward()",
}


class OneProcess:
    """``parallelize`` for one rank without a plan: the meaning that a rewritten script must have."""

    rank = 0

    def __init__(self, model: Any, plan: str, loss_fn: Any = None) -> None:
        self.model, self.loss_fn = model, loss_fn

    def step(self, batch: Any) -> Any:
        inputs = {k: v for k, v in batch.items() if k in "x"} if isinstance(batch, dict) else batch
        outputs = self.model(**inputs) if isinstance(inputs, dict) else self.model(*inputs)
        loss = self.loss_fn(outputs, batch) if self.loss_fn else outputs
        loss.backward()
        return loss.detach()

    def parameters(self) -> Any:
        return self.model.parameters()

    def state_dict(self) -> Any:
        return self.model.state_dict()

    def clip_grad_norm_(self, limit: float) -> Any:
        import torch

        return torch.nn.utils.clip_grad_norm_(self.parameters(), limit)


@dataclass
class Stand:
    """A module in place of ``autoplan``."""

    parallelize: type = OneProcess

    class Plan:
        @staticmethod
        def load(path: str) -> str:
            return path


@pytest.mark.parametrize("body", RUNNABLE_BODIES.values(), ids=RUNNABLE_BODIES.keys())
def test_a_rewritten_script_prints_the_same_losses(
    body: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Guards: a step at the wrong place (gradients zeroed after backward), or a loss of other inputs."""
    monkeypatch.chdir(tmp_path)
    source = RUNNABLE.format(body=body.replace("\n", "\n    "))
    exec(compile(source, "train.py", "exec"), {"__name__": "__main__"})
    plain = capsys.readouterr().out
    result = rewrite(source).text
    monkeypatch.setitem(__import__("sys").modules, "autoplan", Stand())
    exec(compile(result, "train_autoplan.py", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out == plain and len(plain.split()) == 5


def test_the_example_is_rewritten_as_a_person_would() -> None:
    """Guards: a diff that touches more than the lines that must change."""
    path = Path(__file__).parent.parent / "examples" / "train.py"
    source = path.read_text()
    assert "autoplan" not in source
    result = rewrite_script(
        source, name="examples/train.py", plan_path="plan.yaml", output_name="examples/train_autoplan.py"
    )
    assert result.diff.startswith("--- examples/train.py\n+++ examples/train_autoplan.py\n@@ ")
    changed = [line for line in result.diff.splitlines() if re.match(r"[+-](?![+-])", line)]
    assert changed == [
        "+import autoplan",
        "-    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)",
        f"+    {PARALLELIZE}",
        "+    optimizer = torch.optim.AdamW(parallel.parameters(), lr=3e-3, weight_decay=0.01)",
        "-        loss = model(**batch)",
        "-        loss.backward()",
        "-        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        "+        loss = parallel.step(batch)",
        "+        norm = parallel.clip_grad_norm_(1.0)",
        "-        if step % 10 == 0 or step == STEPS - 1:",
        "+        if (step % 10 == 0 or step == STEPS - 1) and parallel.rank == 0:",
    ]
