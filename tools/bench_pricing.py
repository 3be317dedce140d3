"""Times pricing a sweep of whole plans by the closed form, and compares a sample with the event simulation.

Every mesh, micro-batch and ZeRO stage, with blocks moved between the first and the last stage and every
number of recomputed blocks a stage. Memory is not part of it. Speeds are of the machine it runs on, one core.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tabulate import tabulate

from autoplan.capture import capture_model
from autoplan.hardware import load_profile
from autoplan.plan import Workload
from autoplan.planner.chain import Chain, Cut
from autoplan.planner.model_costs import ModelCosts
from autoplan.planner.pricing import Pricing
from autoplan.planner.space import Candidate, Pins, candidates
from autoplan_cost_models import CostModel
from autoplan_cost_models.closed_form import steps_s
from autoplan_cost_models.collectives import Span

RECOMPUTE = ("none", "selective", "full")
LEAST_PLANS = 100_000
SAMPLE = 24
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Sweep:
    """Plans of one candidate: blocks of every stage [plans, stages], how many of them recompute, and how."""

    candidate: Candidate
    chain: Chain
    hop_s: float
    blocks: NDArray[np.int64]
    again: NDArray[np.int64]
    kind: NDArray[np.int64]


def sweep_of(candidate: Candidate, pricing: Pricing) -> Sweep:
    """Even stages with up to two blocks moved from the last to the first, under every recompute."""
    chain, span = pricing.chain(candidate), Span(2, candidate.mesh.stage_devices)
    sent = chain.items[1].output_bytes if candidate.mesh.pp > 1 else 0.0
    hop_s = pricing.costs.cost_model.collective_s("p2p", sent, span)
    stages, layers = candidate.mesh.pp, len(chain.items) - 2
    even = np.array([layers // stages + (s < layers % stages) for s in range(stages)])
    rows: list[tuple[NDArray[np.int64], NDArray[np.int64], int]] = []
    for moved in range(-2, 3) if stages > 1 else (0,):
        blocks = even.copy()
        blocks[0] += moved
        blocks[-1] -= moved
        if blocks.min() < 1:
            continue
        for kind, most in itertools.product((1, 2), range(layers // stages + 1)):
            rows.append((blocks, np.minimum(blocks, most), kind))
    blocks, again, kinds = zip(*rows)
    return Sweep(candidate, chain, hop_s, np.array(blocks), np.array(again), np.array(kinds))


def priced(sweep: Sweep) -> Floats:
    """Seconds a step of every plan of the sweep, by the closed form."""
    first, block, last = sweep.chain.items[0], sweep.chain.items[1], sweep.chain.items[-1]
    extra = np.array([e if e < np.inf else 0.0 for e in block.extra_s])[sweep.kind]
    blocks = sweep.blocks.astype(np.float64)
    forward: Floats = blocks * block.forward_s
    backward: Floats = blocks * block.backward_s + sweep.again * extra[:, None]
    # What shows of reducing and gathering, roughly: the share of a stage's first region.
    shown = np.full(sweep.blocks.shape, block.once.reduce_alone_s + block.once.gather_alone_s)
    shown[:, 0] = first.once.reduce_alone_s + first.once.gather_alone_s
    update = sweep.blocks * block.once.update_s
    for stage, item in ((0, first), (-1, last)):
        forward[:, stage] += item.forward_s
        backward[:, stage] += item.backward_s + item.extra_s[0]
        update[:, stage] += item.once.update_s
    once = shown.max(axis=1) + update.max(axis=1)
    m = sweep.candidate.microbatches
    return steps_s(sweep.candidate.schedule, forward, backward, m, hop_s=sweep.hop_s, once_s=once)


def simulated_s(pricing: Pricing, sweep: Sweep, plan: int) -> float:
    """The same plan as the search prices it: every stage from scratch, the schedule by events."""
    ends = 1 + np.cumsum(sweep.blocks[plan])
    ends[-1] += 1
    recompute = ["none"]
    for blocks, again in zip(sweep.blocks[plan], sweep.again[plan]):
        recompute += [RECOMPUTE[sweep.kind[plan]]] * again + ["none"] * (blocks - again)
    cut = Cut(tuple(int(end) for end in ends), (*recompute, "none"))
    return pricing.priced(sweep.candidate, cut).prediction.step_time_s


def sample_rows(pricing: Pricing, sweeps: list[Sweep]) -> Iterator[list[object]]:
    chance = random.Random(0)
    for sweep in chance.sample(sweeps, min(SAMPLE, len(sweeps))):
        plan = chance.randrange(len(sweep.blocks))
        closed, events = float(priced(sweep)[plan]), simulated_s(pricing, sweep, plan)
        mesh, size = sweep.candidate.mesh, sweep.candidate.micro_batch
        yield [str(mesh), size, sweep.candidate.zero, closed, events, closed / events - 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="examples/llama3_8b.py")
    parser.add_argument("--hw", default="kunlun")
    parser.add_argument("--devices", type=int, default=64)
    parser.add_argument("--global-batch", type=int, default=512)
    args = parser.parse_args()
    profile = load_profile(args.hw)
    capture = capture_model(args.model, dtype="bf16")
    costs = ModelCosts(capture, CostModel(profile, capture.dtype), lambda _: None)
    most = min(args.devices, profile.devices_per_node)
    found = candidates(
        args.devices, args.global_batch, costs.tp_degrees(most), len(costs.regions) - 2, Pins()
    )
    found = [one for one in found if not one.sp]
    workload = Workload(args.devices, args.global_batch, tokens_per_sample=capture.tokens_per_sample)
    pricing = Pricing(costs, profile, workload, Pins(), found)
    sweeps = [sweep_of(one, pricing) for one in found]
    for sweep in sweeps:
        priced(sweep)  # the rows of each schedule are made once
    plans, began_s = 0, time.perf_counter()
    while plans < LEAST_PLANS:
        for sweep in sweeps:
            plans += len(priced(sweep))
    spent_s = time.perf_counter() - began_s
    print(f"{plans:,} plans of {len(sweeps)} meshes in {spent_s:.2f} s: {plans / spent_s:,.0f} plans/s")
    rows = list(sample_rows(pricing, sweeps))
    headers = ["mesh", "micro-batch", "ZeRO", "closed form s", "events s", "difference"]
    print(tabulate(rows, headers=headers, floatfmt=("", "", "", ".4g", ".4g", "+.2%")))
    print(f"largest difference {max(abs(float(str(row[-1]))) for row in rows):.2%}")


if __name__ == "__main__":
    main()
