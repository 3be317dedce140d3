"""autoplan: plan, prove, draw and run the parallel training of a PyTorch model.

The names below are imported when first used, so that ``import autoplan`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autoplan.hardware import HardwareProfile, load_profile
    from autoplan.plan import Plan
    from autoplan.planner.driver import search, search_plan
    from autoplan.runtime import ParallelModel, parallelize

__all__ = [
    "HardwareProfile",
    "ParallelModel",
    "Plan",
    "load_profile",
    "parallelize",
    "search",
    "search_plan",
]

_HOMES = {
    "HardwareProfile": "autoplan.hardware",
    "ParallelModel": "autoplan.runtime",
    "Plan": "autoplan.plan",
    "load_profile": "autoplan.hardware",
    "parallelize": "autoplan.runtime",
    "search": "autoplan.planner.driver",
    "search_plan": "autoplan.planner.driver",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'autoplan' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
