"""A region's work between two that were measured: cut over e ranks its experts cost a + b / e, so that two
degrees give all others.

Comes in: the :class:`RegionWork` of one layout at two expert-parallel degrees. Goes out: that of another.
Rows and their bytes stay, weights and the number of groups shrink, and each group gets more rows.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np

from autoplan_cost_models.kernel_table import AMOUNTS, KernelTable
from autoplan_cost_models.region_work import RegionWork


def work_between(first: RegionWork, second: RegionWork, degrees: tuple[int, int], wanted: int) -> RegionWork:
    """The work at degree ``wanted``, from those at two degrees."""
    share = (1 / wanted - 1 / degrees[0]) / (1 / degrees[1] - 1 / degrees[0])
    plain = replace(second, operations=first.operations)  # only their kinds are asked for
    mixed = _mix(first, plain, share)
    tables = {
        name: _regrouped(getattr(first, name), getattr(second, name), getattr(mixed, name))
        for name in ("table", "next_table")
        if getattr(first, name) is not None
    }
    return replace(mixed, **tables)


def _mix(first: Any, second: Any, share: float) -> Any:
    """``first + share (second - first)`` of every number; what is no number is that of ``first``."""
    if first is second or isinstance(first, (str, bool)):
        return first
    if isinstance(first, float):
        return first + share * (second - first)
    if isinstance(first, int):
        return round(first + share * (second - first))
    if isinstance(first, np.ndarray):
        return first + share * (second - first) if first.dtype.kind == "f" else first
    if is_dataclass(first):
        names = [field.name for field in fields(first)]
        mixed = {name: _mix(getattr(first, name), getattr(second, name), share) for name in names}
        return replace(first, **mixed)  # pyright: ignore[reportArgumentType] - its own fields
    if isinstance(first, tuple):
        return tuple(_mix(a, b, share) for a, b in zip(first, second, strict=True))
    return first


def _regrouped(first: KernelTable, second: KernelTable, mixed: KernelTable) -> KernelTable:
    """Where there are fewer groups, each has more rows: the extent that changed, times the groups, stays."""
    count = AMOUNTS.index("count")
    amounts = mixed.amounts.copy()
    fewer = first.amounts[count] != second.amounts[count]
    for extent in map(AMOUNTS.index, ("m", "n", "k")):
        rows = fewer & (first.amounts[extent] != second.amounts[extent])
        total = first.amounts[extent] * first.amounts[count]
        amounts[extent, rows] = (total / np.maximum(amounts[count], 1e-9))[rows]
    return replace(mixed, amounts=amounts)
