"""Cuts of a chain into several stages a rank: even boundaries, recompute by what each rank can hold.

Comes in: a chain with ``vpp`` above 1. Goes out: cuts worth pricing, and a lower bound on every choice of
recompute under their boundaries: those by even time, moved while that shortens the step. A rank's stages
share its memory, so recompute is chosen for all of them at once.

The bound: with least recompute everywhere, the rows of :func:`autoplan_cost_models.schedule.bound_rows`; and
a rank that cannot hold this recomputes for e_r seconds at least, each of which a row of that rank counts as
often as the least of its stages. e_r is the optimum where regions may be recomputed in part, at the moment
of the schedule that asks for most (a relaxed multiple-choice knapsack). With no more recompute than least,
the simulation itself is a bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from autoplan.plan import RECOMPUTE
from autoplan.planner.chain import (
    NEVER,
    Chain,
    Cut,
    Floats,
    Solved,
    even_ends,
    region_seconds,
    stage_seconds,
)
from autoplan.planner.rank_room import RankRoom, RankStage, stages_of
from autoplan_cost_models.schedule import bound_rows, rank_ends
from autoplan_cost_models.zero import added_s

MOVES = 200  # of one region over one boundary, at most


def solve_interleaved(chain: Chain, *, incumbent_s: float = NEVER) -> Solved:
    """Cuts that fit by this module's count (pricing tells for certain; none where the bound passes the
    incumbent), and the bound on their boundaries."""
    least = least_options(chain)
    ends = move_ends(chain, even_ends(chain), least)
    bound_s = boundaries_bound_s(chain, ends, least, incumbent_s)
    options = fit_ranks(chain, ends, least) if bound_s < incumbent_s else None
    if options is None:
        return Solved((), bound_s)
    cuts = [(ends, options)]
    moved = move_ends(chain, ends, options)
    again = fit_ranks(chain, moved, least) if moved != ends else None
    cuts += [(moved, again)] if again is not None else []
    return Solved(tuple(Cut(tuple(e), tuple(RECOMPUTE[o] for o in own)) for e, own in cuts), bound_s)


def least_options(chain: Chain) -> list[int]:
    """Of every region the option that takes least time."""
    kinds = chain.kinds.items()
    least = {key: min(item.allowed, key=lambda o, item=item: item.extra_s[o]) for key, item in kinds}
    return [least[item.key] for item in chain.items]


def boundaries_bound_s(
    chain: Chain, ends: Sequence[int], least: Sequence[int], enough_s: float = NEVER
) -> float:
    """Seconds below which no plan with these boundaries runs; ``inf`` where it fits with no recompute.

    What is dear to count is left out where the bound is ``enough_s`` without it.
    """
    rows = bound_rows(chain.schedule, chain.ranks, chain.vpp, chain.microbatches)
    seconds = stage_seconds(chain, ends, least)
    own = np.array(rows.own)
    steps_s = rows.forward @ seconds[0] + rows.backward @ seconds[1] + rows.weight @ seconds[2]
    steps_s += rows.hops * chain.hop_s
    stages = [stages_of(chain, ends, rank) for rank in range(chain.ranks)]
    syncs_s = np.array([shown_sync_s(own) for own in stages])
    once_s = chain.items[0].once.gather_alone_s
    once_s += sum(item.once.update_s for item in chain.items) / chain.ranks
    ended_s = syncs_s[list(rows.rank)] + once_s
    bound_s = float(np.max(steps_s + ended_s))
    if bound_s >= enough_s:
        return bound_s
    often = rows.backward.reshape(len(own), chain.vpp, chain.ranks)[np.arange(len(own)), :, own].min(1)
    more_s = np.array([RankRoom(chain, rank, own).least_extra_s() for rank, own in enumerate(stages)])
    if np.max(more_s) == NEVER:
        return NEVER
    bound_s = float(np.max(steps_s + often * more_s[own] + ended_s))
    if bound_s >= enough_s:
        return bound_s
    simulated_s = np.array(_least_ends_s(chain, seconds))
    return max(bound_s, float(np.max(simulated_s + syncs_s)) + once_s)


def _least_ends_s(chain: Chain, seconds: Floats) -> list[float]:
    """When each rank ends if nothing more is recomputed: no plan with these boundaries ends before."""
    forward, backward, weight = seconds
    hops = [chain.hop_s] * (chain.stages - 1)
    whole = backward + weight  # weights are part of a backward
    return rank_ends(
        chain.schedule,
        forward.tolist(),
        whole.tolist(),
        chain.microbatches,
        hops,
        vpp=chain.vpp,
        weight_s=weight.tolist(),
    )


def shown_sync_s(stages: Sequence[RankStage]) -> float:
    """What the reduction of a rank's gradients adds at least: that of the first region, whose backward is the
    last, or what exceeds the longest backward of a micro-batch."""
    items = [item for stage in stages for item in stage.items]
    longest_s = sum(i.backward_s + max(i.extra_s[o] for o in i.allowed) for i in items)
    reduce_s = sum(item.once.reduce_s for item in items)
    return added_s(reduce_s, max(items[0].once.reduce_alone_s, reduce_s - longest_s))


def move_ends(chain: Chain, ends: Sequence[int], options: Sequence[int]) -> list[int]:
    """Move regions over boundaries, the best move first, while the bound on the step falls."""
    rows = bound_rows(chain.schedule, chain.ranks, chain.vpp, chain.microbatches)
    factors = np.concatenate([rows.forward, rows.backward, rows.weight], axis=1)
    regions = region_seconds(chain, options)
    seconds, at = stage_seconds(chain, ends, options), list(ends)
    best = float(np.max(factors @ seconds.ravel()))
    for _ in range(MOVES):
        moves = [(s, by) for s in range(len(at) - 1) for by in (-1, 1) if _may_move(at, s, by)]
        tried = np.repeat(seconds[:, :, None], len(moves), axis=2)
        for i, (s, by) in enumerate(moves):
            moved = by * regions[:, at[s] if by > 0 else at[s] - 1]
            tried[:, s, i] += moved
            tried[:, s + 1, i] -= moved
        steps_s = np.max(factors @ tried.reshape(-1, len(moves)), axis=0) if moves else np.array([best])
        found = int(np.argmin(steps_s))
        if steps_s[found] >= best * (1 - 1e-9):
            break
        best, seconds = float(steps_s[found]), tried[:, :, found]
        at[moves[found][0]] += moves[found][1]
    return at


def _may_move(ends: Sequence[int], stage: int, by: int) -> bool:
    """Whether both stages at a boundary keep a region."""
    return (ends[stage - 1] if stage else 0) < ends[stage] + by < ends[stage + 1]


def fit_ranks(chain: Chain, ends: Sequence[int], options: Sequence[int]) -> list[int] | None:
    """The options with which every rank fits, starting from ``options``; None where some rank never does.

    Of a rank that holds too much, the region is recomputed whose time buys most memory, until it fits.
    """
    chosen = list(options)
    spans = list(pairwise([0, *ends]))
    for rank in range(chain.ranks):
        own = RankRoom(chain, rank, stages_of(chain, ends, rank)).fit(
            [chosen[first:end] for first, end in spans[rank :: chain.ranks]]
        )
        if own is None:
            return None
        for (first, end), fitted in zip(spans[rank :: chain.ranks], own):
            chosen[first:end] = fitted
    return chosen
