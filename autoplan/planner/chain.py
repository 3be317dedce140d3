"""A model as a chain of priced regions, at one mesh and micro-batch: what the stage search works on.

Comes in: times and bytes of every region. Goes out: :class:`Chain`, its runs of equal regions, and a lower
bound on its pipeline's time in closed form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autoplan.schedules import splits_backward
from autoplan_cost_models.zero import added_s

Floats = NDArray[np.float64]

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

    @cached_property
    def allowed(self) -> tuple[int, ...]:
        """The recompute options it may use."""
        return tuple(o for o in range(3) if self.extra_s[o] < NEVER)


@dataclass(frozen=True)
class FirstBlocks:
    """Recompute as frameworks have it: the first ``count`` regions of ``blocks`` in every stage, whole, and
    nothing else. None: as many as suit a stage, or (``alike``) all stages, out of ``counts``."""

    blocks: tuple[bool, ...]
    counts: tuple[int, ...]
    alike: bool
    count: int | None = None


@dataclass(frozen=True)
class Chain:
    """All regions in order, the memory limit of a rank, and parameters that two regions share.

    ``stages`` are those of all ranks, ``vpp`` of them a rank. ``shared`` holds (region a, region b, bytes):
    counted once when both are on one stage. ``hop_s`` is the least latency between two stages.
    ``arriving_bytes`` are the most that new weights on their way take. ``once_whole_s`` is what replicas'
    traffic adds once a step where one stage holds all regions: when it recomputes as little as it may, and
    what no recompute hides. ``first`` limits which regions may be recomputed together.
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
    first: FirstBlocks | None = None

    @property
    def ranks(self) -> int:
        return self.stages // self.vpp

    @cached_property
    def kinds(self) -> dict[str, ChainItem]:
        """Every item once, by key."""
        return {item.key: item for item in self.items}


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

    For 1F1B, with S = sum of t over all regions: for any cut, T >= m t_s + sum_{j<s} t_j gives
    T >= S / (1 - (1 - 1/m)^p); and for m >= p the rows of the module's formula, with f_s <= phi t_s,
    give t_s <= (T - S) / ((m-1) - (p-1-s) phi), so T >= S (1 + 1/H) with H the sum of those fractions.
    Then the first stage still gathers and reduces its first region's weights, and a stage updates its share.
    """
    totals = [item.forward_s + item.backward_s + min(item.extra_s) for item in chain.items]
    if chain.schedule in ("1f1b", "gpipe"):
        bound_s = _one_after_another_s(totals, chain)
    elif chain.schedule == "zb_h1" and chain.vpp == 1:
        bound_s = _split_s(totals, chain)
    else:
        bound_s = _several_s(totals, chain)
    return max(bound_s, chain.microbatches * max(totals)) + least_once_s(chain)


def least_once_s(chain: Chain) -> float:
    """What a step takes after its pipeline, at least: traffic of the first region, where the pipeline ends
    (of any, where it is a bound on any rank's end), and a rank's share of the update."""
    alone = [item.once.reduce_alone_s + item.once.gather_alone_s for item in chain.items]
    shown_s = min(alone) if splits_backward(chain.schedule) else alone[0]
    if chain.stages == 1:
        shown_s = chain.once_whole_s[0]
    return shown_s + sum(item.once.update_s for item in chain.items) / chain.ranks


def _several_s(totals: list[float], chain: Chain) -> float:
    """The bound on several stages a rank: T >= m R_r + sum_{j<r} t_j with R_r the work of rank r, in the mean
    over all ranks, every stage as short as a region can be. (A split backward drains faster.)"""
    m, p = chain.microbatches, chain.ranks
    split = splits_backward(chain.schedule)
    shortest_s = min((i.forward_s if split else t for i, t in zip(chain.items, totals)), default=0.0)
    return sum(totals) * m / p + shortest_s * (p - 1) / 2


def even_ends(chain: Chain) -> list[int]:
    """Boundaries nearest to equal shares of the time, one region a stage at least."""
    times = np.cumsum([item.forward_s + item.backward_s + min(item.extra_s) for item in chain.items])
    regions, stages = len(chain.items), chain.stages
    ends: list[int] = []
    for stage in range(1, stages):
        share = times[-1] * stage / stages
        nearest = int(np.argmin(np.abs(times - share))) + 1
        low, high = (ends[-1] if ends else 0) + 1, regions - (stages - stage)
        ends.append(min(max(nearest, low), high))
    return [*ends, regions]


def region_seconds(chain: Chain, options: Sequence[int]) -> Floats:
    """[forward, backward, weight gradients][region]; a backward that is not split has no weights."""
    late = [item.weight_s if splits_backward(chain.schedule) else 0.0 for item in chain.items]
    backward = [i.backward_s + i.extra_s[o] - w for i, o, w in zip(chain.items, options, late)]
    return np.array([[item.forward_s for item in chain.items], backward, late])


def stage_seconds(chain: Chain, ends: Sequence[int], options: Sequence[int]) -> Floats:
    """The same of every stage of a cut."""
    regions = region_seconds(chain, options)
    sums = np.concatenate([np.zeros((3, 1)), np.cumsum(regions, axis=1)], axis=1)
    return np.diff(sums[:, [0, *ends]], axis=1)


def _one_after_another_s(totals: list[float], chain: Chain) -> float:
    """The bound on 1F1B."""
    total_s, m, p = sum(totals), chain.microbatches, chain.stages
    bound_s = total_s / (1 - (1 - 1 / m) ** p) if m > 1 else total_s
    if m >= p and m > 1 and chain.schedule == "1f1b":
        phi = max((item.forward_s / t for item, t in zip(chain.items, totals) if t > 0), default=0.5)
        spans = [(m - 1) - (p - 1 - s) * min(phi, 1.0) for s in range(p)]
        if min(spans) > 0:
            bound_s = max(bound_s, total_s * (1 + 1 / sum(1 / span for span in spans)))
    return bound_s


def _split_s(totals: list[float], chain: Chain) -> float:
    """The bound on a zero-bubble schedule of one stage a rank.

    With F the sum of all f: T >= F + sum_{j>s} b_j + m t_s - (p-s) f_s for m >= p, so with f <= phi t and
    b >= beta t, going through the stages from the last, their times so far sum to at most
    y <- y + (T - F - beta y) / (m - (p-s) phi): in the end to kappa (T - F), and so T >= F + S / kappa.
    """
    total_s, m, p = sum(totals), chain.microbatches, chain.stages
    parts = [(i.forward_s, t - i.forward_s - i.weight_s, t) for i, t in zip(chain.items, totals) if t > 0]
    phi = max((forward / t for forward, _, t in parts), default=0.0)
    beta = min((backward / t for _, backward, t in parts), default=0.0)
    spans = [m - (p - s) * phi for s in reversed(range(p))]
    if m < p or min(spans) <= beta:
        return total_s * m / p
    kappa = 0.0
    for span in spans:
        kappa += (1 - beta * kappa) / span
    return max(total_s * m / p, sum(forward for forward, _, _ in parts) + total_s / kappa)


def without_once(chain: Chain) -> Chain:
    """The chain of replicas that exchange nothing and update for free."""
    free = {item.key: replace(item, once=OnceAStep()) for item in chain.kinds.values()}
    return replace(chain, items=tuple(free[item.key] for item in chain.items), once_whole_s=(0.0, 0.0))


def shown_once_s(once: Sequence[OnceAStep], forward_s: float, backward_s: float) -> float:
    """What a stage's reduction and gather add at least, given its regions in order: that of the first region,
    which nothing can hide, or what exceeds the backward or forward of one micro-batch."""
    reduce_s, gather_s = sum(one.reduce_s for one in once), sum(one.gather_s for one in once)
    shown_s = max(once[0].reduce_alone_s, reduce_s - backward_s)
    return added_s(reduce_s, shown_s) + added_s(gather_s, max(once[0].gather_alone_s, gather_s - forward_s))
