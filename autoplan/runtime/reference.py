"""A model and a batch in, loss and gradients of plain eager PyTorch in one process out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autoplan.capture import ModelSource
from autoplan.runtime.exact import eager_exactly
from autoplan.runtime.forked import run_ranks

LEARNING_RATE = 0.1


@dataclass(frozen=True)
class Measured:
    """Loss, every gradient by the parameter's name, and the norm of all gradients, of the first step.

    ``parameters`` are those after the last step, where any was made.
    """

    loss: torch.Tensor
    gradients: Mapping[str, torch.Tensor]
    norm: float
    parameters: Mapping[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])


def measure_eager(
    source: ModelSource,
    model: nn.Module,
    batches: Sequence[Any],
    weights: Sequence[float],
    dtype: torch.dtype,
    timeout_s: float,
    steps: int = 0,
) -> Measured:
    """Weighted mean loss and its gradients over ``batches``, one after the other in a forked process.

    Then the parameters after ``steps`` steps of plain SGD on the same batches.
    """

    def pass_over() -> torch.Tensor:
        total = torch.zeros((), dtype=dtype)
        for batch, weight in zip(batches, weights):
            share = source.run(model, batch) * weight / len(batches)
            share.backward()
            total = total + share.detach()
        return total

    def body(rank: int) -> Measured:
        with eager_exactly(model, dtype):
            total = pass_over()
            trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
            gradients = {n: _gradient(p) for n, p in trained.items()}
            sgd_steps(list(trained.values()), pass_over, steps)
        after = {n: p.detach() for n, p in trained.items()} if steps else {}
        return Measured(total, gradients, norm_of(gradients), after)

    return run_ranks(1, body, timeout_s=timeout_s)[0]


def sgd_steps(parameters: Iterable[nn.Parameter], pass_over: Callable[[], Any], steps: int) -> None:
    """``steps`` updates: the gradients of the first are there, ``pass_over`` makes those of the next."""
    updated = list(parameters)
    optimizer = torch.optim.SGD(updated, lr=LEARNING_RATE)
    for step in range(steps):
        if step:
            pass_over()
        optimizer.step()
        for parameter in updated:
            parameter.grad = None


def norm_of(gradients: Mapping[str, torch.Tensor]) -> float:
    """The 2-norm over all gradients."""
    return sum(float(g.double().square().sum()) for g in gradients.values()) ** 0.5


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()


def in_pieces(batch: Any, samples: int, pieces: int) -> list[Any]:
    """A global batch of ``samples`` cut into ``pieces`` along dim 0; other tensors stay whole."""

    def piece(value: Any, index: int) -> Any:
        whole = not isinstance(value, torch.Tensor) or not value.dim() or value.shape[0] % samples
        return value if whole else value.chunk(pieces)[index]

    if isinstance(batch, Mapping):
        return [{str(k): piece(v, index) for k, v in batch.items()} for index in range(pieces)]
    return [tuple(piece(v, index) for v in batch) for index in range(pieces)]
