"""Scripts that are not understood: each is refused with its line and the lines to add."""

from __future__ import annotations

import pytest
from script_cases import PARALLELIZE, loop, rewrite

from autoplan.errors import BadInputError

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
