"""Two blocks of four experts whose router is overruled: ``forced`` is added to a sample's scores."""

from importlib import import_module

import torch
from torch import nn

import_module("transformers.integrations.moe")  # registers a grouped product that runs in any precision

EXPERTS, WIDTH, FORCE = 4, 16, 100.0


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / 4)

    def forward(self, x, forced):
        y = self.norm(x)
        scores = (self.router(y) + forced[:, None]).view(-1, EXPERTS)
        chosen = scores.topk(2, -1).indices
        weights = scores.gather(1, chosen).softmax(-1)
        expert, order = chosen.view(-1).sort()
        ends = torch.histc(expert.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0).to(torch.int32)
        product = torch.ops.transformers.grouped_mm_fallback
        rows = torch.relu(product(y.view(-1, WIDTH)[order // 2], self.up, ends))
        rows = product(rows, self.down, ends) * weights.view(-1)[order, None]
        back = torch.empty_like(order).index_put((order,), torch.arange(order.shape[0]))
        return x + rows[back].view(-1, 2, WIDTH).sum(1).view_as(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x, forced, target):
        for block in self.blocks:
            x = block(x, forced)
        return nn.functional.mse_loss(self.head(x), target)


def build_model():
    return Model()


def example_inputs(batch_size):
    """The first half of the batch is sent to experts 0 and 1, the second to 2 and 3."""
    late = (torch.arange(batch_size) >= batch_size // 2)[:, None]
    forced = torch.where(late, torch.tensor([0.0, 0, FORCE, FORCE]), torch.tensor([FORCE, FORCE, 0, 0]))
    return {"x": torch.rand(batch_size, 6, WIDTH), "forced": forced, "target": torch.rand(batch_size, 6, 8)}
