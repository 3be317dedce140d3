"""A large plan in, a small one of the same kind out: few blocks per class, every axis at its least factor.

The least prime factor of a degree (2 where it is even) divides what the degree does, heads or experts.

The model is trimmed to match: of each container of blocks (a ``ModuleList``) the first two of each region
class stay.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from torch import nn

from autoplan.plan import Layout, Mesh, Part, Plan, RegionPlan, Stage
from autoplan.runtime.prepare import single_part

BLOCKS_PER_CLASS = 2
MOST_MICRO_BATCH = 2
MOST_MICRO_BATCHES = 4


@dataclass(frozen=True)
class Shrunk:
    """The small plan, the blocks kept of each container (by index), and what to tell the user."""

    plan: Plan
    kept: Mapping[str, tuple[int, ...]]
    note: str

    def trim(self, model: nn.Module) -> None:
        """Drop the other blocks from ``model``, in place."""
        for path, indices in self.kept.items():
            owner, _, name = path.rpartition(".")
            blocks = model.get_submodule(path)
            setattr(model.get_submodule(owner), name, nn.ModuleList(blocks[i] for i in indices))  # type: ignore[index]  # a ModuleList


def shrink(plan: Plan) -> Shrunk:
    """Axes shrink to their least factors, blocks to two per class, micro-batches to four of two samples."""
    part = single_part(plan)
    entries = [entry for stage in part.stages for entry in stage.regions]
    kept = _kept_blocks(entries)
    fewer = _renamed(entries, kept)
    mesh = _small_mesh(part.mesh)
    vpp = min(part.vpp, 2, len(fewer) // mesh.pp)
    stages = mesh.pp * vpp
    cuts = [len(fewer) * stage // stages for stage in range(stages + 1)]
    small = replace(
        part,
        mesh=mesh,
        vpp=vpp,
        schedule="1f1b" if part.schedule == "interleaved_1f1b" and vpp == 1 else part.schedule,
        zero_shard=0 if mesh.replicas % (part.zero_shard or 1) else part.zero_shard,
        micro_batch=min(part.micro_batch, MOST_MICRO_BATCH),
        microbatches=min(part.microbatches, MOST_MICRO_BATCHES),
        stages=tuple(Stage(tuple(fewer[a:b])) for a, b in pairwise(cuts)),
    )
    layouts = {key: _on(mesh, layout) for key, layout in plan.layouts.items()}
    note = f"shrunk: {len(entries)} regions to {len(fewer)}, {_words(part)} to {_words(small)}"
    return Shrunk(replace(plan, parts=(small,), layouts=layouts), kept, note)


def _small_mesh(mesh: Mesh) -> Mesh:
    """The least factor of every degree; stages and plain replicas are two, as nothing is divided by them."""
    ep = _least_factor(mesh.ep)
    dp = ep if ep > 1 else min(mesh.dp, 2)
    return Mesh(min(mesh.pp, 2), dp, _least_factor(mesh.tp), _least_factor(mesh.cp), ep)


def _least_factor(degree: int) -> int:
    return next((factor for factor in range(2, degree) if degree % factor == 0), degree)


def _on(mesh: Mesh, layout: Layout) -> Layout:
    axes = {axis: replace(placed, size=getattr(mesh, axis)) for axis, placed in layout.axes.items()}
    return replace(layout, axes=axes)


def _kept_blocks(entries: list[RegionPlan]) -> dict[str, tuple[int, ...]]:
    """For each container the indices of the first blocks of each layout."""
    kept: dict[str, list[int]] = {}
    counts: dict[tuple[str, str], int] = {}
    for entry in entries:
        block = _block(entry.region)
        if block is None:
            continue
        key = (block[0], entry.layout)
        counts[key] = counts.get(key, 0) + 1
        if counts[key] <= BLOCKS_PER_CLASS:
            kept.setdefault(block[0], []).append(block[1])
    return {path: tuple(indices) for path, indices in kept.items()}


def _renamed(entries: list[RegionPlan], kept: Mapping[str, tuple[int, ...]]) -> list[RegionPlan]:
    """The entries that stay, blocks numbered anew."""
    fewer: list[RegionPlan] = []
    for entry in entries:
        block = _block(entry.region)
        if block is None:
            fewer.append(entry)
        elif block[1] in kept[block[0]]:
            fewer.append(replace(entry, region=f"{block[0]}.{kept[block[0]].index(block[1])}"))
    return fewer


def _block(region: str) -> tuple[str, int] | None:
    """``model.layers.3 -> ("model.layers", 3)``; None for what is no block."""
    found = re.fullmatch(r"(.+)\.(\d+)", region)
    return (found[1], int(found[2])) if found and found[1] != "glue" else None


def _words(part: Part) -> str:
    batches = f"{part.microbatches} micro-batches of {part.micro_batch}"
    return f"{part.mesh} with {batches}"
