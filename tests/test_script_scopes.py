"""Models, optimizers, seeds and loss functions of a script, wherever they are made."""

from __future__ import annotations

import textwrap

import pytest
from script_cases import HEAD, PARALLELIZE, loop, rewrite

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
