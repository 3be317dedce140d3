"""A training script's loop as a few lines, rewritten, and the lines that every rewrite adds."""

from __future__ import annotations

import textwrap
from pathlib import Path

from autoplan_codegen.script import ScriptRewrite, rewrite_script

HEAD = """\
import torch
import torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
"""


TAIL = """\
    optimizer.step()
    optimizer.zero_grad()
"""


NET = """\
import torch
class Net(torch.nn.Module):
    def forward(self, pixels, mask=None):
        return pixels
"""


def rewrite(source: str, folder: Path | None = None) -> ScriptRewrite:
    return rewrite_script(source, name="train.py", plan_path="plan.yaml", folder=folder)


def loop(body: str, head: str = HEAD, tail: str = TAIL) -> str:
    """A script whose loop's body is ``body`` and an optimizer step."""
    return f"{head}for batch in loader:\n{textwrap.indent(textwrap.dedent(body).strip(), '    ')}\n{tail}"


def added(source: str, result: ScriptRewrite) -> list[str]:
    """The lines of the new script that the old one did not have, stripped."""
    old = source.splitlines()
    return [line.strip() for line in result.text.splitlines() if line not in old and line.strip()]


PARALLELIZE = 'parallel = autoplan.parallelize(model, autoplan.Plan.load("plan.yaml"))'


WITH_LOSS = 'parallel = autoplan.parallelize(model, autoplan.Plan.load("plan.yaml"), loss_fn=loss_fn)'


OPTIMIZER = "optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)"


START = ["import autoplan", PARALLELIZE, OPTIMIZER]


def start_with_loss(*lines: str) -> list[str]:
    return ["import autoplan", "def loss_fn(" + lines[0], *lines[1:], WITH_LOSS, OPTIMIZER]
