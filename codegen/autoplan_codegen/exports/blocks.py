"""A part's stages in, what other frameworks call layers out: how many blocks, and what is recomputed.

Blocks are the numbered regions of one container (``model.layers.0``, ...). What comes before the first is
the embedding's side, what follows the last the loss's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoplan.plan import Part, Plan, RegionPlan
from autoplan.region_runs import container_of, fold_regions
from autoplan.targets import Choice, Target, refusals
from autoplan_codegen.exports.outcome import Lost


@dataclass(frozen=True)
class StageBlocks:
    """One stage: its blocks, whether it begins with the embedding or ends with the loss, and recompute."""

    blocks: int
    full: int
    selective: int
    embedding: bool
    loss: bool
    full_first: bool


@dataclass(frozen=True)
class Blocks:
    """All stages; ``container`` is the blocks' module list, ``others`` further lists of blocks."""

    container: str
    stages: tuple[StageBlocks, ...]
    others: tuple[str, ...]

    @property
    def total(self) -> int:
        return sum(stage.blocks for stage in self.stages)

    @property
    def recompute(self) -> str:
        """``none``, ``selective``, ``full`` (every block alike) or ``mixed``."""
        full, selective = (sum(getattr(s, kind) for s in self.stages) for kind in ("full", "selective"))
        kinds = {"full": full, "selective": selective, "none": self.total - full - selective}
        return next((kind for kind, count in kinds.items() if count == self.total), "mixed")


def find_blocks(part: Part) -> Blocks:
    """The blocks of a part's largest container."""
    containers = Counter(
        name for stage in part.stages for entry in stage.regions if (name := container_of(entry.region))
    )
    main = containers.most_common(1)[0][0] if containers else ""
    entries = [list(stage.regions) for stage in part.stages]
    last = len(entries) - 1
    stages = tuple(
        _stage_blocks([e for e in stage if container_of(e.region) == main], first=i == 0, last=i == last)
        for i, stage in enumerate(entries)
    )
    return Blocks(main, stages, tuple(name for name in containers if name != main))


def _stage_blocks(blocks: Sequence[RegionPlan], *, first: bool, last: bool) -> StageBlocks:
    kinds = [block.recompute for block in blocks]
    full = kinds.count("full")
    return StageBlocks(
        blocks=len(kinds),
        full=full,
        selective=kinds.count("selective"),
        embedding=first,
        loss=last,
        full_first=all(kind == "full" for kind in kinds[:full]),
    )


def recompute_pins(part: Part, full: Sequence[int]) -> tuple[str, ...]:
    """Pins for a target that recomputes the first ``full[s]`` blocks of stage s whole, and no others."""
    main = find_blocks(part).container
    entries: list[RegionPlan] = []
    for stage, count in zip(part.stages, full):
        blocks = [entry for entry in stage.regions if container_of(entry.region) == main]
        entries += [
            RegionPlan(block.region, "", "full" if i < count else "none") for i, block in enumerate(blocks)
        ]
    return tuple(f"{run.label}:recompute={run.recompute}" for run in fold_regions(entries))


def block_losses(target: Target, plan: Plan, blocks: Blocks) -> list[Lost]:
    """What the target's cuts through blocks, its recompute and its tables leave out of a plan."""
    lost: list[Lost] = []
    entries = [entry for stage in plan.parts[0].stages for entry in stage.regions]
    if target.recomputed_blocks != "any":
        others = [
            e.region for e in entries if e.recompute != "none" and container_of(e.region) != blocks.container
        ]
        if others:
            lost.append(Lost("recompute", f"of {', '.join(others)} too", "blocks alone are recomputed"))
    around = [bool(container_of(entry.region)) for entry in entries]
    if plan.parts[0].mesh.pp > 1 and target.block_lists == "one" and True in around:
        first, last = around.index(True), len(around) - 1 - around[::-1].index(True)
        if first > 1 or last < len(around) - 2:
            planned = "cuts beside regions that stand around the blocks"
            lost.append(Lost("stages", planned, "they stay with the first and last blocks"))
    if target.vocabulary and plan.parts[0].mesh.tp > 1 and cuts_hidden(plan):
        lost.append(Lost("layout", "tables cut along the hidden size", "along the vocabulary"))
    return lost


def stand_ins(
    target: Target, plan: Plan, instead: Mapping[str, tuple[str, Mapping[str, object]]]
) -> tuple[list[Lost], dict[str, object]]:
    """What the target refuses of a plan, and the pins of what it runs instead (field -> (words, pins))."""
    lost: list[Lost] = []
    runs_as: dict[str, object] = {}
    for refusal in refusals(target, choice_of(plan)):
        words, pins = instead.get(refusal.field, ("nothing: it refuses to start", {}))
        lost.append(Lost(refusal.field, refusal.planned, f"{words} ({refusal.why})"))
        runs_as |= pins
    return lost, runs_as


def cuts_hidden(plan: Plan) -> bool:
    """Whether tp cuts some lookup's table along its columns."""
    rules = [rule for layout in plan.layouts.values() for rule in layout.on("tp").rules.items()]
    return any(node.startswith("embedding") and rule.startswith("S(1)") for node, rule in rules)


def choice_of(plan: Plan) -> Choice:
    """What the plan decides for all regions at once."""
    part = plan.parts[0]
    return Choice(
        part.mesh,
        part.schedule,
        part.vpp,
        part.microbatches,
        part.zero,
        part.zero_shard,
        sp=part.mesh.tp > 1 and is_sequence_parallel(plan),
        cp_kind=context_kind(plan) if part.mesh.cp > 1 else "",
        experts=part.mesh.ep > 1,
    )


def decided(plan: Plan) -> dict[str, object]:
    """What the plan decides for all regions at once, by the key that pins it (None: nothing to pin)."""
    part = plan.parts[0]
    mesh = part.mesh
    return {
        "pp": mesh.pp,
        "dp": mesh.dp,
        "tp": mesh.tp,
        "cp": mesh.cp,
        "ep": mesh.ep,
        "micro_batch": part.micro_batch,
        "zero": part.zero,
        "schedule": part.schedule,
        "vpp": part.vpp,
        "zero_shard": part.zero_shard or None,
        "sp": int(is_sequence_parallel(plan)) if mesh.tp > 1 else None,
        "cp_kind": context_kind(plan) if mesh.cp > 1 else None,
    }


def pins_of(values: Mapping[str, object]) -> list[str]:
    """The pins of what is decided."""
    return [f"{key}={value}" for key, value in values.items() if value is not None]


def is_sequence_parallel(plan: Plan) -> bool:
    """Whether activations between regions are cut on tp: some layout's boundary says so."""
    placed = [layout.on("tp") for layout in plan.layouts.values()]
    states = [state for one in placed for state in (*one.inputs.values(), *one.outputs.values())]
    return any(state.startswith("S(") for state in states)


def context_kind(plan: Plan) -> str:
    """How attention runs on cp: ``ring``, or ``ulysses`` (heads and sequence change places)."""
    rules = [rule for layout in plan.layouts.values() for rule in layout.on("cp").rules.values()]
    return "ring" if any("ring" in rule for rule in rules) else "ulysses"
