"""The gradients of a stage's micro-batches in, their mean over the replicas out, bucket by bucket.

A bucket is reduced as soon as all its gradients of the last micro-batch are there, while the backward of
earlier layers still runs. Buckets start in one fixed order, the same on every rank whatever the data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from autoplan.runtime.rows import row_length, start_reduce_scatter, write_rows
from autoplan.runtime.weights import Trained, own_piece

# Elements of a bucket, as in Megatron-LM's distributed data parallel: 40M, and 1M a replica, since the
# latency of a ring grows with the ranks.
BUCKET_ELEMENTS = 40_000_000
BUCKET_ELEMENTS_PER_REPLICA = 1_000_000
IN_FLIGHT = 2


class GradientReduction:
    """Sums and reduces the gradients of one rank's parameters, in the order in which they are read.

    How many gradients of a parameter make its sum (one a micro-batch, stage and use) is seen in the first
    step, which reduces everything at its end.
    """

    def __init__(self, trained: Sequence[Trained]) -> None:
        self._trained = tuple(trained)
        self._of = {item.computing: item for item in trained}
        self._buckets = [Bucket(members) for members in fill_buckets(list(reversed(trained)))]
        self._bucket_of = {item.computing: bucket for bucket in self._buckets for item in bucket.members}
        self._arrived: Counter[nn.Parameter] = Counter()
        self._expected: Counter[nn.Parameter] = Counter()
        self._started = self._finished = 0
        for item in trained:
            item.computing.register_post_accumulate_grad_hook(self._arrive)

    def begin(self) -> None:
        """Before the first micro-batch of a step."""
        self._expected, self._arrived = self._arrived, Counter()
        self._started = self._finished = 0
        for bucket in self._buckets:
            expected = [self._expected[item.computing] for item in bucket.members]
            bucket.missing = sum(count > 0 for count in expected) if self._expected else len(expected)
        for item in self._trained:
            item.set_aside()

    def finish(self) -> None:
        """After the last micro-batch: reduce what is left, and wait for all of it."""
        for item in self._trained:
            item.collect()  # what no hook reported: a schedule that computes weight gradients on their own
        self._start(everything=True)
        while self._finished < self._started:
            self._finish_next()
        for item in self._trained:
            item.restore()

    def _arrive(self, parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        self._of[parameter].collect()
        self._arrived[parameter] += 1
        if self._arrived[parameter] == self._expected[parameter]:
            self._bucket_of[parameter].missing -= 1
            self._start()

    def _start(self, *, everything: bool = False) -> None:
        while self._started < len(self._buckets):
            bucket = self._buckets[self._started]
            if bucket.missing > 0 and not everything:
                return
            while self._started - self._finished >= IN_FLIGHT:
                self._finish_next()
            bucket.start()
            self._started += 1

    def _finish_next(self) -> None:
        self._buckets[self._finished].finish()
        self._finished += 1


class Bucket:
    """Gradients that travel together: of one dtype, one group of replicas, all whole or all sharded."""

    def __init__(self, members: Sequence[Trained]) -> None:
        self.members = tuple(members)
        self.missing = 0
        self._replicas = members[0].replicas
        self._sent: list[Trained] = []
        self._flat = self._mine = torch.empty(0)
        self._work: dist.Work | None = None

    def start(self) -> None:
        """Begin to reduce the gradients that came (the same ones on every rank)."""
        self._sent = [item for item in self.members if item.gradient is not None]
        if not self._sent or self._replicas.size == 1:
            return
        if self._sent[0].dim < 0:
            self._flat = self._joined()
            self._work = dist.all_reduce(self._flat, group=self._replicas.group, async_op=True)
            return
        self._flat = self._in_rows()
        self._mine = self._flat.new_empty(self._flat.shape[1])
        self._work = start_reduce_scatter(self._flat, self._mine, self._replicas.shard_group)

    def finish(self) -> None:
        """Wait, and give every parameter its mean."""
        if self._work is None:
            for item in self._sent:
                self._give_alone(item)
            return
        self._work.wait()
        self._work = None
        (self._give_whole if self._sent[0].dim < 0 else self._give_shards)()
        self._flat = self._mine = torch.empty(0)

    def _joined(self) -> torch.Tensor:
        gradients = [gradient for item in self._sent if (gradient := item.gradient) is not None]
        if len(gradients) == 1 and gradients[0].is_contiguous():
            return gradients[0].view(-1)
        return torch.cat([gradient.flatten() for gradient in gradients])

    def _give_whole(self) -> None:
        self._flat /= self._replicas.divisor
        pieces = self._flat.split([item.computing.numel() for item in self._sent])
        for item, piece in zip(self._sent, pieces):
            gradient = item.gradient
            assert gradient is not None
            if gradient.data_ptr() != piece.data_ptr():
                gradient.copy_(piece.view_as(gradient))
            item.give(gradient)

    def _in_rows(self) -> torch.Tensor:
        """The buffer of the reduce-scatter; the gradients in it are forgotten."""
        shards = self._replicas.shards
        first = self._sent[0]
        gradient = first.gradient
        assert gradient is not None
        if len(self._sent) == 1 and first.dim == 0 and gradient.shape[0] % shards == 0:
            return gradient.contiguous().view(shards, -1)
        lengths = self._lengths()
        flat = gradient.new_zeros(shards, sum(lengths))
        for item, rows in zip(self._sent, flat.split(lengths, 1)):
            gradient = item.gradient
            assert gradient is not None
            write_rows(rows, gradient, item.dim)
            item.total = None
        return flat

    def _lengths(self) -> list[int]:
        return [row_length(item.computing.shape, item.dim, self._replicas.shards) for item in self._sent]

    def _give_shards(self) -> None:
        if self._replicas.across is not None:
            dist.all_reduce(self._mine, group=self._replicas.across)
        self._mine /= self._replicas.divisor
        for item, row in zip(self._sent, self._mine.split(self._lengths())):
            shape = own_piece(item.computing, item.dim, self._replicas).shape
            item.give(row[: shape.numel()].view(shape))

    def _give_alone(self, item: Trained) -> None:
        gradient = item.gradient
        assert gradient is not None
        if self._replicas.divisor > 1:
            gradient /= self._replicas.divisor
        item.give(gradient)


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


def bucket_elements(replicas: int) -> int:
    """At how many elements a bucket is full."""
    return max(BUCKET_ELEMENTS, BUCKET_ELEMENTS_PER_REPLICA * replicas)
