"""Two plans side by side: what was decided differently and what it costs, as plain records.

Comes in: two plans. Goes out: a :class:`Comparison` that the terminal prints and JSON repeats.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autoplan.plan import Part, Plan
from autoplan.plan_table import estimate_mark
from autoplan.region_runs import fold_regions
from autoplan.report.cluster import sent_by_rank


@dataclass(frozen=True)
class Change:
    """One decision: ``what`` it is about and how each plan has it."""

    what: str
    before: str
    after: str


@dataclass(frozen=True)
class Cost:
    """One number of the forecasts; ``unit`` is ``s``, ``bytes``, ``tokens/s`` or ``share``."""

    what: str
    unit: str
    before: float
    after: float

    @property
    def relative(self) -> float | None:
        """``after / before - 1``; None where there was nothing before."""
        return self.after / self.before - 1 if self.before else None


@dataclass(frozen=True)
class Comparison:
    """``costs`` begin with the step; ``causes`` are the seconds of the step by cause.

    ``marks`` stand before numbers of the one plan and the other that rest on estimates.
    """

    changes: tuple[Change, ...]
    costs: tuple[Cost, ...]
    causes: tuple[Cost, ...]
    marks: tuple[str, str]

    @property
    def same(self) -> bool:
        return not self.changes and all(cost.before == cost.after for cost in (*self.costs, *self.causes))


def compare(before: Plan, after: Plan) -> Comparison:
    """Everything that differs between two plans, and every forecast number of both."""
    changes = tuple(change for change in _changes(before, after) if change.before != change.after)
    marks = estimate_mark(before), estimate_mark(after)
    return Comparison(changes, tuple(_costs(before, after)), tuple(_causes(before, after)), marks)


def recompute_counts(part: Part) -> dict[str, int]:
    """Regions by what is recomputed."""
    return dict(Counter(region.recompute for stage in part.stages for region in stage.regions))


def fullest_bytes(part: Part) -> float:
    """The largest predicted peak of a device; 0 without a forecast."""
    return max((stage.prediction.memory_peak_bytes for stage in part.stages if stage.prediction), default=0.0)


# ---- decisions --------------------------------------------------------------------------------------


def _changes(before: Plan, after: Plan) -> Iterator[Change]:
    yield Change("model", before.model.name, after.model.name)
    if before.model.name == after.model.name:
        yield Change("model as captured", before.model.fingerprint[:12], after.model.fingerprint[:12])
    yield Change("hardware", before.hardware, after.hardware)
    if before.hardware == after.hardware:
        yield Change("hardware profile", before.hardware_fingerprint[:12], after.hardware_fingerprint[:12])
    for name in (field.name for field in dataclasses.fields(before.workload)):
        yield Change(
            name.replace("_", " "),
            _said(getattr(before.workload, name)),
            _said(getattr(after.workload, name)),
        )
    names = dict.fromkeys([*(part.name for part in before.parts), *(part.name for part in after.parts)])
    for name in names:
        parts = [next((p for p in plan.parts if p.name == name), None) for plan in (before, after)]
        several = f" of {name}" if len(names) > 1 else ""
        for change in _part_changes(*parts):
            yield dataclasses.replace(change, what=change.what + several)
    yield from _layout_changes(before, after)


def _part_changes(old: Part | None, new: Part | None) -> Iterator[Change]:
    facts = [_part_facts(part) if part else {} for part in (old, new)]
    for what in dict.fromkeys([*facts[0], *facts[1]]):
        yield Change(what, facts[0].get(what, "-"), facts[1].get(what, "-"))


def _part_facts(part: Part) -> dict[str, str]:
    mesh = {axis: str(getattr(part.mesh, axis)) for axis in ("pp", "dp", "cp", "ep", "tp")}
    return mesh | {
        "micro-batch": str(part.micro_batch),
        "micro-batches a step": str(part.microbatches),
        "schedule": part.schedule,
        "stages a rank": str(part.vpp),
        "ZeRO": str(part.zero),
        "replicas that share ZeRO's states": str(part.zero_shard or "all"),
        "regions a stage": ", ".join(str(len(stage.regions)) for stage in part.stages),
        "recompute": _recompute(part),
    }


def _recompute(part: Part) -> str:
    """Which regions recompute what, folded: ``layers.0-15 full``."""
    runs = fold_regions([region for stage in part.stages for region in stage.regions])
    told = [f"{run.label} {run.recompute}" for run in runs if run.recompute != "none"]
    return ", ".join(told) or "none"


def _layout_changes(before: Plan, after: Plan) -> Iterator[Change]:
    """Per layout and axis: the placements of parameters that differ, named while they are few."""
    for name in dict.fromkeys([*before.layouts, *after.layouts]):
        old, new = before.layouts.get(name), after.layouts.get(name)
        if old is None or new is None:
            continue  # a region class that one model lacks is told by the model
        for axis in dict.fromkeys([*old.axes, *new.axes]):
            one, other = old.on(axis).parameters, new.on(axis).parameters
            yield Change(f"placements of {name} on {axis}", _states(one), _states(other))
        yield Change(f"kernels of {name}", ", ".join(old.kernels) or "-", ", ".join(new.kernels) or "-")


def _states(placements: Mapping[str, str]) -> str:
    counts = Counter(placements.values())
    return ", ".join(f"{count} x {state}" for state, count in sorted(counts.items(), reverse=True)) or "R"


def _said(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={item}" for key, item in value.items()) or "-"  # pyright: ignore[reportUnknownVariableType]  any mapping
    return ", ".join(map(str, value)) or "-" if isinstance(value, tuple) else str(value)


# ---- what they cost ---------------------------------------------------------------------------------


def _costs(before: Plan, after: Plan) -> Iterator[Cost]:
    old, new = before.prediction, after.prediction
    if old is not None and new is not None:
        yield Cost("step", "s", old.step_time_s, new.step_time_s)
        yield Cost("tokens a second", "tokens/s", old.tokens_per_s, new.tokens_per_s)
        yield Cost("MFU", "share", old.mfu, new.mfu)
    peaks = [max(map(fullest_bytes, plan.parts), default=0.0) for plan in (before, after)]
    if all(peaks):
        yield Cost("peak memory", "bytes", *peaks)
    sent = [_sent(plan) for plan in (before, after)]
    for axis in dict.fromkeys([*sent[0], *sent[1]]):
        yield Cost(f"sent on {axis} by a device", "bytes", sent[0].get(axis, 0.0), sent[1].get(axis, 0.0))


def _sent(plan: Plan) -> dict[str, float]:
    """What the busiest device sends in a step, by axis."""
    most: dict[str, float] = {}
    for sent in (sent for part in plan.parts for sent in sent_by_rank(part)):
        for axis, amount in sent.items():
            most[axis] = max(most.get(axis, 0.0), amount)
    return most


def _causes(before: Plan, after: Plan) -> Iterator[Cost]:
    old = before.prediction.breakdown_s if before.prediction else {}
    new = after.prediction.breakdown_s if after.prediction else {}
    for cause in dict.fromkeys([*old, *new]):
        yield Cost(cause, "s", old.get(cause, 0.0), new.get(cause, 0.0))
