"""One model over several clusters and sizes: values per setting in, one best plan (or why not) per point out.

Points share what they can: the capture of equal sizes and dtype, the layouts and measured work of equal
chips. Scaling efficiency is throughput per device against that of the fewest devices with the same chip and
sizes.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autoplan.capture import capture_model
from autoplan.capture.program import Capture
from autoplan.errors import AutoplanError, BadInputError
from autoplan.hardware import load_profile
from autoplan.plan import Plan
from autoplan.planner.driver import Request, model_costs, search_capture
from autoplan.planner.model_costs import ModelCosts
from autoplan.planner.space import parse_pins, require_counts

MOST_POINTS = 256
KNOWN = ("devices", "global_batch")
_THOUSANDS = {"k": 1024, "m": 1024**2}


@dataclass(frozen=True)
class Point:
    """One setting and its plan; ``why`` says what is wrong where there is none.

    ``efficiency`` is 1 at the fewest devices of a chip and its sizes; None where there is no plan.
    ``cost_per_step`` is in the currency of the price per device-hour, None where no price was given.
    """

    hardware: str
    values: Mapping[str, int]
    plan: Plan | None
    why: str = ""
    efficiency: float | None = None
    cost_per_step: float | None = None

    @property
    def tokens_per_s(self) -> float:
        return self.plan.prediction.tokens_per_s if self.plan and self.plan.prediction else 0.0

    @property
    def step_time_s(self) -> float:
        return self.plan.prediction.step_time_s if self.plan and self.plan.prediction else 0.0

    @property
    def devices(self) -> int:
        """Those asked for, of which a plan may leave some idle."""
        return self.values.get("devices") or (self.plan.workload.devices if self.plan else 0)


def parse_sweeps(texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """``["devices=64,128", "sequence=8k,32k"]`` to values by name; 1k is 1,024.

    Raises BadInputError naming the text and what it should look like.
    """
    found: dict[str, tuple[int, ...]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        numbers = tuple(_number(value) for value in values.split(","))
        if not equals or not name.isidentifier() or None in numbers:
            raise BadInputError(f"--sweep {text!r}: expected NAME=N,N,..., such as --sweep devices=64,128.")
        if name in found:
            raise BadInputError(f"--sweep {text!r}: {name} is swept already; give all its values at once.")
        found[name] = tuple(number for number in numbers if number is not None)
    return found


def _number(text: str) -> int | None:
    factor = _THOUSANDS.get(text[-1:].lower(), 1)
    digits = text[:-1] if factor > 1 else text
    return int(digits) * factor if digits.isdigit() and int(digits) > 0 else None


def sweep(
    request: Request,
    hardware: Sequence[str | None],
    values: Mapping[str, Sequence[int]],
    *,
    hourly: Mapping[str, float] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[Point, ...]:
    """The best plan of every combination of chips and values, with efficiency and cost.

    ``values`` named ``devices`` and ``global_batch`` go to the search, others to ``example_inputs``.
    ``hourly`` is the price of one device-hour by chip. Raises BadInputError for more than MOST_POINTS.
    """
    count = len(hardware)
    for choices in values.values():
        count *= len(choices)
    if count > MOST_POINTS:
        raise BadInputError(f"the sweep has {count} points, at most {MOST_POINTS}: give fewer values.")
    searches = _Searches(request, say)
    points = [searches.point(hw, chosen) for hw in hardware for chosen in _combinations(values)]
    return tuple(_with_cost(point, hourly or {}) for point in _with_efficiency(points))


def _combinations(values: Mapping[str, Sequence[int]]) -> Iterator[dict[str, int]]:
    for chosen in itertools.product(*values.values()):
        yield dict(zip(values, chosen))


class _Searches:
    """Runs searches, keeping captures and costs for the next."""

    def __init__(self, request: Request, say: Callable[[str], None]) -> None:
        self.request, self._say = request, say
        self._captures: dict[object, Capture] = {}
        self._costs: dict[object, ModelCosts] = {}

    def point(self, hw: str | None, chosen: Mapping[str, int]) -> Point:
        profile = load_profile(hw)
        sizes = {**(self.request.sizes or {}), **{n: v for n, v in chosen.items() if n not in KNOWN}}
        devices = chosen.get("devices", self.request.devices)
        batch = chosen.get("global_batch", self.request.global_batch)
        require_counts(devices=devices, global_batch=batch)
        request = replace(self.request, hw=hw, devices=devices, global_batch=batch, sizes=sizes)
        try:
            dtype = request.dtype or ("bf16" if profile.software.device_type != "cpu" else "fp32")
            capture = self._capture(dtype, sizes)
            key = (id(capture), profile.name)
            if key not in self._costs:
                self._costs[key] = model_costs(capture, profile, request.target, self._say)
            pins, start = parse_pins(request.pins), time.perf_counter()
            plan = search_capture(
                capture, profile, request, pins, [], start, self._say, costs=self._costs[key]
            )
        except AutoplanError as error:
            if isinstance(error, BadInputError) and not chosen:
                raise
            return Point(profile.name, dict(chosen), None, str(error))
        return Point(profile.name, dict(chosen), plan)

    def _capture(self, dtype: str, sizes: Mapping[str, int]) -> Capture:
        key = (dtype, tuple(sorted(sizes.items())))
        if key not in self._captures:
            named = ", ".join(f"{name}={value}" for name, value in sizes.items())
            self._say(f"tracing {Path(self.request.source).name}{f' at {named}' if named else ''}")
            self._captures[key] = capture_model(
                self.request.source, dtype=dtype, sizes=sizes, opaque=self.request.opaque
            )
        return self._captures[key]


def _with_efficiency(points: Sequence[Point]) -> list[Point]:
    """Throughput per device against the fewest devices of the same chip, sizes and batch a device."""
    base: dict[object, Point] = {}
    for point in sorted(points, key=lambda point: point.devices):
        if point.plan is not None:
            base.setdefault(_series(point), point)
    found: list[Point] = []
    for point in points:
        first = base.get(_series(point))
        if point.plan is None or first is None:
            found.append(point)
            continue
        each, best = point.tokens_per_s / point.devices, first.tokens_per_s / first.devices
        found.append(replace(point, efficiency=each / best))
    return found


def _series(point: Point) -> object:
    return point.hardware, tuple((name, value) for name, value in point.values.items() if name != "devices")


def _with_cost(point: Point, hourly: Mapping[str, float]) -> Point:
    price = hourly.get(point.hardware)
    if price is None or point.plan is None:
        return point
    return replace(point, cost_per_step=price * point.devices * point.step_time_s / 3600)
