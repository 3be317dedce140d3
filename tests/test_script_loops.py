"""Loops as people write them: each is rewritten as a person would, every other line kept."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from script_cases import HEAD, NET, PARALLELIZE, START, added, loop, rewrite, start_with_loss

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
