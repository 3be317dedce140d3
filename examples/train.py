"""Trains the small GPT of gpt.py on made-up text in which each token follows from the one before it."""

import torch
from gpt import CONTEXT, build_model

BATCH, STEPS, SYMBOLS = 8, 80, 64


def make_batches(steps):
    """Walks along a fixed list of successors: a model that has learnt the list predicts every token."""
    successor = torch.randperm(SYMBOLS)
    for _ in range(steps):
        tokens = [torch.randint(SYMBOLS, (BATCH,))]
        for _ in range(CONTEXT):
            tokens.append(successor[tokens[-1]])
        text = torch.stack(tokens, dim=1)
        yield {"tokens": text[:, :-1], "labels": text[:, 1:]}


def main():
    torch.manual_seed(0)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

    for step, batch in enumerate(make_batches(STEPS)):
        loss = model(**batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == STEPS - 1:
            print(f"step {step:3d}  loss {loss.item():.4f}  gradient norm {norm.item():.3f}")


if __name__ == "__main__":
    main()
