"""Why a plan is what it is: a plan and its what-if searches in, claims out, each computed by re-solving.

A claim is a sentence with the number behind it. Nothing is said that was not solved for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autoplan.errors import BadInputError
from autoplan.plan import SCHEDULES, Part, Plan, Prediction, Stage
from autoplan.planner.what_if import (
    Answer,
    WhatIf,
    with_faster_compute,
    with_faster_links,
    with_faster_memory,
    with_memory,
)
from autoplan.units import GIB, bytes_text, seconds_text

FASTER = 1.1
# Settings of a plan that a pin fixes, and their values in one part.
DEGREES = ("pp", "dp", "tp", "cp", "ep")
CHOICES = ("zero", "micro_batch", "vpp", "schedule")


@dataclass(frozen=True)
class Claim:
    """``kind`` groups claims; ``change`` is what was asked of the search; ``step_time_s`` what it gave.

    ``relative`` is the step time against the plan's (0.061 = 6.1% slower), None where nothing fits.
    """

    kind: str
    text: str
    change: str = ""
    step_time_s: float | None = None
    relative: float | None = None
    because: Mapping[str, float] = field(default_factory=dict[str, float])


def explain(what_if: WhatIf) -> list[Claim]:
    """What limits the plan, its nearest alternatives, and what more of each resource would buy."""
    return [*limits(what_if.plan), *alternatives(what_if), *shadow_prices(what_if)]


def limits(plan: Plan) -> list[Claim]:
    """What the plan's own forecast says binds it."""
    prediction, part = _forecast(plan), plan.parts[0]
    claims = [_memory_claim(part)]
    step_s = prediction.step_time_s
    for name, spent_s in sorted(prediction.breakdown_s.items(), key=lambda item: -item[1]):
        if spent_s >= 0.01 * step_s:
            words = name.replace("_", " ")
            text = f"{words} takes {spent_s / step_s:.1%} of the step ({seconds_text(spent_s)})"
            claims.append(Claim("limit", text, name, spent_s))
    return claims


def _memory_claim(part: Part) -> Claim:
    fullest = max(range(len(part.stages)), key=lambda s: _memory(part.stages[s])[0])
    peak, limit = _memory(part.stages[fullest])
    share = peak / limit if limit else 0.0
    prediction = part.stages[fullest].prediction
    items = sorted(prediction.memory_items if prediction else (), key=lambda item: -item.bytes)[:3]
    named = ", ".join(f"{item.name} {bytes_text(item.bytes)}" for item in items)
    text = f"stage {fullest} uses {share:.1%} of its {bytes_text(limit)} for tensors: {named}"
    return Claim("limit", text, "memory", relative=share)


def _memory(stage: Stage) -> tuple[float, float]:
    told = stage.prediction
    return (told.memory_peak_bytes, told.memory_limit_bytes) if told else (0.0, 0.0)


def alternatives(what_if: WhatIf) -> list[Claim]:
    """One setting changed at a time, to its neighbours; nearest in time first."""
    claims = [
        compare(what_if, "alternative", what_if.pinned(f"{key}={value}"), f"{key}={value}")
        for key, value in neighbours(what_if.plan)
    ]
    return sorted(claims, key=lambda c: (c.relative is None, c.relative or 0.0))


def neighbours(plan: Plan) -> list[tuple[str, str]]:
    """Half and double of every degree and of the micro-batch, other ZeRO stages, schedules (those that the
    search considers), recompute."""
    part = plan.parts[0]
    current = settings(plan)
    found: list[tuple[str, str]] = []
    for key in (*DEGREES, "micro_batch"):
        value = int(current[key])
        found += [(key, str(other)) for other in (value // 2, value * 2) if other >= 1 and other != value]
    found += [("zero", str(z)) for z in (0, 1, 2, 3) if z != part.zero and part.mesh.replicas > 1]
    if part.mesh.pp > 1:
        found += [("schedule", one) for one in SCHEDULES if one not in (part.schedule, "gpipe")]
    kinds = {entry.recompute for stage in part.stages for entry in stage.regions}
    found += [("recompute", kind) for kind in ("none", "selective", "full") if kinds != {kind}]
    return found


def settings(plan: Plan) -> dict[str, str]:
    """The values of everything a plain pin can fix."""
    part = plan.parts[0]
    found = {key: str(getattr(part.mesh, key)) for key in DEGREES}
    return found | {key: str(getattr(part, key)) for key in CHOICES}


def shadow_prices(what_if: WhatIf) -> list[Claim]:
    """What one more GiB a device, 10% more of each speed, and twice the devices would buy."""
    profile, devices = what_if.profile, what_if.plan.workload.devices
    asked = [
        ("1 GiB more memory a device", what_if.on(with_memory(profile, GIB))),
        ("1 GiB less memory a device", what_if.on(with_memory(profile, -GIB))),
        ("links 10% faster", what_if.on(with_faster_links(profile, FASTER))),
        ("memory bandwidth 10% higher", what_if.on(with_faster_memory(profile, FASTER))),
        ("matrix products and attention 10% faster", what_if.on(with_faster_compute(profile, FASTER))),
        (f"{2 * devices} devices instead of {devices}", what_if.devices(2 * devices)),
    ]
    if devices > 1:
        asked.append((f"{devices // 2} devices instead of {devices}", what_if.devices(devices // 2)))
    return [compare(what_if, "shadow price", answer, change) for change, answer in asked]


def why(what_if: WhatIf, setting: str) -> list[Claim]:
    """Why the plan has ``setting`` (``tp=8``): what its nearest other values cost.

    Raises BadInputError where the plan has another value.
    """
    key, value = _setting(what_if.plan, setting)
    current = settings(what_if.plan)[key]
    if current != value:
        raise BadInputError(
            f"--why {setting}: the plan has {key}={current}. "
            f"Type --why-not {setting}, or --why {key}={current}."
        )
    others = [pair for pair in neighbours(what_if.plan) if pair[0] == key]
    return [
        compare(what_if, "why", what_if.pinned(f"{key}={other}"), f"{key}={other}") for key, other in others
    ]


def why_not(what_if: WhatIf, setting: str) -> list[Claim]:
    """Why the plan has not ``setting``: the best plan that has it, against this one."""
    key, value = _setting(what_if.plan, setting)
    if settings(what_if.plan)[key] == value:
        raise BadInputError(f"--why-not {setting}: the plan has it. Type --why {setting}.")
    return [compare(what_if, "why not", what_if.pinned(setting), setting)]


def _setting(plan: Plan, text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    known = settings(plan)
    if not equals or key not in known:
        raise BadInputError(f"{text!r}: expected KEY=VALUE with one of {', '.join(known)}, such as tp=8.")
    return key, value


def compare(what_if: WhatIf, kind: str, answer: Answer, change: str) -> Claim:
    """One answer against the plan: how much slower, and which parts of the step differ most."""
    planned = _forecast(what_if.plan)
    if answer.plan is None:
        return Claim(kind, f"{change}: {_first_sentence(answer.why)}", change)
    found = _forecast(answer.plan)
    relative = found.step_time_s / planned.step_time_s - 1.0
    because = differences(planned, found)
    text = f"{change}: {relative:+.1%} ({seconds_text(found.step_time_s)} a step, {shape(answer.plan)})"
    reasons = _reasons(because, planned.step_time_s)
    return Claim(kind, text + reasons, change, found.step_time_s, relative, because)


def differences(planned: Prediction, found: Prediction) -> dict[str, float]:
    """Seconds that each part of the step takes more (or less) than in the plan; they sum to the whole."""
    names = dict.fromkeys([*planned.breakdown_s, *found.breakdown_s])
    return {n: found.breakdown_s.get(n, 0.0) - planned.breakdown_s.get(n, 0.0) for n in names}


def _reasons(because: Mapping[str, float], step_s: float) -> str:
    large = [item for item in because.items() if abs(item[1]) >= 0.002 * step_s]
    ranked = sorted(large, key=lambda item: -abs(item[1]))[:3]
    if not ranked:
        return ""
    named = [f"{name.replace('_', ' ')} {'+' if s > 0 else '-'}{seconds_text(abs(s))}" for name, s in ranked]
    return f", because {', '.join(named)}"


def shape(plan: Plan) -> str:
    """``pp 2 x dp 4 x tp 8, micro-batch 1 x 64, ZeRO 0``."""
    part = plan.parts[0]
    return f"{part.mesh}, micro-batch {part.micro_batch} x {part.microbatches}, {part.zero_text}"


def _first_sentence(text: str) -> str:
    first, *rest = text.splitlines()
    return f"{first} {rest[0]}" if rest and first.startswith("nothing fits") else first


def _forecast(plan: Plan) -> Prediction:
    if plan.prediction is None:
        raise BadInputError("the plan carries no forecast to explain; search again: autoplan search MODEL.py")
    return plan.prediction


def by_kind(claims: Sequence[Claim]) -> dict[str, list[Claim]]:
    """Claims grouped in the order of their kinds."""
    groups: dict[str, list[Claim]] = {}
    for claim in claims:
        groups.setdefault(claim.kind, []).append(claim)
    return groups
