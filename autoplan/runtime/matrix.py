"""A model source in, one check for every legal layout of 2, 4 and 8 ranks out: the proof by cases.

``ROWS`` is the table. A row is degrees by axis and further pins; what the model does not allow (heads that do
not divide, more stages than regions) is left out with the planner's reason.
"""

from __future__ import annotations

import fnmatch
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from autoplan.capture.source import ModelSource
from autoplan.errors import BadInputError, InfeasibleError
from autoplan.plan import Plan
from autoplan.runtime.check import Checker, CheckResult, with_recompute

RANKS = (2, 4, 8)
# The axes whose degrees multiply to the ranks, in the order of a row's name.
AXES = ("tp", "cp", "dp", "pp")
PRODUCT_AXES = ("tp", "dp", "pp")
RECOMPUTE = ("none", "full")
DEFAULTS = ("ep=1", "sp=0", "zero=0", "recompute=none")
GLOBAL_BATCH = 8


@dataclass(frozen=True)
class Row:
    """One layout: degrees above 1 by axis, and what else is pinned (``zero=3``)."""

    degrees: Mapping[str, int]
    pins: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """``tp2xpp2 zero=3``"""
        axes = [*(axis for axis in AXES if axis in self.degrees), *(set(self.degrees) - set(AXES))]
        return " ".join(["x".join(f"{axis}{self.degrees[axis]}" for axis in axes), *self.pins])

    @property
    def ranks(self) -> int:
        return math.prod(self.degrees.get(axis, 1) for axis in AXES)

    @property
    def all_pins(self) -> tuple[str, ...]:
        """Everything fixed for the search: every axis, and what the row does not say at its plainest."""
        degrees = {**dict.fromkeys(AXES, 1), **self.degrees}
        fixed = {pin.partition("=")[0] for pin in self.pins}
        free = [pin for pin in DEFAULTS if pin.partition("=")[0] not in fixed]
        return (*(f"{axis}={size}" for axis, size in degrees.items()), *free, *self.pins)


def products(ranks: int, axes: Sequence[str] = PRODUCT_AXES) -> Iterator[dict[str, int]]:
    """Every way to write ``ranks`` as a product of degrees: ``4 -> {tp 4}, {tp 2, dp 2}, ...``"""
    if not axes:
        if ranks == 1:
            yield {}
        return
    for size in sorted((n for n in range(1, ranks + 1) if ranks % n == 0), reverse=True):
        for rest in products(ranks // size, axes[1:]):
            yield {**({axes[0]: size} if size > 1 else {}), **rest}


# What the degrees do not say: one line a layout.
VARIANTS: tuple[Row, ...] = (
    *(Row({"tp": 2, "dp": 2}, (f"zero={stage}",)) for stage in (1, 2)),
    Row({"dp": 2}, ("zero=3",)),
    Row({"dp": 4}, ("zero=3",)),
    Row({"tp": 2, "dp": 2}, ("zero=3",)),
    Row({"dp": 2, "pp": 2}, ("zero=3",)),
    Row({"tp": 2, "dp": 2, "pp": 2}, ("zero=3",)),
    Row({"tp": 2}, ("sp=1",)),
    Row({"tp": 4}, ("sp=1",)),
    Row({"tp": 2, "dp": 2}, ("sp=1",)),
    Row({"tp": 2, "pp": 2}, ("sp=1",)),
    Row({"tp": 2, "dp": 2, "pp": 2}, ("sp=1", "zero=1")),
    Row({"dp": 2}, ("ep=2",)),
    Row({"dp": 4}, ("ep=2",)),
    Row({"dp": 4}, ("ep=2", "zero=3")),
    Row({"tp": 2, "dp": 2}, ("ep=2",)),
    Row({"dp": 2, "pp": 2}, ("ep=2",)),
    Row({"tp": 2, "dp": 2, "pp": 2}, ("ep=2",)),
    Row({"cp": 2}, ("cp_kind=ulysses",)),
    Row({"cp": 2}, ("cp_kind=ring",)),
    Row({"tp": 2, "cp": 2}, ("cp_kind=ulysses",)),
    Row({"tp": 2, "cp": 2}, ("cp_kind=ring",)),
    Row({"cp": 2, "dp": 2}, ("cp_kind=ring", "zero=3")),
    Row({"cp": 2, "pp": 2}, ("cp_kind=ulysses",)),
    Row({"tp": 2, "cp": 2, "pp": 2}, ("cp_kind=ring",)),
    Row({"tp": 2, "cp": 2, "dp": 2}, ("cp_kind=ulysses", "sp=1")),
)
ROWS: tuple[Row, ...] = (*(Row(degrees) for ranks in RANKS for degrees in products(ranks)), *VARIANTS)


@dataclass(frozen=True)
class LeftOut:
    """A row that the model does not allow, and why."""

    layout: str
    reason: str


PlanMaker = Callable[[Row], Plan]


def chosen_rows(*, devices: int = max(RANKS), only: Sequence[str] = ()) -> tuple[Row, ...]:
    """The rows of at most ``devices`` ranks whose names fit one of the globs in ``only`` (none: all).

    Raises BadInputError where none is left.
    """
    rows = [row for row in ROWS if row.ranks <= devices]
    chosen = [row for row in rows if not only or any(fnmatch.fnmatch(row.name, glob) for glob in only)]
    if not chosen:
        raise BadInputError(
            f"No row of the matrix on {devices} ranks fits {' '.join(only) or 'it'}; the rows are "
            f"{', '.join(repr(row.name) for row in ROWS)}."
        )
    return tuple(chosen)


def check_matrix(
    source: str | Path | ModelSource,
    make_plan: PlanMaker,
    *,
    dtype: str = "fp64",
    rows: Sequence[Row] = ROWS,
    timeout_s: float = 120.0,
    steps: int = 0,
    recompute: Sequence[str] = RECOMPUTE,
) -> Iterator[CheckResult | LeftOut]:
    """Check every row with every kind of ``recompute``, as each is done.

    All plans of ``make_plan`` have one global batch; ``steps`` as in :class:`Checker`.
    """
    checker: Checker | None = None
    for row in rows:
        try:
            plan = make_plan(row)
        except (BadInputError, InfeasibleError) as error:
            yield LeftOut(row.name, str(error).partition("\n")[0])
            continue
        checker = checker or Checker(source, plan, dtype=dtype, timeout_s=timeout_s, steps=steps)
        for kind in recompute:
            yield checker.check(with_recompute(plan, kind), row.name, kind)


@dataclass
class SearchedPlans:
    """Plans by the search with a row pinned, for a global batch of ``GLOBAL_BATCH``; one trace for all."""

    source: str | Path | ModelSource
    dtype: str
    hw: str | None
    sizes: Mapping[str, int]
    opaque: tuple[str, ...] = ()
    say: Callable[[str], None] = field(default=lambda _: None)

    def __post_init__(self) -> None:
        from autoplan.capture import capture_model
        from autoplan.hardware import load_profile
        from autoplan.planner.model_costs import ModelCosts
        from autoplan_cost_models import CostModel

        self.say(f"tracing {self.source}")
        self._profile = load_profile(self.hw)
        self._capture = capture_model(self.source, dtype=self.dtype, sizes=self.sizes, opaque=self.opaque)
        self._costs = ModelCosts(self._capture, CostModel(self._profile, self.dtype), self.say)

    def __call__(self, row: Row) -> Plan:
        """Raises BadInputError or InfeasibleError where the model does not allow the row."""
        from autoplan.planner.driver import Request, search_capture
        from autoplan.planner.space import parse_pins

        pins, started_s = parse_pins(row.all_pins), time.perf_counter()
        request = Request(
            source=self._capture.source,
            hw=self.hw,
            devices=row.ranks,
            global_batch=GLOBAL_BATCH,
            dtype=self.dtype,
            sizes=self.sizes,
            pins=row.all_pins,
            opaque=self.opaque,
        )
        plan = search_capture(
            self._capture, self._profile, request, pins, [], started_s, self.say, costs=self._costs
        )
        return replace(plan, assumptions=())
