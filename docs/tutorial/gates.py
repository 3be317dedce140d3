"""Two layers with a learnt slope between them."""

import torch
from torch import nn


class Gates(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.slope, self.down = nn.Linear(512, 2048), nn.PReLU(2048), nn.Linear(2048, 512)

    def forward(self, x):
        return self.down(self.slope(self.up(x))).square().mean()


def build_model():
    return Gates()


def example_inputs(batch_size):
    return {"x": torch.randn(batch_size, 512)}
