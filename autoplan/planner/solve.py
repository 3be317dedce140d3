"""Best-first over candidates: bound each from below, solve the most promising, stop when the bound passes.

Comes in: a :class:`~autoplan.planner.pricing.Pricing`. Goes out: the best priced part, and a lower bound
over every candidate of the space.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from autoplan.plan import zero_text
from autoplan.planner.balance import could_beat, fits
from autoplan.planner.chain import NEVER, Chain, Cut, quick_bound_s, without_once
from autoplan.planner.columns import solve_chain, whole_floor_s
from autoplan.planner.critical import solve_boundaries
from autoplan.planner.first_blocks import certain_pricer, first_balanced, interleaved_first, variants
from autoplan.planner.interleave import solve_interleaved
from autoplan.planner.pricing import Priced, Pricing
from autoplan.planner.space import Candidate

# A candidate whose lower bound is within this share of the best plan is not worth a solver's time; the
# certificate's bound accounts for it.
TOLERANCE = 0.002
MOST_IN_BAND = 64  # candidates beyond the proof that a list of near plans looks at
MORE_TO_SHOW = 8  # candidates looked at beyond the proof, to name runners-up


@dataclass(frozen=True)
class Outcome:
    """``best`` is None when nothing fits; ``bound_s`` holds for every candidate considered.

    ``tried`` are the plans that were priced on the way, those that do not fit too. Not ``finished``: time
    ran out.
    """

    best: Priced | None
    bound_s: float
    considered: int
    solved: int
    tried: tuple[Priced, ...] = ()
    finished: bool = True


def fits_anywhere(pricing: Pricing) -> bool:
    """Whether any candidate has a cut that fits."""
    possible = (candidate for candidate in memory_first(pricing) if pricing.could_fit(candidate))
    return any(_fits(pricing, candidate) for candidate in possible)


def _fits(pricing: Pricing, candidate: Candidate) -> bool:
    """Whether a cut fits for certain, or one that may fit does when it is counted region by region."""
    chain = pricing.chain(candidate)
    if chain.vpp == 1 and any(fits(certain_pricer(option)) for option in reversed(variants(chain))):
        return True
    return any(pricing.priced(candidate, cut).fits for cut in first_cuts(chain)[0])


def first_cuts(chain: Chain, incumbent_s: float = NEVER) -> tuple[tuple[Cut, ...], float]:
    """Good cuts found without a solver (they fit, or may where only the count region by region tells), and a
    bound on the chain: ``inf`` where nothing fits. None where the bound passes the incumbent."""
    if chain.vpp > 1:
        solver = interleaved_first if chain.first else solve_interleaved
        solved = solver(chain, incumbent_s=incumbent_s)
        return solved.cuts, solved.bound_s
    if incumbent_s < NEVER:
        floor_s = whole_floor_s(chain) if chain.stages == 1 else 0.0
        if floor_s >= incumbent_s or (chain.stages > 1 and not could_beat(chain, incumbent_s)):
            return (), max(floor_s, incumbent_s)
    cut = first_balanced(chain)
    return ((), NEVER) if cut is None else ((cut,), 0.0)


def solve(
    pricing: Pricing, say: Callable[[str], None], *, band: float = 0.0, until_s: float = NEVER
) -> Outcome:
    """The best plan over all candidates, by simulated step time, with a proved bound; or the best that was
    found ``until_s`` (of ``time.perf_counter``).

    With a ``band`` plans that may be slower by that share at most are looked for on every candidate, too.
    """
    ranked, count = _best_first(pricing), len(pricing.candidates)
    best, rest, tried = _first_plans(pricing, ranked, say, until_s)
    bounds: list[float] = []
    solved, finished = 0, True
    for bound_s, candidate, chain in rest:
        incumbent_s = best.prediction.step_time_s if best is not None else NEVER
        proved = bound_s >= incumbent_s * (1 - TOLERANCE)
        finished = proved or best is None or time.perf_counter() < until_s
        if proved or not finished:
            bounds.append(bound_s)
            break
        say(f"solving {describe(candidate)}; best so far {incumbent_s:.3g} s a step")
        solver = solve_boundaries if chain.vpp > 1 else solve_chain
        solution = solver(chain, incumbent_s=incumbent_s)
        solved += 1
        found = [pricing.priced(candidate, cut) for cut in solution.cuts]
        tried += found
        for priced in found:
            best = _better(best, priced)
        bounds.append(max(bound_s, solution.bound_s))
    if best is None:
        return Outcome(None, NEVER, count, solved)
    least_s = min([*bounds, best.prediction.step_time_s])
    others = itertools.chain(rest, ranked)
    if not finished:
        unseen: Iterator[Priced] = iter(())
    elif band:
        limit_s = best.prediction.step_time_s * (1 + band)
        unseen = _within(pricing, others, {priced.candidate for priced in tried}, limit_s)
    else:
        unseen = _next_best(pricing, others, tried)
    return Outcome(best, least_s, count, solved, (*tried, *unseen), finished)


def _next_best(pricing: Pricing, ranked: Iterator[Entry], tried: Sequence[Priced]) -> Iterator[Priced]:
    """Plans on meshes that the bound ruled out unseen, the most promising first: they tell a person what the
    chosen plan is better than."""
    seen = {priced.candidate for priced in tried}
    meshes = {priced.candidate.mesh for priced in tried if priced.fits}
    unseen = (entry for entry in ranked if entry[1] not in seen and entry[1].mesh not in meshes)
    for _, candidate, chain in itertools.islice(unseen, MORE_TO_SHOW):
        if candidate.mesh in meshes or chain.vpp > 1 or not pricing.could_fit(candidate):
            continue
        cut = first_balanced(chain)
        if cut is not None:
            meshes.add(candidate.mesh)
            yield pricing.priced(candidate, cut)


def first_best(pricing: Pricing) -> Priced | None:
    """The fastest plan with balanced stages, without a solver or a proof; None where nothing fits."""
    return _first_plans(pricing, _best_first(pricing), lambda _: None, NEVER)[0]


def _within(
    pricing: Pricing, ranked: Iterator[Entry], seen: set[Candidate], limit_s: float
) -> Iterator[Priced]:
    """Plans of candidates whose bound is within the limit, the most promising first."""
    inside = itertools.takewhile(lambda entry: entry[0] <= limit_s, ranked)
    unseen = (entry for entry in inside if entry[1] not in seen and pricing.could_fit(entry[1]))
    for _, candidate, chain in itertools.islice(unseen, MOST_IN_BAND):
        cuts, _ = first_cuts(chain, limit_s)
        yield from (pricing.priced(candidate, cut) for cut in cuts)


def describe(candidate: Candidate) -> str:
    """``pp2 dp4 tp8, micro-batch 1, ZeRO 0`` for people; the schedule where it is not 1F1B."""
    mesh = candidate.mesh
    degrees = "".join(f" {axis}{size}" for axis, size in (("cp", mesh.cp), ("ep", mesh.ep)) if size > 1)
    words = f"pp{mesh.pp} dp{mesh.dp}{degrees} tp{mesh.tp}, micro-batch {candidate.micro_batch}"
    words += f", {zero_text(candidate.zero, candidate.zero_shard)}"
    words += f", {candidate.schedule}" if candidate.schedule != "1f1b" else ""
    return words + (f" vpp{candidate.vpp}" if candidate.vpp > 1 else "")


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


def _first_plans(
    pricing: Pricing, ranked: Iterator[Entry], say: Callable[[str], None], until_s: float
) -> tuple[Priced | None, Ranked, list[Priced]]:
    """A good plan to start from, the candidates that could beat it, and every plan priced."""
    best: Priced | None = None
    alive: Ranked = []
    tried: list[Priced] = []
    for quick_s, candidate, chain in ranked:
        late = time.perf_counter() >= until_s
        if best is not None and (late or quick_s >= best.prediction.step_time_s):
            alive.append((quick_s, candidate, chain))  # only its bound still counts
            break
        if not pricing.could_fit(candidate):
            continue
        say(f"balancing {describe(candidate)}")
        cuts, bound_s = first_cuts(chain, best.prediction.step_time_s if best is not None else NEVER)
        if bound_s == NEVER:
            continue
        found = [pricing.priced(candidate, cut) for cut in cuts]
        tried += found
        for priced in found:
            best = _better(best, priced)
        alive.append((max(quick_s, bound_s), candidate, chain))
    return best, sorted(alive, key=lambda entry: entry[0]), tried


def _better(best: BestT, other: Priced) -> BestT | Priced:
    """The faster of two plans that fit; of equals the first."""
    if not other.fits:
        return best
    if best is None or other.prediction.step_time_s < best.prediction.step_time_s * (1 - 1e-9):
        return other
    return best


def memory_first(pricing: Pricing) -> list[Candidate]:
    """Candidates that spread the model widest first: full sharding, then deep, narrow micro-batches; of those
    that differ in their schedule alone the first, 1F1B unless pinned."""
    plain: dict[Candidate, Candidate] = {}
    for candidate in pricing.candidates:
        plain.setdefault(replace(candidate, schedule="1f1b", vpp=1), candidate)
    return sorted(
        plain.values(),
        key=lambda c: (-(c.mesh.pp * c.mesh.tp * (c.groups.shards if c.zero == 3 else 1)), c.micro_batch),
    )
