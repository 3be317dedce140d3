"""A model as a chain of priced regions, at one mesh and micro-batch: what the stage search works on.

Comes in: times and bytes of every region. Goes out: :class:`Chain`, its runs of equal regions, and a lower
bound on its pipeline's time in closed form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoplan_cost_models.zero import added_s

NEVER = float("inf")


@dataclass(frozen=True)
class OnceAStep:
    """What a region adds once a step, at least: its share of its stage's gradient reduction, weight gather
    and update, and what reduction and gather take for the region alone."""

    reduce_s: float = 0.0
    reduce_alone_s: float = 0.0
    gather_s: float = 0.0
    gather_alone_s: float = 0.0
    update_s: float = 0.0


@dataclass(frozen=True)
class ChainItem:
    """One region at one mesh and micro-batch; tuples follow ``plan.RECOMPUTE`` (none, selective, full).

    ``extra_s`` is added to ``backward_s`` (``inf``: not allowed); ``static_bytes`` are states,
    ``gathered_bytes`` what a ZeRO-3 unit needs whole while it runs; ``output_bytes`` cross a stage boundary
    after it; ``side`` names inputs (masks, tables) kept once per stage and micro-batch; ``once`` is what it
    adds once a step. A split backward puts off ``weight_s`` of ``backward_s`` and keeps ``deferred_bytes``
    until then.
    """

    key: str
    forward_s: float
    backward_s: float
    extra_s: tuple[float, float, float]
    saved_bytes: tuple[float, float, float]
    transient_bytes: tuple[float, float, float]
    static_bytes: float
    gathered_bytes: float = 0.0
    output_bytes: float = 0.0
    side: tuple[tuple[str, float], ...] = ()
    once: OnceAStep = OnceAStep()
    weight_s: float = 0.0
    deferred_bytes: float = 0.0

    @property
    def allowed(self) -> tuple[int, ...]:
        """The recompute options it may use."""
        return tuple(o for o in range(3) if self.extra_s[o] < NEVER)


@dataclass(frozen=True)
class Chain:
    """All regions in order, the memory limit of a rank, and parameters that two regions share.

    ``stages`` are those of all ranks, ``vpp`` of them a rank. ``shared`` holds (region a, region b, bytes):
    counted once when both are on one stage. ``hop_s`` is the least latency between two stages.
    ``arriving_bytes`` are the most that new weights on their way take. ``once_whole_s`` is what replicas'
    traffic adds once a step where one stage holds all regions: when it recomputes as little as it may, and
    what no recompute hides.
    """

    items: tuple[ChainItem, ...]
    limit_bytes: float
    microbatches: int
    stages: int
    shared: tuple[tuple[int, int, float], ...] = ()
    hop_s: float = 0.0
    arriving_bytes: float = 0.0
    once_whole_s: tuple[float, float] = (0.0, 0.0)
    schedule: str = "1f1b"
    vpp: int = 1

    @property
    def ranks(self) -> int:
        return self.stages // self.vpp


@dataclass(frozen=True)
class Cut:
    """``ends[s]`` is one past the last region of stage s; ``recompute`` names one option per region."""

    ends: tuple[int, ...]
    recompute: tuple[str, ...]


@dataclass(frozen=True)
class Solved:
    """Cuts worth simulating and ``bound_s``, below which no cut of this chain can run; empty: none fits."""

    cuts: tuple[Cut, ...]
    bound_s: float


@dataclass(frozen=True)
class Run:
    """Consecutive equal regions: kind, how many, and the index of the first."""

    key: str
    length: int
    first: int


def find_runs(chain: Chain) -> tuple[Run, ...]:
    """Equal neighbours; a region that shares a parameter with another stands alone."""
    alone = {index for a, b, _ in chain.shared for index in (a, b)}
    runs: list[Run] = []
    for i, item in enumerate(chain.items):
        last = runs[-1] if runs else None
        joined = last is not None and last.key == item.key and i not in alone and (i - 1) not in alone
        if last is not None and joined:
            runs[-1] = Run(last.key, last.length + 1, last.first)
        else:
            runs.append(Run(item.key, 1, i))
    return tuple(runs)


def quick_bound_s(chain: Chain) -> float:
    """A lower bound in closed form, from total times alone (no memory).

    With S = sum of t over all regions: for any cut, T >= m t_s + sum_{j<s} t_j gives
    T >= S / (1 - (1 - 1/m)^p); and for m >= p the rows of the module's formula, with f_s <= phi t_s,
    give t_s <= (T - S) / ((m-1) - (p-1-s) phi), so T >= S (1 + 1/H) with H the sum of those fractions.
    Then the first stage still gathers and reduces its first region's weights, and a stage updates its share.
    """
    totals = [item.forward_s + item.backward_s + min(item.extra_s) for item in chain.items]
    total_s, m, p = sum(totals), chain.microbatches, chain.stages
    bound_s = total_s / (1 - (1 - 1 / m) ** p) if m > 1 else total_s
    if m >= p and m > 1:
        phi = max((item.forward_s / t for item, t in zip(chain.items, totals) if t > 0), default=0.5)
        spans = [(m - 1) - (p - 1 - s) * min(phi, 1.0) for s in range(p)]
        if min(spans) > 0:
            bound_s = max(bound_s, total_s * (1 + 1 / sum(1 / span for span in spans)))
    first = chain.items[0].once
    shown_s = chain.once_whole_s[0] if p == 1 else first.reduce_alone_s + first.gather_alone_s
    updates_s = sum(item.once.update_s for item in chain.items) / p
    return max(bound_s, m * max(totals)) + shown_s + updates_s


def without_once(chain: Chain) -> Chain:
    """The chain of replicas that exchange nothing and update for free."""
    items = tuple(replace(item, once=OnceAStep()) for item in chain.items)
    return replace(chain, items=items, once_whole_s=(0.0, 0.0))


def shown_once_s(once: Sequence[OnceAStep], forward_s: float, backward_s: float) -> float:
    """What a stage's reduction and gather add at least, given its regions in order: that of the first region,
    which nothing can hide, or what exceeds the backward or forward of one micro-batch."""
    reduce_s, gather_s = sum(one.reduce_s for one in once), sum(one.gather_s for one in once)
    shown_s = max(once[0].reduce_alone_s, reduce_s - backward_s)
    return added_s(reduce_s, shown_s) + added_s(gather_s, max(once[0].gather_alone_s, gather_s - forward_s))
