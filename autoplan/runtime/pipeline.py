"""The micro-batches of one step in, their mean loss and accumulated gradients out.

One stage: a plain loop. Several: ``torch.distributed.pipelining`` with the loss inside the last stage.
Each micro-batch's loss is weighted and divided by their number before its backward, so gradients need no
scaling after.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.microbatch import TensorChunkSpec

from autoplan.runtime.prepare import RunProgram, TensorFacts, keyword_name
from autoplan.runtime.ranks import Ranks

MicroBatches = Sequence[dict[str, torch.Tensor]]


class LossRunner:
    """The whole model on one stage: forward and backward of each micro-batch in turn."""

    def __init__(self, stage: nn.Module, program: RunProgram, ranks: Ranks) -> None:
        self.stage, self.count, self.device = stage, program.part.microbatches, ranks.device
        self.names = _stage_inputs(program, 0)
        self.loss_dtype = program.loss_dtype

    def run(self, batches: MicroBatches, weights: Sequence[float]) -> torch.Tensor:
        """Accumulate gradients; returns the mean loss."""
        total = torch.zeros((), device=self.device, dtype=self.loss_dtype)
        for batch, weight in zip(batches, weights):
            loss: torch.Tensor = self.stage(**{keyword: batch[name] for name, keyword in self.names.items()})
            share = loss * weight / self.count
            share.backward()
            total = total + share.detach()
        return total


class Pipeline:
    """One of several stages, run by a schedule of ``torch.distributed.pipelining``."""

    def __init__(self, stage: nn.Module, program: RunProgram, ranks: Ranks) -> None:
        self.program = program.stages[ranks.pp]
        self.count, self.device = program.part.microbatches, ranks.device
        self.names = _stage_inputs(program, ranks.pp)
        self.loss_dtype = program.loss_dtype
        loss = TensorFacts((1,), program.loss_dtype, True)
        sent = [program.values[name] for name in self.program.sends]
        received = [program.values[name] for name in self.program.receives]
        self.module = _LossShaped(stage, self.program.is_last)
        pipeline_stage = PipelineStage(
            self.module,
            ranks.pp,
            ranks.shape.pp,
            ranks.device,
            input_args=tuple(_example(facts) for facts in received),
            output_args=tuple(_example(facts) for facts in (sent or [loss])),
            group=ranks.group("pp"),
        )
        self.schedule: Any = _schedule(program, ranks)(
            pipeline_stage,
            self.count,
            loss_fn=self._loss,
            scale_grads=False,
            kwargs_chunk_spec={_PREFIX + keyword: TensorChunkSpec(0) for keyword in self.names.values()},
        )

    def run(self, batches: MicroBatches, weights: Sequence[float]) -> torch.Tensor:
        """Run the schedule; returns the mean loss on the last stage, zero elsewhere."""
        losses: list[torch.Tensor] = []
        self._feed(batches, weights, losses)
        total = torch.zeros((), device=self.device, dtype=self.loss_dtype)
        for loss in losses:
            total = total + loss.detach().reshape(())
        return total

    def _feed(self, batches: MicroBatches, weights: Sequence[float], losses: list[torch.Tensor]) -> None:
        # The schedule takes whole batches and cuts them itself: join what `micro_batches` cut.
        joined = {
            _PREFIX + keyword: torch.cat([batch[name] for batch in batches])
            for name, keyword in self.names.items()
            if batches[0][name].dim()
        }
        self.module.fixed = {
            keyword: batches[0][name] for name, keyword in self.names.items() if not batches[0][name].dim()
        }
        # What the schedule calls the target, one number a micro-batch, is the weight of its loss.
        target = torch.tensor(weights, device=self.device, dtype=self.loss_dtype)
        self.schedule.step(target=target, losses=losses, return_outputs=False, **joined)

    def _loss(self, output: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (output * weight).sum() / self.count


_PREFIX = "batch_"  # keeps the batch's keywords apart from those of ``schedule.step``


class _LossShaped(nn.Module):
    """A stage as the schedule wants it: a loss of shape [1], values to send without gaps in memory.

    It also hides from the schedule that the stage is sharded over replicas: a sharded module then gathers
    and reduces by itself at every micro-batch, instead of holding whole parameters through the step.
    """

    def __init__(self, stage: nn.Module, is_last: bool) -> None:
        super().__init__()
        self.stage, self.is_last = stage, is_last
        self.fixed: dict[str, torch.Tensor] = {}

    def forward(self, *received: torch.Tensor, **batch: torch.Tensor) -> Any:
        named = {keyword.removeprefix(_PREFIX): value for keyword, value in batch.items()}
        output = self.stage(*received, **named, **self.fixed)
        return output.reshape(1) if self.is_last else tuple(value.contiguous() for value in output)


def _schedule(program: RunProgram, ranks: Ranks) -> type[Schedule1F1B] | type[ScheduleGPipe]:
    """The schedule of the plan; torch's 1F1B refuses fewer micro-batches than stages, GPipe runs them."""
    if program.part.schedule == "gpipe" or program.part.microbatches < ranks.shape.pp:
        return ScheduleGPipe
    return Schedule1F1B


def _stage_inputs(program: RunProgram, stage: int) -> dict[str, str]:
    """The user inputs a stage reads: placeholder -> the keyword of its forward."""
    read = program.stages[stage].user_inputs
    return {item.name: keyword_name(item) for item in program.inputs if item.name in read}


def _example(facts: TensorFacts) -> torch.Tensor:
    return torch.empty(facts.shape, dtype=facts.dtype, device="meta", requires_grad=facts.differentiable)
