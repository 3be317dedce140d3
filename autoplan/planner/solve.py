"""Best-first over candidates: bound each from below, solve the most promising, stop when the bound passes.

Comes in: a :class:`~autoplan.planner.pricing.Pricing`. Goes out: the best priced part, and a lower bound
over every candidate of the space.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from autoplan.planner.balance import balanced_cut, fits
from autoplan.planner.chain import NEVER, Chain, quick_bound_s
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
    return any(fits(ColumnPricer(pricing.chain(candidate))) for candidate in _memory_first(pricing))


def solve(pricing: Pricing, say: Callable[[str], None]) -> Outcome:
    """The best plan over all candidates, by simulated step time, with a proved bound."""
    ranked = _ranked(pricing)
    best, rest, tried = _balanced_plans(pricing, ranked, say)
    if best is None:
        return Outcome(None, NEVER, len(ranked), 0)
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
    return Outcome(best, bound_s, len(ranked), solved, (*tried, *_next_best(pricing, ranked, tried)))


def _next_best(pricing: Pricing, ranked: Ranked, tried: Sequence[Priced]) -> Iterator[Priced]:
    """Plans on meshes that the bound ruled out unseen, the most promising first: they tell a person what the
    chosen plan is better than."""
    seen = {priced.candidate for priced in tried}
    meshes = {priced.candidate.mesh for priced in tried if priced.fits}
    unseen = (entry for entry in ranked if entry[1] not in seen and entry[1].mesh not in meshes)
    for _, candidate, chain in itertools.islice(unseen, MORE_TO_SHOW):
        cut = balanced_cut(ColumnPricer(chain)) if candidate.mesh not in meshes else None
        if cut is not None:
            meshes.add(candidate.mesh)
            yield pricing.priced(candidate, cut)


def describe(candidate: Candidate) -> str:
    """``pp2 dp4 tp8, micro-batch 1, ZeRO 0`` for people."""
    mesh = candidate.mesh
    degrees = "".join(f" {axis}{size}" for axis, size in (("cp", mesh.cp), ("ep", mesh.ep)) if size > 1)
    degrees = f"pp{mesh.pp} dp{mesh.dp}{degrees} tp{mesh.tp}"
    return f"{degrees}, micro-batch {candidate.micro_batch}, ZeRO {candidate.zero}"


Ranked = list[tuple[float, Candidate, Chain]]
BestT = TypeVar("BestT", Priced, Priced | None)


def _ranked(pricing: Pricing) -> Ranked:
    """Candidates with their chains, best lower bound first."""
    ranked: Ranked = []
    for candidate in pricing.candidates:
        chain = pricing.chain(candidate)
        ranked.append((quick_bound_s(chain), candidate, chain))
    return sorted(ranked, key=lambda entry: entry[0])


def _balanced_plans(
    pricing: Pricing, ranked: Ranked, say: Callable[[str], None]
) -> tuple[Priced | None, Ranked, list[Priced]]:
    """A good plan to start from, the candidates that could beat it, and every plan priced."""
    best: Priced | None = None
    alive: Ranked = []
    tried: list[Priced] = []
    for quick_s, candidate, chain in ranked:
        if best is not None and quick_s >= best.prediction.step_time_s:
            alive.append((quick_s, candidate, chain))  # only its bound still counts
            break
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
        key=lambda c: (-(c.mesh.pp * c.mesh.tp * (c.mesh.replicas if c.zero == 3 else 1)), c.micro_batch),
    )
