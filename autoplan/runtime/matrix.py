"""A model source in, one check per forced layout and recompute kind out: the proof by cases."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from autoplan.plan import Plan
from autoplan.runtime.check import Checker, CheckResult, with_recompute

LAYOUTS: Mapping[str, Mapping[str, int]] = {
    "dp2": {"dp": 2},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "tp2xpp2": {"tp": 2, "pp": 2},
    "dp2xtp2": {"dp": 2, "tp": 2},
}
RECOMPUTE = ("none", "full")
GLOBAL_BATCH = 8

PlanMaker = Callable[[Mapping[str, int]], Plan]


def check_matrix(
    source: str | Path,
    make_plan: PlanMaker,
    *,
    dtype: str = "fp64",
    devices: int = 8,
    timeout_s: float = 120.0,
) -> Iterator[CheckResult]:
    """Check every layout of ``LAYOUTS`` with every kind of ``RECOMPUTE``, as each is done.

    Layouts of more than ``devices`` ranks are left out. ``make_plan`` maps degrees (axes not named are 1) to
    a plan of that mesh; all its plans have one global batch.
    """
    checker: Checker | None = None
    for layout, degrees in LAYOUTS.items():
        if math.prod(degrees.values()) > devices:
            continue
        plan = make_plan(degrees)
        checker = checker or Checker(source, plan, dtype=dtype, timeout_s=timeout_s)
        for kind in RECOMPUTE:
            yield checker.check(with_recompute(plan, kind), layout, kind)


def searched_plans(
    source: str | Path, *, dtype: str, hw: str | None, sizes: Mapping[str, int], opaque: tuple[str, ...] = ()
) -> PlanMaker:
    """Plans by the search with the mesh pinned, for a global batch of ``GLOBAL_BATCH`` samples."""
    from autoplan.planner.driver import search_plan

    def make(degrees: Mapping[str, int]) -> Plan:
        mesh = {axis: degrees.get(axis, 1) for axis in ("pp", "dp", "tp")}
        devices = mesh["pp"] * mesh["dp"] * mesh["tp"]
        pins = (*(f"{axis}={size}" for axis, size in mesh.items()), "recompute=none", "zero=0")
        plan = search_plan(
            source,
            hw=hw,
            devices=devices,
            pins=pins,
            global_batch=GLOBAL_BATCH,
            dtype=dtype,
            sizes=sizes,
            opaque=opaque,
        )
        return replace(plan, assumptions=())

    return make
