"""Training scripts as people write them: each is rewritten as a person would, or refused with its line.

No script is run but those of the last tests, under a stand-in for ``autoplan.parallelize`` that holds one
process's model: a rewritten script must print what the plain one prints.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from plan_fixture import llama_plan

from autoplan.cli import apply as cli_apply
from autoplan.cli import run as cli_run
from autoplan.errors import BadInputError
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


# name: (the loop's body, the lines that are new)
UNDERSTOOD = {
    "keywords from a dict": (
        "loss = model(**batch)\nloss.backward()",
        [*START, "loss = parallel.step(batch)"],
    ),
    "attribute loss": (
        "loss = model(**batch).loss\nloss.backward()",
        [*START, "loss = parallel.step(batch)"],
    ),
    "loss as an entry": (
        'loss = model(**batch)["loss"]\nloss.backward()',
        [*START, "loss = parallel.step(batch)"],
    ),
    "outputs, then loss": (
        "outputs = model(**batch)\nloss = outputs.loss\nloss.backward()",
        [*START, "loss = parallel.step(batch)"],
    ),
    "loss never named": (
        "outputs = model(**batch)\noutputs.loss.backward()\nhistory.append(outputs.loss.item())",
        [*START, "loss = parallel.step(batch)", "history.append(loss.item())"],
    ),
    "all in one": ("model(**batch).loss.backward()", [*START, "loss = parallel.step(batch)"]),
    "positions": (
        "x, y = batch\nloss = model(x, y)\nloss.backward()",
        [*START, "loss = parallel.step((x, y))"],
    ),
    "one position": ("loss = model(batch)\nloss.backward()", [*START, "loss = parallel.step((batch,))"]),
    "keywords": (
        "x, y = batch\nloss = model(tokens=x, labels=y)\nloss.backward()",
        [*START, 'loss = parallel.step({"tokens": x, "labels": y})'],
    ),
    "dict and keywords": (
        "loss = model(**batch, use_cache=False).loss\nloss.backward()",
        [*START, 'loss = parallel.step({**batch, "use_cache": False})'],
    ),
    "moved to a device": (
        "x, y = batch\nloss = model(x.to(device), y.to(device))\nloss.backward()",
        [*START, "loss = parallel.step((x.to(device), y.to(device)))"],
    ),
    "logits and loss": (
        "x, y = batch\nlogits, loss = model(x, y)\nloss.backward()",
        [
            *start_with_loss("outputs, inputs):", "logits, loss = outputs", "return loss"),
            "loss = parallel.step((x, y))",
        ],
    ),
    "loss and logits": (
        "x, y = batch\nloss, logits = model(x, y)\nloss.backward()",
        [*START, "loss = parallel.step((x, y))"],
    ),
    "loss outside the model": (
        "x, y = batch\nlogits = model(x)\nloss = F.cross_entropy(logits.flatten(0, 1), y.flatten())\n"
        "loss.backward()",
        [
            *start_with_loss(
                "logits, inputs):", 'return F.cross_entropy(logits.flatten(0, 1), inputs["y"].flatten())'
            ),
            'loss = parallel.step({"pixels": x, "y": y})',
        ],
    ),
    "loss outside, of the model's own inputs": (
        "x = batch\nlogits = model(x)\n"
        "loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())\n"
        "loss.backward()",
        [
            *start_with_loss(
                "logits, inputs):",
                "return F.cross_entropy(logits[:, :-1].flatten(0, 1), inputs[0][:, 1:].flatten())",
            ),
            "loss = parallel.step((x,))",
        ],
    ),
    "loss outside, entries of a dict": (
        'loss = F.mse_loss(model(pixels=batch["image"]), batch["target"].to(device))\nloss.backward()',
        [
            *start_with_loss("outputs, inputs):", 'return F.mse_loss(outputs, inputs["target"])'),
            'loss = parallel.step({"pixels": batch["image"], "target": batch["target"].to(device)})',
        ],
    ),
    "several steps to the loss": (
        "out = model(**batch)\nlogits = out.logits[:, :-1]\nlabels = batch['labels'][:, 1:]\n"
        "loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())\nloss = loss / 4\nloss.backward()",
        None,
    ),
    "gradients zeroed first": (
        "optimizer.zero_grad()\nloss = model(**batch)\nloss.backward()",
        [*START, "loss = parallel.step(batch)"],
    ),
    "gradients zeroed between": (
        "loss = model(**batch)\noptimizer.zero_grad(set_to_none=True)\nloss.backward()",
        [*START, "loss = parallel.step(batch)"],
    ),
    "clip by its full name": (
        "loss = model(**batch)\nloss.backward()\ntorch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        [*START, "loss = parallel.step(batch)", "parallel.clip_grad_norm_(1.0)"],
    ),
    "clip by an alias, by keyword": (
        "loss = model(**batch)\nloss.backward()\n"
        "norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=CLIP)",
        [*START, "loss = parallel.step(batch)", "norm = parallel.clip_grad_norm_(CLIP)"],
    ),
    "prints": (
        "loss = model(**batch)\nloss.backward()\nif step % 10 == 0:\n    print(loss.item())\n"
        "print(\n    1,\n)",
        [
            *START,
            "loss = parallel.step(batch)",
            "if step % 10 == 0 and parallel.rank == 0:",
            "if parallel.rank == 0:",
            "print(",
            "1,",
            ")",
        ],
    ),
    "weights saved": (
        "loss = model(**batch)\nloss.backward()\ntorch.save(model.state_dict(), path)",
        [
            *START,
            "loss = parallel.step(batch)",
            "model_state = parallel.state_dict()  # all ranks take part",
            "if parallel.rank == 0:",
            "torch.save(model_state, path)",
        ],
    ),
    "two statements a line": (
        "loss = model(**batch); loss.backward()",
        [*START, "loss = parallel.step(batch)"],
    ),
    "a comment beside": (
        "loss = model(**batch)  # forward\nloss.backward()  # backward",
        [*START, "loss = parallel.step(batch)  # forward", "# backward"],
    ),
    "training mode": (
        "model.train()\nloss = model(**batch)\nloss.backward()",
        [*START, "parallel.train()", "loss = parallel.step(batch)"],
    ),
}


@pytest.mark.parametrize(("body", "expected"), UNDERSTOOD.values(), ids=UNDERSTOOD.keys())
def test_loops_that_are_understood(body: str, expected: list[str] | None, tmp_path: Path) -> None:
    """Guards: a form of the usual loop that is rewritten into something else than a person would write."""
    (tmp_path / "net.py").write_text(NET)
    source = loop(body, "from net import Net\n" + HEAD)
    result = rewrite(source, tmp_path)
    ast.parse(result.text)
    assert "backward()" not in result.text
    if expected is not None:
        new = added(source, result)
        assert [line for line in new if line not in expected] == [] or new == expected, new
        assert [line for line in expected if line not in new] == [], new


def test_every_line_that_is_not_changed_is_kept() -> None:
    """Guards: comments, blank lines, quotes or line ends lost on the way."""
    source = (
        "# first\nimport torch  # the framework\n\n\ntorch.manual_seed(1)\nmodel = Net()\n\n"
        "opt = torch.optim.SGD(model.parameters(), lr=0.1)\n# a loop\nfor b in data:\n"
        "    loss = model(**b)\n\n    loss.backward()\n    opt.step()  # step\n    opt.zero_grad()\n"
        "text = '''keep\n  this'''  # é\n"
    )
    for newline in ("\n", "\r\n"):
        result = rewrite(source.replace("\n", newline)).text
        assert result.count("\n") == result.count(newline)
        expected = source.replace("    loss.backward()\n", "").replace(
            "loss = model(**b)", "loss = parallel.step(b)"
        )
        expected = expected.replace("opt = ", PARALLELIZE + "\nopt = ").replace(
            "(model.parameters()", "(parallel.parameters()"
        )
        expected = expected.replace("framework\n", "framework\nimport autoplan\n")
        assert result == expected.replace("\n", newline)


def test_clipping_a_list_of_the_parameters_counts_all_ranks() -> None:
    """Guards: the norm of one rank's pieces taken for the norm of the model."""
    listed = (
        "weights = [p for p in model.parameters() if p.requires_grad]\noptimizer = torch.optim.AdamW(weights)"
    )
    body = "loss = model(**batch)\nloss.backward()\nnn.utils.clip_grad_norm_(weights, 1.0)"
    result = rewrite(loop(body, "\n".join((*HEAD.splitlines()[:-1], listed, "")))).text
    assert "    parallel.clip_grad_norm_(1.0)\n" in result
    assert "weights = [p for p in parallel.parameters() if p.requires_grad]" in result


SCOPES = {
    "in main()": """
        import torch
        def main():
            torch.manual_seed(0)
            model = Net()
            optimizer = torch.optim.AdamW(model.parameters())
            for batch in loader:
                loss = model(**batch)
                loss.backward()
                optimizer.step()
        """,
    "loop in a function of its own": """
        import torch
        def train(net, opt, data):
            for batch in data:
                loss = net(**batch)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                opt.step()
                print(loss.item())
        def main():
            torch.manual_seed(0)
            model = Net()
            optimizer = torch.optim.AdamW(model.parameters())
            train(model, optimizer, loader)
        """,
    "loop in a function, the rest global": """
        import torch
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters())
        def train():
            for batch in loader:
                loss = model(**batch)
                loss.backward()
                optimizer.step()
        train()
        """,
    "parameter groups": """
        import torch
        torch.manual_seed(0)
        model = Net()
        decay = [p for n, p in model.named_parameters() if p.dim() > 1]
        rest = [p for n, p in model.named_parameters() if p.dim() <= 1]
        groups = [{"params": decay}, {"params": rest, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
        for batch in loader:
            loss = model(**batch)
            loss.backward()
            optimizer.step()
            scheduler.step()
        """,
    "one of two optimizers": """
        import torch
        torch.manual_seed(0)
        model = Net()
        if fast:
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        else:
            optimizer = torch.optim.AdamW(model.parameters())
        for batch in loader:
            loss = model(**batch)
            loss.backward()
            optimizer.step()
        """,
    "optimizer made by a function": """
        import torch
        def configure(module):
            return torch.optim.AdamW(p for p in module.parameters() if p.requires_grad)
        torch.manual_seed(0)
        model = Net()
        optimizer = configure(model)
        for batch in loader:
            loss = model(**batch)
            loss.backward()
            optimizer.step()
        """,
}
EXPECTED_IN_SCOPES = {
    "in main()": ["    " + PARALLELIZE, "        loss = parallel.step(batch)"],
    "loop in a function of its own": [
        "        loss = net.step(batch)",
        "        net.clip_grad_norm_(1.0)",
        "        if net.rank == 0:",
        "    train(parallel, optimizer, loader)",
    ],
    "loop in a function, the rest global": [PARALLELIZE, "        loss = parallel.step(batch)"],
    "parameter groups": [
        PARALLELIZE + "\ndecay = [p for n, p in parallel.named_parameters() if p.dim() > 1]"
    ],
    "one of two optimizers": [
        PARALLELIZE + "\nif fast:",
        "    optimizer = torch.optim.AdamW(parallel.parameters())",
    ],
    "optimizer made by a function": [
        PARALLELIZE + "\noptimizer = configure(parallel)",
        "in module.parameters()",
    ],
}


@pytest.mark.parametrize("case", SCOPES.keys())
def test_models_and_optimizers_are_followed_through_scopes(case: str) -> None:
    """Guards: parallelize in a place where the model is not there yet, or after its parameters were taken."""
    result = rewrite(textwrap.dedent(SCOPES[case]).lstrip()).text
    for lines in EXPECTED_IN_SCOPES[case]:
        assert lines in result, result
    assert result.count("autoplan.parallelize") == 1
    assert result.index("autoplan.parallelize") < result.index(
        "parallel.", result.index("autoplan.parallelize") + 30
    )


def test_the_model_stays_on_the_host_until_it_is_cut() -> None:
    """Guards: every rank of a node putting the whole model on device 0."""
    head = HEAD.replace(
        "model = Net()", 'model = Net().to("cuda")\nmodel.to(device)\nmodel.cuda()\nmodel.to(torch.bfloat16)'
    )
    result = rewrite(loop("loss = model(**batch)\nloss.backward()", head)).text
    assert "model = Net()\nmodel.to(torch.bfloat16)\nparallel" in result


def test_a_script_without_a_seed_gets_one() -> None:
    """Guards: ranks that start from different weights."""
    source = loop("loss = model(**batch)\nloss.backward()", HEAD.replace("torch.manual_seed(0)\n", ""))
    assert "import autoplan\n\ntorch.manual_seed(0)  # every rank" in rewrite(source).text


def test_the_loss_function_takes_along_what_it_reads() -> None:
    """Guards: `criterion` made below the optimizer, so not there yet when the loss is traced."""
    body = "x, y = batch\nout = model(pixels=x)\nloss = criterion(out, y)\nloss.backward()"
    result = rewrite(loop(body, HEAD + "criterion = nn.CrossEntropyLoss()\n")).text
    assert result.count("criterion = nn.CrossEntropyLoss()") == 1
    assert (
        result.index("criterion = nn")
        < result.index("def loss_fn(out, inputs):")
        < result.index(PARALLELIZE[:-1])
    )
    assert '    return criterion(out, inputs["y"])' in result


def test_a_taken_name_is_not_taken_again() -> None:
    """Guards: the script's own variable `parallel` overwritten."""
    result = rewrite(loop("loss = model(**batch)\nloss.backward()", HEAD + "parallel = 8\n")).text
    assert (
        "parallel_model = autoplan.parallelize(" in result and "loss = parallel_model.step(batch)" in result
    )


# name: (body or whole script, line of the message, words of the message)
REFUSED = {
    "no backward": ("loss = model(**batch)", None, "found no call of `.backward()`"),
    "two backwards": ("model(**batch).backward()\nmodel(**batch).backward()", 9, "a second backward pass"),
    "graph kept": ("loss = model(**batch)\nloss.backward(retain_graph=True)", 9, "backward with arguments"),
    "gradient scaling": (
        "scaler = torch.amp.GradScaler()\nloss = model(**batch)\nloss.backward()",
        8,
        "gradient scaling",
    ),
    "autocast": ("with torch.autocast('cuda'):\n    loss = model(**batch)\nloss.backward()", 8, "autocast"),
    "forward elsewhere": ("if True:\n    loss = model(**batch)\nloss.backward()", 8, "stands inside a `if`"),
    "model called twice": (
        "a = model(**batch)\nloss = model(**batch)\nloss.backward()",
        9,
        "is called twice",
    ),
    "outputs read later": (
        "out = model(**batch)\nloss = out.loss\nloss.backward()\ncorrect = out.logits.argmax()",
        11,
        "reads `out`, which exists inside the parallel step only",
    ),
    "evaluation": (
        "loss = model(**batch)\nloss.backward()\nmodel.eval()",
        10,
        "`model.eval` would use the single-device",
    ),
    "clip by another norm": (
        "loss = model(**batch)\nloss.backward()\n"
        "nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=1)",
        10,
        "gradient clipping other than by the 2-norm",
    ),
    "clip of some parameters": (
        "loss = model(**batch)\nloss.backward()\nnn.utils.clip_grad_norm_(some, 1.0)",
        10,
        "clips `some`, expected all of the model's parameters",
    ),
    "optimizer state saved": (
        "loss = model(**batch)\nloss.backward()\n"
        "torch.save({'m': model.state_dict(), 'o': optimizer.state_dict()}, path)",
        10,
        "an optimizer's state is this rank's piece only",
    ),
    "loss of another model": (
        "loss = teacher(**batch)\nloss.backward()",
        9,
        "found no call of the model `model`",
    ),
    "inputs without names": (
        "x, y = batch\nlogits = model(x)\nloss = F.cross_entropy(logits, y)\nloss.backward()",
        9,
        "pass the model's inputs by name in `model(x)`",
    ),
    "loss read before zero_grad": (
        "loss = model(**batch)\ntotal += loss.item()\noptimizer.zero_grad()\nloss.backward()",
        9,
        "`loss` is used between the forward pass and `zero_grad()`",
    ),
    "compiled": ("net = torch.compile(model)\nloss = model(**batch)\nloss.backward()", 8, "torch.compile"),
    "autoplan already": (
        "import autoplan\nloss = model(**batch)\nloss.backward()",
        8,
        "uses autoplan already",
    ),
}


@pytest.mark.parametrize(("body", "line", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_not_understood_is_named_with_the_lines_to_add(
    body: str, line: int | None, reason: str
) -> None:
    """Guards: a script rewritten wrongly in silence, or refused without a way on."""
    with pytest.raises(BadInputError) as refusal:
        rewrite(loop(body))
    message = str(refusal.value)
    assert message.startswith(
        f"train.py:{line}: not understood: " if line else "train.py: not understood: "
    ), message
    assert reason in message
    for told in (
        PARALLELIZE,
        "loss = parallel.step(batch)",
        "optimizer takes parallel.parameters()",
        "Nothing was written",
    ):
        assert told in message


def test_lines_to_add_carry_the_names_found() -> None:
    """Guards: advice for `model` and `optimizer` in a script that calls them otherwise."""
    source = loop("out = net(**batch)\nloss = out.loss\nloss.backward()\nprint(out.logits)").replace(
        "model", "net"
    )
    with pytest.raises(BadInputError) as refusal:
        rewrite(source.replace("optimizer", "opt"))
    for told in (
        "autoplan.parallelize(net, ",
        "before opt is made (line 6)",
        "opt.step()",
        "in place of net.parameters()",
    ):
        assert told in str(refusal.value)


def test_what_is_not_python_is_one_sentence() -> None:
    """Guards: a SyntaxError traceback of the tool about the user's file."""
    with pytest.raises(BadInputError, match=r"train.py:2: not Python"):
        rewrite("import torch\nfor x in\n")


# ---- a rewritten script does what the plain one did -------------------------------------------------

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


# ---- the commands -----------------------------------------------------------------------------------


def command(*words: str) -> int:
    """``autoplan WORDS`` without the other commands' modules."""
    parser = argparse.ArgumentParser()
    subparsers = parser.add_subparsers()
    cli_apply.add_parser(subparsers)
    cli_run.add_parser(subparsers)
    args = parser.parse_args(words)
    return args.run(args)


def saved_plan(folder: Path, hardware: str, **shape: int) -> str:
    """A plan file for this chip."""
    path = folder / "plan.yaml"
    dataclasses.replace(llama_plan(**shape), hardware=hardware).save(path)
    return str(path)


def test_apply_writes_a_file_and_tells_how_to_launch_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards: a launch line without the chip's switches, or for one host where there are eight."""
    script = tmp_path / "train.py"
    script.write_text(loop("loss = model(**batch)\nloss.backward()"))
    assert command("apply", saved_plan(tmp_path, "kunlun-p800"), str(script)) == 0
    out = capsys.readouterr().out
    assert "+    loss = parallel.step(batch)" in out
    assert "XMLIR_MATMUL_FAST_MODE=1" in out and "--nnodes 8" in out and "--nproc-per-node 8" in out
    assert "parallel.step" in (tmp_path / "train_autoplan.py").read_text()
    assert command("apply", saved_plan(tmp_path, "cpu", dp=1, tp=1), str(script), "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["devices"] == 2 and "torchrun --standalone --nproc-per-node 2" in told["launch"]
    with pytest.raises(BadInputError, match="Is a directory"):  # it was a traceback
        command("apply", saved_plan(tmp_path, "cpu", dp=1, tp=1), ".")


def test_a_script_that_is_not_understood_leaves_no_file(tmp_path: Path) -> None:
    """Guards: half a rewrite on disk; the user's own script overwritten."""
    script = tmp_path / "train.py"
    script.write_text(loop("loss = model(**batch)"))
    with pytest.raises(BadInputError, match="found no call of"):
        command("apply", saved_plan(tmp_path, "cpu"), str(script))
    script.write_text(loop("loss = model(**batch)\nloss.backward()"))
    with pytest.raises(BadInputError, match="is the script itself"):
        command("apply", saved_plan(tmp_path, "cpu"), str(script), "-o", str(script))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.yaml", "train.py"]


def test_run_refuses_a_cluster_it_is_not_on(tmp_path: Path) -> None:
    """Guards: 64 processes started on a laptop."""
    with pytest.raises(BadInputError, match=r"64 kunlun-p800 devices, this machine has \d+") as refusal:
        command("run", saved_plan(tmp_path, "kunlun-p800"), "train.py")
    assert "autoplan apply" in str(refusal.value) and "torchrun --nnodes 8" in str(refusal.value)


def test_run_starts_every_rank_and_returns_the_scripts_exit_code(tmp_path: Path) -> None:
    """Guards: success reported for a run that failed; modules beside the script not found."""
    (tmp_path / "neighbour.py").write_text("CODE = 7\n")
    script = tmp_path / "train.py"
    script.write_text(loop("loss = model(**batch)\nloss.backward()"))
    body = (
        "import neighbour, os, sys\n"
        "open(os.path.dirname(neighbour.__file__) + '/rank' + os.environ['RANK'], 'w').write(sys.argv[1])\n"
        "sys.exit(neighbour.CODE)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", _RUN, saved_plan(tmp_path, "cpu", dp=1, tp=1), str(script), body],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 7, done.stderr
    assert "exit code 7" in done.stderr
    assert [(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)] == ["--steps", "--steps"]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".train")]


_RUN = """
import argparse, sys
from autoplan_codegen.script import ScriptRewrite
from autoplan.cli import apply, run
plan, script, body = sys.argv[1:]
apply.rewritten = lambda *_: ScriptRewrite(body, "")
parser = argparse.ArgumentParser()
run.add_parser(parser.add_subparsers())
args = parser.parse_args(["run", plan, script, "--", "--steps"])
sys.exit(args.run(args))
"""
