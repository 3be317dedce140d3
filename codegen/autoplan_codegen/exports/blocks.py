"""A part's stages in, what other frameworks call layers out: how many blocks, and what is recomputed.

Blocks are the numbered regions of one container (``model.layers.0``, ...). What comes before the first is
the embedding's side, what follows the last the loss's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from autoplan.plan import Part, Plan, RegionPlan
from autoplan.region_runs import container_of, fold_regions


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


def is_sequence_parallel(plan: Plan) -> bool:
    """Whether activations between regions are cut on tp: some layout's boundary says so."""
    placed = [layout.on("tp") for layout in plan.layouts.values()]
    states = [state for one in placed for state in (*one.inputs.values(), *one.outputs.values())]
    return any(state.startswith("S(") for state in states)


def context_kind(plan: Plan) -> str:
    """How attention runs on cp: ``ring``, or ``ulysses`` (heads and sequence change places)."""
    rules = [rule for layout in plan.layouts.values() for rule in layout.on("cp").rules.values()]
    return "ring" if any("ring" in rule for rule in rules) else "ulysses"
