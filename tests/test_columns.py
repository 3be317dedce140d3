"""The column MIP against brute force: every cut and every recompute mix of small chains."""

from __future__ import annotations

import itertools
import random

import pytest

from autoplan.planner.chain import Chain, ChainItem, Cut, quick_bound_s
from autoplan.planner.columns import solve_chain
from autoplan_cost_models.schedule import in_flight

MB = 1e6


def make_chain(seed: int, regions: int, stages: int, microbatches: int, tight: float) -> Chain:
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
        )

    kinds = [kind("a"), kind("b")]
    middle = [kinds[0] if i < regions // 2 else kinds[1] for i in range(regions - 2)]
    items = (kind("embed"), *middle, kind("head"))
    return Chain(items, limit_bytes=tight * MB * regions / stages, microbatches=microbatches, stages=stages)


def brute_force(chain: Chain) -> tuple[float, float]:
    """Least formula objective over every cut and mix that fits, and least bound rows over those that
    fit when counted region by region, as the backward frees them."""
    n, p = len(chain.items), chain.stages
    best_formula = best_bound = float("inf")
    for inner in itertools.combinations(range(1, n), p - 1):
        bounds = list(zip((0, *inner), (*inner, n)))
        for relaxed in (False, True):
            stages = [fastest_mix(chain, s, first, end, relaxed) for s, (first, end) in enumerate(bounds)]
            if all(stages):
                pairs = [pair for pair in stages if pair]
                if relaxed:
                    best_bound = min(best_bound, max(bound_rows(pairs, chain.microbatches)))
                else:
                    totals = [f + b for f, b in pairs]
                    value = sum(totals) + (chain.microbatches - 1) * max(totals)
                    best_formula = min(best_formula, value)
    return best_formula, best_bound


def fastest_mix(chain: Chain, stage: int, first: int, end: int, relaxed: bool) -> tuple[float, float] | None:
    """(forward, backward) of the fastest recompute mix that fits one stage."""
    items = chain.items[first:end]
    flying = in_flight("1f1b", stage, chain.stages, chain.microbatches)
    states = sum(item.static_bytes for item in items)
    fits = []
    for mix in itertools.product(range(3), repeat=len(items)):
        saved = [item.saved_bytes[o] for item, o in zip(items, mix)]
        transients = [item.transient_bytes[o] for item, o in zip(items, mix)]
        peak = sum(saved) + max(transients)
        if relaxed:  # region by region, as the backward goes
            peak = max(sum(saved[: n + 1]) + transients[n] for n in range(len(items)))
        if (flying - 1) * sum(saved) + peak + states <= chain.limit_bytes:
            fits.append(sum(item.extra_s[o] for item, o in zip(items, mix)))
    if not fits:
        return None
    return sum(i.forward_s for i in items), sum(i.backward_s for i in items) + min(fits)


def bound_rows(pairs: list[tuple[float, float]], m: int) -> list[float]:
    """The rows of the lower bound on 1F1B."""
    p, t = len(pairs), [f + b for f, b in pairs]
    rows = [sum(t[: s + 1]) + (m - 1) * t[s] for s in range(p)]
    if m >= p:
        rows += [sum(t) + (m - 1) * t[s] - (p - 1 - s) * min(pairs[s]) for s in range(p)]
    return rows


@pytest.mark.parametrize(
    ("seed", "regions", "stages", "microbatches", "tight"),
    [
        (s, r, p, m, tight)
        for s, (r, p, m, tight) in enumerate([(6, 2, 4, 9), (6, 3, 3, 7), (7, 3, 8, 6), (7, 2, 2, 5.2)])
    ],
)
def test_columns_equal_brute_force(
    seed: int, regions: int, stages: int, microbatches: int, tight: float
) -> None:
    """The pruned columns once dropped the only cut that fits."""
    chain = make_chain(seed, regions, stages, microbatches, tight)
    formula, bound = brute_force(chain)
    solved = solve_chain(chain)
    if formula == float("inf"):
        assert not solved.cuts
        return
    assert solved.bound_s <= bound * (1 + 1e-9)
    assert solved.bound_s >= bound * 0.97
    assert quick_bound_s(chain) <= bound * (1 + 1e-9)
    certain = solved.cuts[1:] if len(solved.cuts) > 1 else solved.cuts
    assert min(_formula(chain, cut) for cut in certain) == pytest.approx(formula, rel=2e-4)


def _formula(chain: Chain, cut: Cut) -> float:
    """The formula objective of a proposed cut, from its boundaries and recompute alone."""
    names = ("none", "selective", "full")
    totals, first = [], 0
    for end in cut.ends:
        options = [names.index(r) for r in cut.recompute[first:end]]
        totals.append(
            sum(i.forward_s + i.backward_s + i.extra_s[o] for i, o in zip(chain.items[first:end], options))
        )
        first = end
    return sum(totals) + (chain.microbatches - 1) * max(totals)


def test_shared_parameters_count_once_on_one_stage() -> None:
    """A tied embedding and head on one stage were counted twice and nothing fitted."""
    item = ChainItem("a", 1.0, 2.0, (0.0, 0.2, 1.0), (0.0, 0.0, 0.0), (0.0, 0.0, 0.0), 10.0 * MB)
    chain = Chain((item, item), limit_bytes=12.0 * MB, microbatches=1, stages=1)
    assert not solve_chain(chain).cuts
    tied = Chain((item, item), limit_bytes=12.0 * MB, microbatches=1, stages=1, shared=((0, 1, 8.0 * MB),))
    assert solve_chain(tied).cuts
