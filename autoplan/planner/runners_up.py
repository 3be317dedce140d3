"""The plans that lost: everything the search priced comes in, the best few on other meshes go out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from autoplan.plan import RunnerUp
from autoplan.planner.pricing import Priced

MOST = 5


def runners_up(tried: Iterable[Priced], best: Priced) -> tuple[RunnerUp, ...]:
    """The fastest that fits of each mesh, ZeRO stage and schedule but the chosen one's, fastest first."""
    fastest: dict[object, Priced] = {}
    for priced in sorted(tried, key=lambda priced: priced.prediction.step_time_s):
        if priced.fits and _kind(priced) != _kind(best):
            fastest.setdefault(_kind(priced), priced)
    return tuple(_record(priced) for priced in list(fastest.values())[:MOST])


def _kind(priced: Priced) -> object:
    part = priced.part
    return part.mesh, part.zero, part.zero_shard, part.schedule, part.vpp


def _record(priced: Priced) -> RunnerUp:
    part, told = priced.part, priced.prediction
    return RunnerUp(
        mesh=part.mesh,
        micro_batch=part.micro_batch,
        microbatches=part.microbatches,
        schedule=part.schedule,
        zero=part.zero,
        vpp=part.vpp,
        zero_shard=part.zero_shard,
        recompute=dict(Counter(region.recompute for stage in part.stages for region in stage.regions)),
        step_time_s=told.step_time_s,
        mfu=told.mfu,
        memory_peak_bytes=max(stage.memory_peak_bytes for stage in priced.stages),
        breakdown_s=dict(told.breakdown_s),
    )
