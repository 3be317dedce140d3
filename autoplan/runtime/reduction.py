"""The gradients of a stage's micro-batches in, their mean over the replicas out, bucket by bucket.

Gradients are added up in the buffer in which they travel. A bucket is reduced as soon as all its gradients of
the last micro-batch are there, while the backward of earlier layers still runs. Buckets start in one fixed
order, the same on every rank whatever the data.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from autoplan.runtime.replication import Replicas
from autoplan.runtime.rows import matching, row_length, start_reduce_scatter
from autoplan.runtime.weights import Trained, own_piece
from autoplan_cost_models.zero import bucket_elements

IN_FLIGHT = 2  # reductions inside shard groups, before the first is added up across groups


class GradientReduction:
    """Sums and reduces the gradients of one rank's parameters, given in the order in which they are read.

    How many gradients of a parameter make its sum (one a micro-batch, stage and use) is seen in the first
    step, which reduces everything at its end.
    """

    def __init__(self, trained: Sequence[Trained]) -> None:
        # Where nothing is divided, the optimizer's own parameters keep the gradients that autograd adds up.
        moved = [item for item in trained if item.replicas.divisor > 1 or not item.is_itself]
        self._buckets = [Bucket(members) for members in fill_buckets(list(reversed(moved)))]
        self._bucket_of = {item.computing: bucket for bucket in self._buckets for item in bucket.members}
        self._arrived: Counter[nn.Parameter] = Counter()
        self._expected: Counter[nn.Parameter] = Counter()
        self._kept: dict[nn.Parameter, torch.Tensor] = {}
        self._started = 0
        for item in moved:
            item.computing.register_post_accumulate_grad_hook(self._arrive)

    def begin(self) -> None:
        """Before the first micro-batch of a step: put gradients of earlier steps aside."""
        self._expected, self._arrived = self._arrived, Counter()
        self._started = 0
        self._kept = {}
        for bucket in self._buckets:
            expected = [self._expected[item.computing] for item in bucket.members]
            bucket.missing = sum(count > 0 for count in expected) if self._expected else len(expected)
            for item in bucket.members:
                if item.is_itself and item.computing.grad is not None:
                    self._kept[item.computing] = item.computing.grad
                    item.computing.grad = None

    def finish(self) -> None:
        """After the last micro-batch: reduce what is left, wait for all of it, and hand it out."""
        self._start(everything=True)
        for bucket in self._buckets:
            bucket.finish()
        for parameter, gradient in self._kept.items():
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def _arrive(self, parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        if parameter.grad is None:
            return  # a split backward makes it later, and comes again
        bucket = self._bucket_of[parameter]
        bucket.add(parameter)
        self._arrived[parameter] += 1
        if self._arrived[parameter] == self._expected[parameter]:
            bucket.missing -= 1
            self._start()

    def _start(self, *, everything: bool = False) -> None:
        while self._started < len(self._buckets):
            bucket = self._buckets[self._started]
            if bucket.missing > 0 and not everything:
                return
            bucket.start()
            self._started += 1
            if self._started > IN_FLIGHT:
                self._buckets[self._started - IN_FLIGHT - 1].cross()


class Bucket:
    """Gradients that travel together: of one dtype, one group of replicas, all whole or all sharded.

    Their sums lie in one buffer [shards, row length], a row for each shard (whole ones: one row), from the
    first gradient of a step until every parameter has its mean.
    """

    def __init__(self, members: Sequence[Trained]) -> None:
        self.members = tuple(members)
        self.missing = 0
        self._replicas: Replicas = members[0].replicas
        self._sharded = members[0].dim >= 0
        self._shards = self._replicas.shards if self._sharded else 1
        lengths = [row_length(item.computing.shape, max(item.dim, 0), self._shards) for item in members]
        ends = list(itertools.accumulate(lengths))
        self._columns = {
            item.computing: (item, slice(end - length, end))
            for item, length, end in zip(members, lengths, ends)
        }
        self._length = ends[-1]
        self._rows: torch.Tensor | None = None
        self._came: dict[nn.Parameter, None] = {}
        self._mine = torch.empty(0)
        self._work: dist.Work | None = None
        self._crossed = False

    def add(self, parameter: nn.Parameter) -> None:
        """Add the new gradient of a parameter, as its share of the mean, to its sum, and forget it."""
        gradient = parameter.grad
        assert gradient is not None  # it has just been made
        item, columns = self._columns[parameter]
        if self._rows is None:
            like = torch.zeros if self._sharded else torch.empty  # whole: written before it is read
            self._rows = like(self._shards, self._length, dtype=item.updated.dtype, device=parameter.device)
        is_first = not self._sharded and parameter not in self._came
        with torch.no_grad():
            for total, new in matching(self._rows[:, columns], gradient, max(item.dim, 0)):
                if is_first and new.dtype == total.dtype:
                    torch.mul(new, 1.0 / self._replicas.divisor, out=total)
                    continue
                if is_first:
                    total.zero_()
                total.add_(new, alpha=1.0 / self._replicas.divisor)
        self._came[parameter] = None
        parameter.grad = None

    def start(self) -> None:
        """Begin to reduce (nothing came on any rank where nothing came here)."""
        self._crossed = not self._sharded or self._replicas.across is None
        if self._rows is None or self._replicas.size == 1:
            return
        if not self._sharded:
            for parameter in self._columns.keys() - self._came.keys():
                self._rows[:, self._columns[parameter][1]].zero_()
            self._work = dist.all_reduce(self._rows, group=self._replicas.group, async_op=True)
            return
        self._mine = self._rows.new_empty(self._length)
        self._work = start_reduce_scatter(self._rows, self._mine, self._replicas.shard_group)

    def cross(self) -> None:
        """Begin to add up the shards of all groups, once they are summed inside each."""
        if self._work is None or self._crossed:
            return
        self._work.wait()
        self._work = dist.all_reduce(self._mine, group=self._replicas.across, async_op=True)
        self._crossed = True

    def finish(self) -> None:
        """Wait, and give every parameter its mean."""
        self.cross()
        if self._work is not None:
            self._work.wait()
        if self._rows is not None:
            reduced = self._sharded and self._replicas.size > 1
            row = self._mine if reduced else self._rows[0]
            for item, columns in (self._columns[parameter] for parameter in self._came):
                shape = item.computing.shape
                if self._sharded:
                    shape = own_piece(item.computing, item.dim, self._replicas).shape
                item.give(row[columns][: shape.numel()].view(shape))
        self._rows, self._work, self._mine, self._came = None, None, torch.empty(0), {}


def fill_buckets(trained: Sequence[Trained]) -> list[list[Trained]]:
    """Consecutive parameters in buckets; those of another group, dtype or kind go to buckets of their own."""
    full: list[list[Trained]] = []
    filling: dict[object, list[Trained]] = {}
    for item in trained:
        key = (id(item.replicas), item.updated.dtype, item.computing.dtype, item.dim < 0)
        bucket = filling.setdefault(key, [])
        bucket.append(item)
        if sum(other.computing.numel() for other in bucket) >= bucket_elements(item.replicas.size):
            full.append(filling.pop(key))
    return [*full, *filling.values()]
