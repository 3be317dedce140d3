"""Which schedules and how many stages a rank a mesh may have, and what to say when the pins leave none.

Comes in: a mesh with its micro-batches and ZeRO stage, and what is pinned. Goes out: (schedule, vpp) pairs.
"""

from __future__ import annotations

from collections.abc import Iterator

from autoplan.plan import Mesh
from autoplan.schedules import splits_backward

SCHEDULES = ("1f1b", "interleaved_1f1b", "zb_h1")  # searched; others run where they are pinned
VPP = (1, 2, 4, 8)
MOST_STAGES = 64  # of all ranks, where several are on one: beyond, hops outweigh what is gained
SPACE = "1F1B and zero bubble (ZB-H1); 2, 4 or 8 even stages a rank, interleaved"


def pipelines(
    mesh: Mesh, microbatches: int, zero: int, regions: int, schedule: str | None, vpp: int | None
) -> Iterator[tuple[str, int]]:
    """Every pair worth searching on the mesh; ``schedule`` and ``vpp`` are pins or None."""
    for name in (schedule,) if schedule else SCHEDULES:
        for stages in (vpp,) if vpp else VPP:
            worth = (schedule and vpp) or _is_worth_it(mesh, microbatches, name, stages, vpp is not None)
            if worth and why_not(mesh, zero, regions, name, stages) is None:
                yield name, stages


def why_not(mesh: Mesh, zero: int, regions: int, schedule: str, vpp: int) -> str | None:
    """What keeps a schedule from running, and what to type instead; None where it runs."""
    if schedule == "1f1b" and vpp > 1:
        return f"1f1b runs one stage a rank, and vpp is {vpp}. Type --pin schedule=interleaved_1f1b."
    if mesh.pp * vpp > regions:
        return f"pp x vpp is {mesh.pp * vpp}, and the model has {regions} regions. Pin a smaller vpp."
    if splits_backward(schedule) and zero >= 2 and mesh.replicas > 1:
        return (
            f"{schedule} makes weight gradients late, and ZeRO-{zero} reduces them in every micro-batch. "
            "Type --pin zero=1, or leave the schedule out."
        )
    return None


def _is_worth_it(mesh: Mesh, microbatches: int, schedule: str, vpp: int, vpp_is_pinned: bool) -> bool:
    """Not where another pair does the same, nor several stages a rank that wait for one another."""
    if schedule == "interleaved_1f1b" and vpp == 1:
        return False
    if mesh.pp == 1:
        return schedule == ("interleaved_1f1b" if vpp > 1 else "1f1b") and (vpp == 1 or vpp_is_pinned)
    fills = microbatches % mesh.pp == 0 and mesh.pp * vpp <= MOST_STAGES
    return vpp == 1 or vpp_is_pinned or fills
