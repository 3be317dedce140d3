"""Where the lines that save and resume go in a training script."""

from __future__ import annotations

import pytest
from script_cases import HEAD, TAIL, rewrite

from autoplan.errors import BadInputError
from autoplan_codegen.script import rewrite_script
from autoplan_codegen.script_checkpoints import Kept

KEPT = """
def train(model, optimizer, schedule, loader):
    for epoch in range(2):
        for batch in loader:
            batch = batch.cuda()
            loss = model(**batch)
            loss.backward()
            optimizer.step()
        schedule.step()
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
train(model, optimizer, scheduler, loader)
"""


def test_saving_and_resuming_stand_where_they_must() -> None:
    """Guards: batches skipped after they were trained on, a scheduler not saved, a loop in a function."""
    kept = Kept(save="runs/a", every=50, resume="runs/a", weights="hf")
    text = rewrite_script(HEAD + KEPT, name="train.py", plan_path="plan.yaml", kept=kept).text
    function = text[text.index("def train") : text.index("scheduler =")]
    assert function.splitlines() == [
        "def train(model, optimizer, schedule, loader):",
        '    checkpoints = model.checkpoints(optimizer, schedule, save="runs/a", every=50, resume="runs/a")',
        "    for epoch in range(2):",
        "        for batch in loader:",
        "            batch = batch.cuda()",
        "            if checkpoints.passed():  # trained on before the run was resumed",
        "                continue",
        "            loss = model.step(batch)",
        "            optimizer.step()",
        "            checkpoints.after_step()",
        "        schedule.step()",
        "    checkpoints.finish()",
    ]
    assert text.index("autoplan.parallelize") < text.index('load_pretrained("hf")') < text.index("AdamW")


def test_saving_in_a_while_loop_is_refused() -> None:
    """A batch that passes by would leave the counter of a `while` where it is, for ever."""
    source = HEAD + "while step < 9:\n    loss = model(**batch)\n    loss.backward()\n" + TAIL
    rewrite(source)
    with pytest.raises(BadInputError, match="need a `for` loop"):
        rewrite_script(source, name="train.py", plan_path="plan.yaml", kept=Kept(save="runs/a"))
