"""The micro-batches of one step in, their mean loss and accumulated gradients out.

A rank runs the actions of its schedule (:func:`autoplan.schedules.rank_actions`) one after the other: forward
or backward of one micro-batch on one of its stages, and messages to and from the ranks of its neighbours. A
tensor is let go as soon as it is sent or used. Each micro-batch's loss is weighted and divided by their
number before its backward, so gradients need no scaling after.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autoplan.runtime.prepare import RunProgram, TensorFacts, keyword_name
from autoplan.runtime.ranks import Ranks
from autoplan.schedules import Action, Task, rank_actions

MicroBatches = Sequence[dict[str, torch.Tensor]]
Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class RankStage:
    """One stage of this rank: its number, its module, and the generated code the module is from."""

    number: int
    module: nn.Module
    code: ModuleType


@dataclass
class _Message:
    """Tensors on their way; ``works`` are the transfers still going on."""

    tensors: Tensors
    works: list[dist.Work] = field(default_factory=list[dist.Work])

    def take(self) -> Tensors:
        """The tensors, once they are all there."""
        for work in self.works:
            work.wait()
        return self.tensors

    @property
    def is_done(self) -> bool:
        return all(work.is_completed() for work in self.works)


@dataclass(frozen=True)
class _Graph:
    """What a forward leaves for its backward: the tensors it received, and where its outputs' gradients go
    in (None for an output without one)."""

    received: Tensors
    outputs: tuple[Any, ...]


class Pipeline:
    """This rank's stages, run by the part's schedule (one stage in all: micro-batch after micro-batch)."""

    def __init__(self, stages: Sequence[RankStage], program: RunProgram, ranks: Ranks) -> None:
        part = program.part
        self.stages = {stage.number: stage for stage in stages}
        self.program, self.ranks, self.count = program, ranks, part.microbatches
        self.actions = rank_actions(part.schedule, part.mesh.pp, part.vpp, part.microbatches)[ranks.pp]
        self.inputs = {stage.number: _stage_inputs(program, stage.number) for stage in stages}
        self._do: Mapping[str, Callable[[Task], None]] = {
            "forward": self._forward,
            "backward": self._backward,
            "backward_input": self._backward_input,
            "backward_weight": self._backward_weight,
        }
        self._arrived: dict[Task, _Message] = {}  # by the task that made them
        self._leaving: list[_Message] = []
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._deferred: dict[tuple[int, int], Any] = {}

    def run(self, batches: MicroBatches, weights: Sequence[Sequence[float]]) -> torch.Tensor:
        """Run the schedule; returns the mean loss on the rank of the last stage, zero elsewhere."""
        self._batches, self._weights = batches, weights
        self._loss = torch.zeros((), device=self.ranks.device, dtype=self.program.loss_dtype)
        for action in self.actions:
            self._take(action)
            self._leaving = [message for message in self._leaving if not message.is_done]
        for message in self._leaving:
            message.take()
        self._leaving = []
        return self._loss

    def _take(self, action: Action) -> None:
        task = action.task
        if action.what == "run":
            self._do[task.kind](task)
        elif action.what == "send":
            message = self._arrived.pop(task)
            peer = self._rank_of(_reader(task))
            message.works = [
                _work(dist.isend(tensor, peer, group=self.ranks.group("pp"))) for tensor in message.tensors
            ]
            self._leaving.append(message)
        else:
            tensors = tuple(self._empty(facts) for facts in self._crossing(task))
            peer, group = self._rank_of(task.stage), self.ranks.group("pp")
            works = [_work(dist.irecv(tensor, peer, group=group)) for tensor in tensors]
            self._arrived[task] = _Message(tensors, works)

    def _forward(self, task: Task) -> None:
        stage, batch = self.stages[task.stage], self._batches[task.microbatch]
        received: Tensors = ()
        if task.stage:
            received = self._arrived.pop(Task("forward", task.stage - 1, task.microbatch)).take()
            for tensor, facts in zip(received, self._crossing(task._replace(stage=task.stage - 1))):
                tensor.requires_grad_(facts.differentiable)
        named = {keyword: batch[name] for name, keyword in self.inputs[task.stage].items()}
        made = stage.module(*received, **named)
        if self.program.stages[task.stage].is_last:
            made = (self._weighted(made, self._weights[task.microbatch]) / self.count,)
            self._loss = self._loss + made[0].detach()
        else:
            self._arrived[task] = _Message(tuple(tensor.detach().contiguous() for tensor in made))
        edges = tuple(_gradient_edge(tensor) for tensor in made)
        self._graphs[task.stage, task.microbatch] = _Graph(received, edges)

    def _weighted(self, loss: torch.Tensor, weights: Sequence[float]) -> torch.Tensor:
        """The loss of a micro-batch, or the sum of its terms, as they count in the global batch."""
        if len(weights) == 1:
            return loss * weights[0]
        return (loss * loss.new_tensor(weights)).sum()

    def _backward(self, task: Task) -> None:
        graph = self._graphs.pop((task.stage, task.microbatch))
        gradients: Sequence[torch.Tensor | None] = (None,)
        if not self.program.stages[task.stage].is_last:
            sent = self._crossing(Task("forward", task.stage, task.microbatch))
            arrived = iter(self._arrived.pop(task._replace(stage=task.stage + 1)).take())
            gradients = [next(arrived) if facts.differentiable else None for facts in sent]
        pairs = [pair for pair in zip(graph.outputs, gradients) if pair[0] is not None]
        if pairs:
            torch.autograd.backward([edge for edge, _ in pairs], [gradient for _, gradient in pairs])
        if task.stage:
            wanted = [tensor for tensor in graph.received if tensor.requires_grad]
            self._arrived[task] = _Message(tuple(_gradient(tensor) for tensor in wanted))

    def _backward_input(self, task: Task) -> None:
        self._backward(task)
        code = vars(self.stages[task.stage].code)
        if "take_deferred" in code:
            self._deferred[task.stage, task.microbatch] = code["take_deferred"]()

    def _backward_weight(self, task: Task) -> None:
        deferred = self._deferred.pop((task.stage, task.microbatch), ())
        if deferred:
            vars(self.stages[task.stage].code)["run_deferred"](deferred)

    def _crossing(self, task: Task) -> list[TensorFacts]:
        """The tensors of the message that a task makes: values sent on, or gradients of values received."""
        stage = self.program.stages[task.stage]
        if task.kind == "forward":
            return [self.program.values[name] for name in stage.sends]
        values = [self.program.values[name] for name in stage.receives]
        return [facts for facts in values if facts.differentiable]

    def _empty(self, facts: TensorFacts) -> torch.Tensor:
        return torch.empty(facts.shape, dtype=facts.dtype, device=self.ranks.device)

    def _rank_of(self, stage: int) -> int:
        return self.ranks.rank_at(pp=stage % self.ranks.shape.pp)


def _reader(task: Task) -> int:
    """The stage that takes what a task made."""
    return task.stage + 1 if task.kind == "forward" else task.stage - 1


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None  # this rank is in the group
    return work


def _gradient_edge(tensor: torch.Tensor) -> Any:
    """Where the tensor's gradient enters the graph; the tensor itself need not be kept for it."""
    return torch.autograd.graph.get_gradient_edge(tensor) if tensor.requires_grad else None


def _gradient(tensor: torch.Tensor) -> torch.Tensor:
    """The gradient of a received tensor, zero where nothing depends on it."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad.contiguous()


def _stage_inputs(program: RunProgram, stage: int) -> dict[str, str]:
    """The user inputs a stage reads: placeholder -> the keyword of its forward."""
    read = program.stages[stage].user_inputs
    return {item.name: keyword_name(item) for item in program.inputs if item.name in read}
