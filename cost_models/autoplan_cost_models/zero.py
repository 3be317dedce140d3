"""How ZeRO lays states over replicas, and the traffic that follows from it.

Comes in: a mesh, a ZeRO stage, how many replicas share one copy. Goes out: :class:`ZeroGroups`, and the
seconds of its collectives for parameters of a given size.

What the runtime does, with n replicas in a shard group and g groups (HSDP where g > 1):

====  =========================  =========================================================================
ZeRO  every micro-batch          once a step
====  =========================  =========================================================================
0     nothing                    all-reduce of gradients over all replicas
1     nothing                    reduce-scatter of gradients over n, all-reduce of shards over g; all-gather
                                 of new weights over n
2     reduce-scatter             all-gather of weights over n; all-reduce of gradient shards over g
3     two all-gathers,           all-reduce of gradient shards over g
      reduce-scatter
====  =========================  =========================================================================

Gradients travel in the precision in which they are added up, weights in that in which they compute.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autoplan.plan import Mesh, Part
from autoplan_cost_models.collectives import OVERLAP_SLOWDOWN, Span
from autoplan_cost_models.region_cost import CostModel
from autoplan_cost_models.region_work import ParameterUse
from autoplan_cost_models.training_state import StateBytes, state_bytes

# Elements that travel together where nothing else decides, as in Megatron-LM's distributed data parallel:
# 40M, and 1M a replica, since the latency of a ring grows with its ranks; capped to bound the buffers.
BUCKET_ELEMENTS = 40_000_000
BUCKET_ELEMENTS_PER_REPLICA = 1_000_000
MOST_BUCKET_ELEMENTS = 200_000_000
GATHERS_AHEAD = 2  # buckets of new weights that arrive before they are read


def bucket_elements(replicas: int) -> int:
    """At how many elements a bucket is full."""
    return min(max(BUCKET_ELEMENTS, BUCKET_ELEMENTS_PER_REPLICA * replicas), MOST_BUCKET_ELEMENTS)


@dataclass(frozen=True)
class Held:
    """An amount (bytes, elements) of parameters that all replicas have, and of a rank's own experts."""

    dense: float = 0.0
    experts: float = 0.0

    @property
    def total(self) -> float:
        return self.dense + self.experts

    def __add__(self, other: Held) -> Held:
        return Held(self.dense + other.dense, self.experts + other.experts)

    def __mul__(self, factor: float) -> Held:
        return Held(factor * self.dense, factor * self.experts)


def held_bytes(uses: Iterable[ParameterUse], *, trained: bool = False) -> Held:
    """Bytes of parameters, or of those that are trained."""
    wanted = [use for use in uses if use.trainable or not trained]
    return Held(*(float(sum(use.bytes for use in wanted if use.by_expert == own)) for own in (False, True)))


def held_trained(uses: Iterable[ParameterUse]) -> Held:
    """Elements of trained parameters."""
    wanted = [use for use in uses if use.trainable]
    return Held(*(float(sum(use.numel for use in wanted if use.by_expert == own)) for own in (False, True)))


@dataclass(frozen=True)
class ZeroGroups:
    """``replicas`` ranks with the same parameters, ``stride`` apart, of which ``shards`` adjacent ones share
    one copy of what ZeRO stage ``zero`` shards. Every ``ep``-th of them has the same experts."""

    zero: int
    replicas: int
    shards: int
    stride: int
    ep: int = 1

    @property
    def of_experts(self) -> ZeroGroups:
        """The ranks with copies of the same experts."""
        if self.ep == 1:
            return self
        shards = max(1, self.shards // self.ep)
        return ZeroGroups(self.zero, self.replicas // self.ep, shards, self.stride * self.ep)

    @property
    def all(self) -> Span:
        return Span(self.replicas, self.stride)

    @property
    def inside(self) -> Span:
        """A shard group."""
        return Span(self.shards, self.stride)

    @property
    def across(self) -> Span:
        """The ranks that hold the same shard, one in every group."""
        return Span(self.replicas // self.shards, self.stride * self.shards)

    @property
    def bucket_elements(self) -> int:
        """Parameters whose once-a-step traffic is one collective; FSDP2's units are regions: 0."""
        return bucket_elements(self.replicas) if self.zero < 2 else 0

    def reduce_s(self, model: CostModel, gradient_bytes: Held) -> float:
        """Seconds to reduce gradients once a step."""
        return sum(
            groups._reduce_s(model, amount)
            for groups, amount in ((self, gradient_bytes.dense), (self.of_experts, gradient_bytes.experts))
        )

    def _reduce_s(self, model: CostModel, amount: float) -> float:
        if self.zero == 0:
            return model.collective_s("all_reduce", amount, self.all)
        groups_s = model.collective_s("all_reduce", amount / self.shards, self.across)
        inside_s = model.collective_s("reduce_scatter", amount, self.inside) if self.zero == 1 else 0.0
        return groups_s + inside_s

    def scatter_s(self, model: CostModel, gradient_bytes: Held) -> float:
        """Seconds to reduce-scatter gradients inside a group."""
        return self._inside_s(model, "reduce_scatter", gradient_bytes)

    def gather_s(self, model: CostModel, weight_bytes: Held) -> float:
        """Seconds to gather weights inside a group."""
        return self._inside_s(model, "all_gather", weight_bytes)

    def _inside_s(self, model: CostModel, kind: str, amount: Held) -> float:
        experts_s = model.collective_s(kind, amount.experts, self.of_experts.inside)
        return model.collective_s(kind, amount.dense, self.inside) + experts_s

    def states(self, parameter_bytes: Held, trained_numel: Held, *, dtype: str, optimizer: str) -> StateBytes:
        """What a rank keeps of parameters: see :func:`state_bytes`."""
        rows = (
            (self.shards, parameter_bytes.dense, trained_numel.dense),
            (self.of_experts.shards, parameter_bytes.experts, trained_numel.experts),
        )
        dense, experts = (
            state_bytes(size, numel, dtype=dtype, optimizer=optimizer, zero=self.zero, shards=shards)
            for shards, size, numel in rows
        )
        return dense + experts

    @property
    def gathers_once(self) -> bool:
        """Whether weights are gathered at the start of a step."""
        return self.zero in (1, 2)

    @property
    def kinds(self) -> tuple[tuple[str, Span], ...]:
        """The collectives between replicas and the groups they run on."""
        if self.replicas == 1:
            return ()
        if self.zero == 0:
            return (("all_reduce", self.all),)
        return (("reduce_scatter", self.inside), ("all_gather", self.inside), ("all_reduce", self.across))


def zero_groups(mesh: Mesh, zero: int, zero_shard: int = 0) -> ZeroGroups:
    """Replicas (dp x cp) are ``tp`` ranks apart; with one of them ZeRO is off."""
    if mesh.replicas == 1 or zero == 0:
        return ZeroGroups(0, mesh.replicas, 1, mesh.tp, mesh.ep)
    return ZeroGroups(zero, mesh.replicas, zero_shard or mesh.replicas, mesh.tp, mesh.ep)


def part_groups(part: Part) -> ZeroGroups:
    """:func:`zero_groups` of a part of a plan."""
    return zero_groups(part.mesh, part.zero, part.zero_shard)


def trailing_s(pieces: Sequence[tuple[float, float]]) -> float:
    """What traffic adds that starts piece by piece, each after its compute: pieces are (compute, traffic).

    The last piece's traffic always shows; what is hidden slows compute down. Gathers that run ahead of
    compute are the same, read backwards.
    """
    computed = sent = total = 0.0
    for compute_s, traffic_s in pieces:
        computed += compute_s
        sent = max(sent, computed) + traffic_s
        total += traffic_s
    return added_s(total, sent - computed if total else 0.0)


def added_s(traffic_s: float, shown_s: float) -> float:
    """What traffic adds to compute, of which ``shown_s`` has no compute beside it."""
    return shown_s + (OVERLAP_SLOWDOWN - 1.0) * max(0.0, traffic_s - shown_s)


def in_buckets(compute_s: Sequence[float], amounts: Sequence[Held], least: float) -> list[tuple[float, Held]]:
    """(compute, amount) joined until a bucket is full; what is left is one more."""
    joined: list[tuple[float, Held]] = []
    time_s, held = 0.0, Held()
    for one_s, more in zip(compute_s, amounts):
        time_s, held = time_s + one_s, held + more
        if held.total and held.total >= least:
            joined.append((time_s, held))
            time_s, held = 0.0, Held()
    return [*joined, (time_s, held)] if time_s or held.total else joined


def step_reduce_s(
    groups: ZeroGroups,
    model: CostModel,
    backward_s: Sequence[float],
    trained_numel: Sequence[Held],
    element_bytes: float,
) -> float:
    """What the once-a-step reduction adds to the last backward. Regions come in the order of backward."""

    @functools.cache
    def price(numel: Held) -> float:
        return groups.reduce_s(model, numel * element_bytes)

    buckets = in_buckets(backward_s, trained_numel, groups.bucket_elements)
    return trailing_s([(compute_s, price(numel)) for compute_s, numel in buckets])


def step_gather_s(
    groups: ZeroGroups,
    model: CostModel,
    forward_s: Sequence[float],
    weight_bytes: Sequence[Held],
    element_bytes: float,
) -> float:
    """What the once-a-step gather adds to the first forward. Regions come in the order of forward."""
    if not groups.gathers_once:
        return 0.0

    @functools.cache
    def price(size: Held) -> float:
        return groups.gather_s(model, size)

    least = groups.bucket_elements * element_bytes
    buckets = in_buckets(list(reversed(forward_s)), list(reversed(weight_bytes)), least)
    return trailing_s([(compute_s, price(size)) for compute_s, size in buckets])
