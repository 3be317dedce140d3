"""What a target can run of the search's space: candidates, pins and regions in, those it can run out.

Comes in: a :class:`~autoplan.targets.Target`, what the model is made of, and the user's pins. Goes out: fewer
candidates, the recompute of every region, and the words for the space that is left.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from autoplan.errors import BadInputError
from autoplan.hardware import HardwareProfile
from autoplan.plan import RECOMPUTE
from autoplan.planner.chain import FirstBlocks
from autoplan.planner.space import SPACE, Candidate, Pins
from autoplan.region_runs import container_of
from autoplan.targets import Choice, Target, refusals

_WORDS = {
    "any": "",
    "stage_first": "recompute of the first blocks of each stage (as many in all where vpp is above 1)",
    "same_first": "recompute of the first blocks of each stage, as many in every one",
    "all": "recompute of every block or none",
}


def space_text(target: Target) -> str:
    """The space of the certificate, in words."""
    if target.is_ours:
        return SPACE
    schedules = ", ".join(target.schedules)
    stages = " ".join(map(str, target.zero_with_stages))
    zero = " ".join(map(str, target.zero)) + (
        f" ({stages} with stages)" if target.zero_with_stages != target.zero else ""
    )
    return (
        f"of {SPACE}; what {target.version} can run: schedules {schedules}; ZeRO {zero}; cp by "
        f"{' or '.join(target.cp)}; {_WORDS[target.recomputed_blocks]}; token tables cut along the vocabulary"
    )


def target_pins(target: Target, pins: Pins, profile: HardwareProfile, regions: Sequence[str]) -> Pins:
    """The pins with what the target leaves open no longer; BadInputError for those against it."""
    name = target.name
    for region, value in [("", pins.recompute), *pins.regions]:
        if value is not None and value not in target.recompute:
            where = f"{region.lstrip('*')}:" if region else ""
            raise BadInputError(
                f"--pin {where}recompute={value}: {name} recomputes {' or '.join(target.recompute)}, not "
                f"{value} as it is here. Leave the pin out, or plan with --target autoplan."
            )
    if pins.cp_kind and pins.cp_kind not in target.cp:
        raise BadInputError(
            f"--pin cp_kind={pins.cp_kind}: {name} has {' and '.join(target.cp)}. Leave the pin out."
        )
    if target.cp_needs in profile.forbidden:
        if pins.cp is not None and pins.cp > 1:
            raise BadInputError(
                f"--pin cp={pins.cp}: {name} needs {target.cp_needs} for context parallelism, and "
                f"{profile.name} has none. Leave the pin out, or plan with --target autoplan."
            )
        pins = replace(pins, cp=1)
    if len(target.cp) == 1 and pins.cp != 1:
        pins = replace(pins, cp_kind=next(iter(target.cp)))
    if not _cuts_one_list(target, regions):
        if pins.pp is not None and pins.pp > 1:
            raise BadInputError(
                f"--pin pp={pins.pp}: {name} cuts one list of blocks into stages, and the model has "
                f"{_lists_text(regions)}. Leave the pin out, or plan with --target autoplan."
            )
        pins = replace(pins, pp=1)
    return pins


def runnable_on(target: Target, found: Sequence[Candidate], pins: Pins, *, experts: bool) -> list[Candidate]:
    """The candidates that the target can run; BadInputError saying what it refuses where none is left."""
    kept: list[Candidate] = []
    why: Counter[str] = Counter()
    for candidate in found:
        refused = next(refusals(target, _choice(candidate, experts)), None)
        if refused is None:
            kept.append(candidate)
        else:
            why[f"{refused.planned} ({refused.why})"] += 1
    if kept or not found:
        return kept
    said = "; ".join(text for text, _ in why.most_common(3))
    raise BadInputError(
        f"--target {target.name}: {target.version} runs no plan of this space: it refuses {said}. "
        f"{'Change a pin' if pins != Pins() else 'Change --devices'}, or plan with --target autoplan."
    )


def _choice(candidate: Candidate, experts: bool) -> Choice:
    return Choice(
        candidate.mesh,
        candidate.schedule,
        candidate.vpp,
        candidate.microbatches,
        candidate.zero,
        candidate.zero_shard,
        candidate.sp,
        candidate.cp_kind,
        experts,
    )


def recompute_kinds(target: Target, region: str, pins: Pins) -> tuple[str, ...]:
    """Which recompute a region may have."""
    pinned = pins.recompute_of(region)
    legal = target.recompute
    if target.recomputed_blocks != "any" and not container_of(region):
        legal = ("none",)
        pinned = pinned if any(fnmatch.fnmatch(region, glob) for glob, _ in pins.regions) else None
    if pinned is not None and pinned not in legal:
        raise BadInputError(
            f"--pin {region}:recompute={pinned}: {target.name} recomputes blocks alone. Leave the pin out."
        )
    return tuple(kind for kind in RECOMPUTE if kind in legal and pinned in (None, kind))


def first_blocks(target: Target, regions: Sequence[str]) -> FirstBlocks | None:
    """How a stage's blocks are recomputed together; None where each is by itself."""
    how = target.recomputed_blocks
    if how == "any":
        return None
    blocks = tuple(bool(container_of(name)) for name in regions)
    most = sum(blocks)
    counts = tuple(dict.fromkeys((0, most))) if how == "all" else tuple(range(most + 1))
    return FirstBlocks(blocks, counts, alike=how != "stage_first")


def _cuts_one_list(target: Target, regions: Sequence[str]) -> bool:
    """Whether stages of the model can be cut as the target cuts them."""
    if target.block_lists == "any":
        return True
    containers = [container_of(name) for name in regions]
    inner = [i for i, name in enumerate(containers) if name]
    if not inner or len({name for name in containers if name}) != 1:
        return False
    return inner == list(range(inner[0], inner[-1] + 1)) and inner[0] <= 1 and inner[-1] >= len(regions) - 2


def _lists_text(regions: Sequence[str]) -> str:
    lists = dict.fromkeys(name for region in regions if (name := container_of(region)))
    around = sum(not container_of(region) for region in regions)
    return f"{', '.join(lists) or 'no list'} and {around} regions around them"
