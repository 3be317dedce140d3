"""Trains the reader on one sentence, written again and again."""

import torch
from model import CONTEXT, LETTERS, TEXT, Reader
from torch import nn

BATCH, STEPS = 8, 60

torch.manual_seed(0)
model = Reader()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
criterion = nn.CrossEntropyLoss()
ids = torch.tensor([LETTERS.index(letter) for letter in TEXT * 40])

for step in range(STEPS):
    starts = torch.randint(len(ids) - CONTEXT - 1, (BATCH,))
    text = torch.stack([ids[start : start + CONTEXT + 1] for start in starts])
    logits = model(text[:, :-1])
    loss = criterion(logits.flatten(0, 1), text[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0 or step == STEPS - 1:
        print(f"step {step:2d}  loss {loss.item():.4f}")

torch.save(model.state_dict(), "reader.pt")
