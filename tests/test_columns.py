"""The stage search against brute force: every cut and every recompute mix of small chains, simulated."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from autoplan.planner.balance import could_beat, joint_of, takes_of
from autoplan.planner.chain import Chain, ChainItem, Cut, even_ends, quick_bound_s
from autoplan.planner.columns import solve_chain, whole_floor_s
from autoplan.planner.critical import solve_boundaries
from autoplan.planner.interleave import move_ends, solve_interleaved
from autoplan.planner.mixes import ColumnPricer
from autoplan.planner.solve import first_cuts
from autoplan.schedules import Moment, rank_moments
from autoplan_cost_models.schedule import rank_ends

MB = 1e6
OPTIONS = ("none", "selective", "full")


def make_chain(
    seed: int,
    regions: int,
    ranks: int,
    microbatches: int,
    tight: float,
    schedule: str = "1f1b",
    vpp: int = 1,
) -> Chain:
    """A chain of two kinds of blocks between an embedding and a head, with random prices."""
    rng = random.Random(seed)

    def kind(key: str) -> ChainItem:
        forward = rng.uniform(0.5, 2.0)
        saved = rng.uniform(2.0, 4.0) * MB
        return ChainItem(
            key=key,
            forward_s=forward,
            backward_s=2 * forward,
            extra_s=(0.0, 0.2 * forward, forward),
            saved_bytes=(saved, 0.5 * saved, 0.1 * saved),
            transient_bytes=(0.2 * MB, 0.6 * saved, saved),
            static_bytes=rng.uniform(1.0, 3.0) * MB,
            output_bytes=0.1 * MB,
            weight_s=rng.uniform(0.8, 1.1) * forward,
            deferred_bytes=0.6 * saved,
        )

    kinds = [kind("a"), kind("b")]
    middle = [kinds[0] if i < regions // 2 else kinds[1] for i in range(regions - 2)]
    items = (kind("embed"), *middle, kind("head"))
    limit_bytes = tight * MB * regions / ranks
    return Chain(items, limit_bytes, microbatches, ranks * vpp, schedule=schedule, vpp=vpp, hop_s=0.01)


Mixes = Sequence[Sequence[int]]  # of every stage, the option of every region


def peak_bytes(chain: Chain, bounds: Sequence[tuple[int, int]], mixes: Mixes, rank: int) -> float:
    """The fullest moment of a rank, counted region by region as forwards and backwards go."""
    stages = range(rank, chain.stages, chain.ranks)
    states = sum(chain.items[i].static_bytes for s in stages for i in range(*bounds[s]))

    def held(moment: Moment) -> float:
        total = states
        for c, s in enumerate(stages):
            items = chain.items[slice(*bounds[s])]
            saved = [item.saved_bytes[o] for item, o in zip(items, mixes[s])]
            transient = [item.transient_bytes[o] for item, o in zip(items, mixes[s])]
            kept = [item.deferred_bytes for item in items]
            total += moment.alive[c] * sum(saved) + moment.deferred[c] * sum(kept)
            total += moment.waits_to_send(c) * (items[-1].output_bytes if s < chain.stages - 1 else 0.0)
            total += moment.waits_to_receive(c) * (chain.items[bounds[s][0] - 1].output_bytes if s else 0.0)
            if c == moment.chunk and moment.kind != "backward_weight":
                split = moment.kind == "backward_input"
                total += max(
                    transient[r] - sum(saved[r + 1 :]) + (sum(kept[r:]) if split else 0.0)
                    for r in range(len(items))
                )
        return total

    moments = rank_moments(chain.schedule, rank, chain.ranks, chain.vpp, chain.microbatches)
    return max(held(moment) for moment in moments)


def simulated_s(chain: Chain, bounds: Sequence[tuple[int, int]], mixes: Mixes) -> float:
    """The step of one cut, hops included."""
    seconds = [
        (
            sum(item.forward_s for item in chain.items[slice(*b)]),
            sum(i.backward_s + i.extra_s[o] for i, o in zip(chain.items[slice(*b)], mix)),
            sum(item.weight_s for item in chain.items[slice(*b)]),
        )
        for b, mix in zip(bounds, mixes)
    ]
    forward, backward, weight = zip(*seconds)
    hops = [chain.hop_s] * (chain.stages - 1)
    ends = rank_ends(
        chain.schedule, forward, backward, chain.microbatches, hops, vpp=chain.vpp, weight_s=weight
    )
    return max(ends)


def cuts_of(chain: Chain) -> Iterator[list[tuple[int, int]]]:
    """Every way to cut the chain."""
    n = len(chain.items)
    for inner in itertools.combinations(range(1, n), chain.stages - 1):
        yield list(itertools.pairwise((0, *inner, n)))


def mixes_of(bounds: Sequence[tuple[int, int]]) -> Iterator[Mixes]:
    """Every recompute of every region."""
    for flat in itertools.product(range(3), repeat=bounds[-1][1]):
        yield [flat[a:b] for a, b in bounds]


def fitting(chain: Chain, bounds: Sequence[tuple[int, int]]) -> Iterator[Mixes]:
    """The mixes of a cut that fit; ranks are looked at one by one."""
    per_rank: list[list[dict[int, tuple[int, ...]]]] = []
    for rank in range(chain.ranks):
        stages = list(range(rank, chain.stages, chain.ranks))
        lengths = [bounds[s][1] - bounds[s][0] for s in stages]
        found: list[dict[int, tuple[int, ...]]] = []
        for flat in itertools.product(range(3), repeat=sum(lengths)):
            ends = [0, *itertools.accumulate(lengths)]
            own = {s: flat[a:b] for s, (a, b) in zip(stages, itertools.pairwise(ends))}
            mixes = [own.get(s, (0,) * (b - a)) for s, (a, b) in enumerate(bounds)]
            if peak_bytes(chain, bounds, mixes, rank) <= chain.limit_bytes:
                found.append(own)
        per_rank.append(_undominated(chain, bounds, found))
    for choice in itertools.product(*per_rank):
        together = {s: mix for own in choice for s, mix in own.items()}
        yield [together[s] for s in range(chain.stages)]


def _undominated(
    chain: Chain, bounds: Sequence[tuple[int, int]], found: list[dict[int, tuple[int, ...]]]
) -> list[dict[int, tuple[int, ...]]]:
    """Of a rank's mixes those in which no other takes less time on every stage."""
    best: dict[tuple[float, ...], dict[int, tuple[int, ...]]] = {}
    for own in found:
        times = tuple(
            round(sum(i.extra_s[o] for i, o in zip(chain.items[slice(*bounds[s])], mix)), 9)
            for s, mix in own.items()
        )
        best.setdefault(times, own)
    kept = [t for t in best if not any(o != t and all(a <= b for a, b in zip(o, t)) for o in best)]
    return [best[times] for times in kept]


def as_mixes(chain: Chain, cut: Cut) -> tuple[list[tuple[int, int]], Mixes]:
    bounds = list(itertools.pairwise((0, *cut.ends)))
    options = [OPTIONS.index(word) for word in cut.recompute]
    return bounds, [options[a:b] for a, b in bounds]


SMALL = [(6, 2, 4, 9.0), (6, 3, 3, 7.0), (6, 3, 8, 6.0), (6, 2, 2, 5.2), (6, 2, 1, 4.0)]


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("seed", range(len(SMALL)))
def test_columns_against_every_cut(seed: int, schedule: str) -> None:
    """The pruned columns once dropped the only cut that fits; a bound above the best plan is a lie."""
    chain = make_chain(seed, *SMALL[seed], schedule)
    plans = [simulated_s(chain, b, mixes) for b in cuts_of(chain) for mixes in fitting(chain, b)]
    solved = solve_chain(chain)
    if not plans:
        assert not any(_fits(chain, cut) for cut in solved.cuts)
        return
    best = min(plans)
    assert solved.bound_s <= best * (1 + 1e-9) and quick_bound_s(chain) <= best * (1 + 1e-9)
    assert could_beat(chain, best * (1 + 1e-9)) and not could_beat(chain, 0.8 * best)
    assert solve_chain(chain, incumbent_s=best * (1 + 1e-9)).bound_s <= best * (1 + 2e-9)
    assert solved.bound_s >= 0.9 * best
    found = [simulated_s(chain, *as_mixes(chain, cut)) for cut in solved.cuts if _fits(chain, cut)]
    assert found and min(found) <= 1.05 * best
    assert any(_fits(chain, cut) for cut in first_cuts(chain)[0])


def _fits(chain: Chain, cut: Cut) -> bool:
    bounds, mixes = as_mixes(chain, cut)
    limit_bytes = chain.limit_bytes * (1 + 1e-9)
    return all(peak_bytes(chain, bounds, mixes, rank) <= limit_bytes for rank in range(chain.ranks))


@pytest.mark.parametrize("seed", range(len(SMALL)))
def test_the_solver_finds_the_best_of_all_columns(seed: int) -> None:
    """Least sum_s t_s + (m-1) max_s t_s over every cut, each stage under the mix of its column."""
    chain = make_chain(seed, *SMALL[seed])
    pricer = ColumnPricer(chain)
    best = float("inf")
    for bounds in cuts_of(chain):
        columns = [
            pricer.column(s, joint_of(pricer.runs, a), joint_of(pricer.runs, b), takes_of(pricer.runs, a, b))
            for s, (a, b) in enumerate(bounds)
        ]
        times = [column.total_s for column in columns if column is not None]
        if len(times) == chain.stages:
            best = min(best, sum(times) + (chain.microbatches - 1) * max(times))
    cuts = solve_chain(chain).cuts
    found = [_formula_s(chain, cut) for cut in cuts[1:] or cuts]  # the first may need too much memory
    assert min(found, default=float("inf")) == pytest.approx(best, rel=2e-4)


def _formula_s(chain: Chain, cut: Cut) -> float:
    bounds, mixes = as_mixes(chain, cut)
    times = [
        sum(i.forward_s + i.backward_s + i.extra_s[o] for i, o in zip(chain.items[slice(*b)], mix))
        for b, mix in zip(bounds, mixes)
    ]
    return sum(times) + (chain.microbatches - 1) * max(times)


INTERLEAVED = [(8, 2, 4, 9.0), (8, 2, 2, 7.0), (8, 2, 4, 5.5), (8, 2, 4, 4.0), (8, 2, 6, 3.2)]


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zb_h1"])
@pytest.mark.parametrize("seed", range(len(INTERLEAVED)))
def test_interleaved_against_every_recompute(seed: int, schedule: str) -> None:
    """A rank's stages share its memory; the bound holds for every choice under its boundaries."""
    chain = make_chain(seed, *INTERLEAVED[seed], schedule, vpp=2)
    ends = move_ends(chain, even_ends(chain), [0] * len(chain.items))
    bounds = list(itertools.pairwise((0, *ends)))
    plans = [simulated_s(chain, bounds, mixes) for mixes in fitting(chain, bounds)]
    solved = solve_interleaved(chain)
    if not plans:
        assert not any(_fits(chain, cut) for cut in solved.cuts)
        return
    best = min(plans)
    assert solved.bound_s <= best * (1 + 1e-9)
    assert solved.bound_s >= 0.85 * best
    closer = solve_boundaries(chain)
    assert 0.89 * best <= closer.bound_s <= best * (1 + 1e-9)
    cuts = [cut for cut in (*solved.cuts, *closer.cuts) if _fits(chain, cut)]
    found = [simulated_s(chain, *as_mixes(chain, cut)) for cut in cuts]
    assert found and min(found) <= 1.02 * best


@pytest.mark.parametrize("seed", range(4))
def test_a_single_stage_never_beats_its_floor(seed: int) -> None:
    """Meshes without a pipeline are dropped by it, before anything is looked at region by region."""
    chain = make_chain(seed, 6, 1, 3, 4.0)
    bounds = [(0, 6)]
    plans = [simulated_s(chain, bounds, mixes) for mixes in fitting(chain, bounds)]
    assert whole_floor_s(chain) <= min(plans, default=float("inf")) * (1 + 1e-9)
    assert not plans or whole_floor_s(chain) >= 0.8 * min(plans)


@pytest.mark.parametrize(
    ("schedule", "vpp"), [("1f1b", 1), ("zb_h1", 1), ("interleaved_1f1b", 2), ("zb_h1", 3)]
)
def test_quick_bound_holds_for_any_cut(schedule: str, vpp: int) -> None:
    """It decides which meshes are never looked at."""
    rng = random.Random(vpp)
    for seed in range(40):
        ranks, m = rng.choice([2, 3, 4]), rng.choice([1, 2, 4, 8])
        chain = make_chain(seed, ranks * vpp + rng.randrange(6), ranks, m, 1e9, schedule, vpp)
        inner = sorted(rng.sample(range(1, len(chain.items)), chain.stages - 1))
        bounds = list(itertools.pairwise((0, *inner, len(chain.items))))
        mixes = [[0] * (b - a) for a, b in bounds]
        made = simulated_s(chain, bounds, mixes)
        assert quick_bound_s(chain) <= made * (1 + 1e-9)


def test_only_a_cut_counted_region_by_region_fits() -> None:
    """Transients of an early region and saved tensors of later ones never meet: nothing was said to fit."""
    item = ChainItem("a", 1.0, 2.0, (0.0, 9.0, 9.0), (4.0, 4.0, 4.0), (0.0, 0.0, 0.0), 0.0)
    early = replace(item, key="early", transient_bytes=(6.0, 6.0, 6.0))
    chain = Chain((early, item, item), limit_bytes=12.0, microbatches=1, stages=1)
    assert [cut.ends for cut in first_cuts(chain)[0]] == [(3,)]
    assert first_cuts(replace(chain, limit_bytes=11.0))[0] == ()


def test_shared_parameters_count_once_on_one_stage() -> None:
    """A tied embedding and head on one stage were counted twice and nothing fitted."""
    item = ChainItem("a", 1.0, 2.0, (0.0, 0.2, 1.0), (0.0, 0.0, 0.0), (0.0, 0.0, 0.0), 10.0 * MB)
    chain = Chain((item, item), limit_bytes=12.0 * MB, microbatches=1, stages=1)
    assert not solve_chain(chain).cuts
    tied = Chain((item, item), limit_bytes=12.0 * MB, microbatches=1, stages=1, shared=((0, 1, 8.0 * MB),))
    assert solve_chain(tied).cuts
