"""What the optimizer updated in, the parameters that compute out: rounded, and gathered under ZeRO-1.

Gathers run ahead of the forward that reads them: while one region computes, the next buckets arrive.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autoplan.runtime.reduction import fill_buckets
from autoplan.runtime.rows import matching, row_length, start_all_gather
from autoplan.runtime.weights import Trained, local_of
from autoplan_cost_models.zero import GATHERS_AHEAD


class WeightRefresh:
    """Brings new values into the computing parameters of a rank, in the order in which they are read."""

    def __init__(self, trained: Sequence[Trained], stages: Sequence[nn.Module]) -> None:
        self._whole = [item for item in trained if item.dim < 0 and not item.is_itself]
        buckets = fill_buckets([item for item in trained if item.dim >= 0])
        self._buckets = [GatherBucket(members) for members in buckets]
        self._started = self._finished = len(self._buckets)
        if self._buckets:
            self._hook(stages)

    def begin(self) -> None:
        """Before the first micro-batch of a step: round what is whole here, begin to gather the rest."""
        with torch.no_grad():
            for item in self._whole:
                item.computing.copy_(item.updated)
        self._started = self._finished = 0
        self._start()

    def finish(self) -> None:
        """After the last micro-batch: wait for what no forward read."""
        self._finish(len(self._buckets))

    def _hook(self, stages: Sequence[nn.Module]) -> None:
        last_of = {item.computing: i for i, bucket in enumerate(self._buckets) for item in bucket.members}
        for region in (region for stage in stages for region in stage.children()):
            needed = max((last_of.get(parameter, -1) + 1 for parameter in region.parameters()), default=0)
            if needed:
                region.register_forward_pre_hook(functools.partial(self._before, needed))

    def _before(self, needed: int, region: nn.Module, inputs: Any) -> None:
        del region, inputs
        self._finish(needed)

    def _start(self) -> None:
        while self._started < min(len(self._buckets), self._finished + GATHERS_AHEAD):
            self._buckets[self._started].start()
            self._started += 1

    def _finish(self, count: int) -> None:
        while self._finished < count:
            self._buckets[self._finished].finish()
            self._finished += 1
            self._start()


class GatherBucket:
    """Shards that are gathered together."""

    def __init__(self, members: Sequence[Trained]) -> None:
        self.members = tuple(members)
        self._replicas = members[0].replicas
        self._lengths = [row_length(m.computing.shape, m.dim, self._replicas.shards) for m in members]
        self._rows = torch.empty(0)
        self._work: dist.Work | None = None

    def start(self) -> None:
        """Begin to gather, in the dtype that computes."""
        like = self.members[0].computing
        mine = like.new_zeros(sum(self._lengths))
        with torch.no_grad():
            for item, row in zip(self.members, mine.split(self._lengths)):
                piece = local_of(item.updated)
                row[: piece.numel()].view(piece.shape).copy_(piece)
        self._rows = like.new_empty(self._replicas.shards, len(mine))
        self._work = start_all_gather(self._rows, mine, self._replicas.shard_group)

    def finish(self) -> None:
        """Wait, and fill the computing parameters."""
        assert self._work is not None
        self._work.wait()
        with torch.no_grad():
            for item, rows in zip(self.members, self._rows.split(self._lengths, 1)):
                for arrived, place in matching(rows, item.computing, item.dim):
                    place.copy_(arrived)
        self._rows, self._work = torch.empty(0), None
