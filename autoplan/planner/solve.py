"""Best-first over candidates: bound each from below, solve the most promising, stop when the bound passes.

Comes in: a :class:`~autoplan.planner.pricing.Pricing`. Goes out: the best priced part, and a lower bound
over every candidate of the space.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from autoplan.plan import zero_text
from autoplan.planner.balance import balanced_cut, fits
from autoplan.planner.chain import NEVER, Chain, quick_bound_s, without_once
from autoplan.planner.columns import solve_chain
from autoplan.planner.mixes import ColumnPricer
from autoplan.planner.pricing import Priced, Pricing
from autoplan.planner.relaxed import RelaxedPricer
from autoplan.planner.space import Candidate

# A candidate whose lower bound is within this share of the best plan is not worth a solver's time; the
# certificate's bound accounts for it.
TOLERANCE = 0.002
MORE_TO_SHOW = 8  # candidates looked at beyond the proof, to name runners-up


@dataclass(frozen=True)
class Outcome:
    """``best`` is None when nothing fits; ``bound_s`` holds for every candidate considered.

    ``tried`` are the plans that were priced on the way, those that do not fit too.
    """

    best: Priced | None
    bound_s: float
    considered: int
    solved: int
    tried: tuple[Priced, ...] = ()


def fits_anywhere(pricing: Pricing) -> bool:
    """Whether any candidate has a cut that fits."""
    possible = (candidate for candidate in _memory_first(pricing) if pricing.could_fit(candidate))
    return any(fits(ColumnPricer(pricing.chain(candidate))) for candidate in possible)


def solve(pricing: Pricing, say: Callable[[str], None]) -> Outcome:
    """The best plan over all candidates, by simulated step time, with a proved bound."""
    ranked, count = _best_first(pricing), len(pricing.candidates)
    best, rest, tried = _balanced_plans(pricing, ranked, say)
    if best is None:
        return Outcome(None, NEVER, count, 0)
    bounds: list[float] = []
    solved = 0
    for quick_s, candidate, chain in rest:
        if quick_s >= best.prediction.step_time_s * (1 - TOLERANCE):
            bounds.append(quick_s)
            break
        say(f"solving {describe(candidate)}; best so far {best.prediction.step_time_s:.3g} s a step")
        solution = solve_chain(chain, incumbent_s=best.prediction.step_time_s)
        solved += 1
        found = [pricing.priced(candidate, cut) for cut in solution.cuts]
        tried += found
        for priced in found:
            best = _better(best, priced)
        bounds.append(max(quick_s, solution.bound_s))
    bound_s = min([*bounds, best.prediction.step_time_s])
    unseen = _next_best(pricing, itertools.chain(rest, ranked), tried)
    return Outcome(best, bound_s, count, solved, (*tried, *unseen))


def _next_best(pricing: Pricing, ranked: Iterator[Entry], tried: Sequence[Priced]) -> Iterator[Priced]:
    """Plans on meshes that the bound ruled out unseen, the most promising first: they tell a person what the
    chosen plan is better than."""
    seen = {priced.candidate for priced in tried}
    meshes = {priced.candidate.mesh for priced in tried if priced.fits}
    unseen = (entry for entry in ranked if entry[1] not in seen and entry[1].mesh not in meshes)
    for _, candidate, chain in itertools.islice(unseen, MORE_TO_SHOW):
        fresh = candidate.mesh not in meshes and pricing.could_fit(candidate)
        cut = balanced_cut(ColumnPricer(chain)) if fresh else None
        if cut is not None:
            meshes.add(candidate.mesh)
            yield pricing.priced(candidate, cut)


def describe(candidate: Candidate) -> str:
    """``pp2 dp4 tp8, micro-batch 1, ZeRO 0`` for people."""
    mesh = candidate.mesh
    degrees = "".join(f" {axis}{size}" for axis, size in (("cp", mesh.cp), ("ep", mesh.ep)) if size > 1)
    degrees = f"pp{mesh.pp} dp{mesh.dp}{degrees} tp{mesh.tp}"
    zero = zero_text(candidate.zero, candidate.zero_shard)
    return f"{degrees}, micro-batch {candidate.micro_batch}, {zero}"


Entry = tuple[float, Candidate, Chain]
Ranked = list[Entry]
BestT = TypeVar("BestT", Priced, Priced | None)


def _best_first(pricing: Pricing) -> Iterator[Entry]:
    """Candidates with their chains, best lower bound first.

    Those that differ in ZeRO alone are told apart only once the bound that leaves out all traffic between
    replicas comes to the front: most never are.
    """
    order = itertools.count()
    heap: list[tuple[float, int, Chain, Candidate | None, list[Candidate]]] = []
    for base, members in _families(pricing.candidates).items():
        chain = pricing.chain(base)
        heap.append((quick_bound_s(without_once(chain)), next(order), chain, None, members))
    heapq.heapify(heap)
    while heap:
        bound_s, _, chain, candidate, members = heapq.heappop(heap)
        if candidate is not None:
            yield bound_s, candidate, chain
        for member in members:
            own = pricing.chain(member)
            heapq.heappush(heap, (max(bound_s, quick_bound_s(own)), next(order), own, member, []))


def _families(candidates: Sequence[Candidate]) -> dict[Candidate, list[Candidate]]:
    """Candidates by what they are without ZeRO."""
    families: dict[Candidate, list[Candidate]] = {}
    for candidate in candidates:
        families.setdefault(replace(candidate, zero=0, zero_shard=0), []).append(candidate)
    return families


def _balanced_plans(
    pricing: Pricing, ranked: Iterator[Entry], say: Callable[[str], None]
) -> tuple[Priced | None, Ranked, list[Priced]]:
    """A good plan to start from, the candidates that could beat it, and every plan priced."""
    best: Priced | None = None
    alive: Ranked = []
    tried: list[Priced] = []
    for quick_s, candidate, chain in ranked:
        if best is not None and quick_s >= best.prediction.step_time_s:
            alive.append((quick_s, candidate, chain))  # only its bound still counts
            break
        if not pricing.could_fit(candidate):
            continue
        say(f"balancing {describe(candidate)}")
        cut = balanced_cut(ColumnPricer(chain))
        if cut is None:
            if fits(RelaxedPricer(chain)):
                alive.append((quick_s, candidate, chain))
            continue
        tried.append(pricing.priced(candidate, cut))
        best = _better(best, tried[-1])
        alive.append((quick_s, candidate, chain))
    return best, alive, tried


def _better(best: BestT, other: Priced) -> BestT | Priced:
    """The faster of two plans that fit; of equals the first."""
    if not other.fits:
        return best
    if best is None or other.prediction.step_time_s < best.prediction.step_time_s * (1 - 1e-9):
        return other
    return best


def _memory_first(pricing: Pricing) -> list[Candidate]:
    """Candidates that spread the model widest first: full sharding, then deep, narrow micro-batches."""
    return sorted(
        pricing.candidates,
        key=lambda c: (-(c.mesh.pp * c.mesh.tp * (c.groups.shards if c.zero == 3 else 1)), c.micro_batch),
    )
