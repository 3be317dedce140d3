"""Lets the trained reader write on from "the quick"."""

import torch
from model import CONTEXT, LETTERS, Reader

model = Reader()
model.load_state_dict(torch.load("reader.pt"))
ids = [LETTERS.index(letter) for letter in "the quick"]
with torch.no_grad():
    for _ in range(48):
        ids.append(int(model(torch.tensor([ids[-CONTEXT:]]))[0, -1].argmax()))
print("".join(LETTERS[i] for i in ids))
