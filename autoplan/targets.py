"""What frameworks can run a plan in (``targets.yaml``), what one of them cannot run of a choice out.

The search, the exporters and the rules for imported scripts all ask here, so that they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from autoplan.checked_yaml import Entry, read_yaml
from autoplan.errors import BadInputError
from autoplan.plan import RECOMPUTE, SCHEDULES, Mesh, zero_text

TABLE = Path(__file__).parent / "targets.yaml"
OURS = "autoplan"
_KINDS = ("ring", "ulysses")
_BLOCKS = ("any", "stage_first", "same_first", "all")
_AXES = ("pp", "tp", "cp")


@dataclass(frozen=True)
class Target:
    """One row of the table, whose head says what the fields mean."""

    name: str
    version: str
    sources: tuple[str, ...]
    schedules: Mapping[str, str]
    one_stage: tuple[str, ...]
    several: tuple[str, ...]
    fills_interleaved: bool
    zero: tuple[int, ...]
    zero_with_stages: tuple[int, ...]
    cp: Mapping[str, str]
    cp_needs: str
    recompute: tuple[str, ...]
    recomputed_blocks: str
    sp_with_experts: bool
    beside_ep: tuple[str, ...]
    expert_groups: bool
    vocabulary: bool
    block_lists: str

    @property
    def is_ours(self) -> bool:
        return self.name == OURS


@dataclass(frozen=True)
class Choice:
    """What a plan decides for all regions at once; ``experts``: some region has experts."""

    mesh: Mesh
    schedule: str = "1f1b"
    vpp: int = 1
    microbatches: int = 1
    zero: int = 0
    zero_shard: int = 0
    sp: bool = False
    cp_kind: str = ""
    experts: bool = False


@dataclass(frozen=True)
class Refusal:
    """``field`` of the plan has the value ``planned``, which the target cannot run: ``why``."""

    field: str
    planned: str
    why: str


@cache
def targets() -> Mapping[str, Target]:
    """Every row of the table by name."""
    rows = read_yaml(TABLE, BadInputError).mapping()
    return {name: _row(name, entry) for name, entry in rows.items()}


def target_named(name: str, option: str = "--target") -> Target:
    """The row; BadInputError naming those there are."""
    if name not in targets():
        raise BadInputError(f"{option} {name}: expected one of {', '.join(targets())}.")
    return targets()[name]


def refusals(target: Target, choice: Choice) -> Iterator[Refusal]:
    """Every part of the choice that the target cannot run."""
    yield from _pipeline(target, choice)
    yield from _zero(target, choice)
    mesh = choice.mesh
    if mesh.cp > 1 and choice.cp_kind not in target.cp:
        yield Refusal("cp", choice.cp_kind, f"its context parallelism is {' or '.join(target.cp)}")
    if mesh.ep > 1:
        beside = [axis for axis in _AXES if getattr(mesh, axis) > 1 and axis not in target.beside_ep]
        for axis in beside:
            planned = f"ep {mesh.ep} beside {axis} {getattr(mesh, axis)}"
            yield Refusal("ep", planned, f"its experts span the ranks of {axis} too")
    if choice.experts and mesh.tp > 1 and not choice.sp and target.sp_with_experts:
        yield Refusal("sp", "experts beside tp without sequence parallelism", "it asks for it there")


def _pipeline(target: Target, choice: Choice) -> Iterator[Refusal]:
    mesh, schedule = choice.mesh, choice.schedule
    if mesh.pp == 1 and choice.vpp == 1:
        return
    if schedule not in target.schedules:
        yield Refusal("schedule", schedule, f"it has {', '.join(target.schedules)}")
    elif choice.vpp > 1 and (schedule in target.one_stage or mesh.pp == 1) and not target.is_ours:
        yield Refusal("vpp", f"{choice.vpp} stages a rank", f"its {schedule} has one a rank")
    elif choice.vpp == 1 and schedule in target.several:
        yield Refusal("vpp", f"{schedule} of one stage a rank", f"its {schedule} needs at least two")
    elif choice.vpp > 1 and target.fills_interleaved and choice.microbatches % mesh.pp:
        planned = f"{choice.microbatches} micro-batches over pp {mesh.pp}"
        yield Refusal("micro_batch", planned, "interleaving needs a multiple of pp")


def _zero(target: Target, choice: Choice) -> Iterator[Refusal]:
    mesh, zero = choice.mesh, choice.zero
    if mesh.replicas == 1:
        return
    if zero not in target.zero:
        yield Refusal("zero", f"ZeRO {zero}", f"it has ZeRO {', '.join(map(str, target.zero))}")
    elif mesh.pp > 1 and zero not in target.zero_with_stages:
        legal = ", ".join(map(str, target.zero_with_stages))
        yield Refusal("zero", f"ZeRO {zero} under pipeline parallelism", f"there it has ZeRO {legal}")
    elif choice.zero_shard and target.expert_groups and mesh.ep > 1:
        groups = mesh.replicas // choice.zero_shard
        if (mesh.replicas // mesh.ep) % groups:
            planned = zero_text(zero, choice.zero_shard)
            yield Refusal("zero_shard", planned, f"{groups} groups do not divide the replicas of an expert")


def _row(name: str, entry: Entry) -> Target:
    fields = [key for key in Target.__dataclass_fields__ if key != "name"]
    row = entry.fields(fields)

    def stages(key: str) -> tuple[int, ...]:
        return tuple(item.whole(0, 3) for item in row[key].items())

    def names(key: str, known: tuple[str, ...]) -> dict[str, str]:
        found = row[key].mapping()
        return {one: item.text() for one, item in found.items() if one in known or item.fail(str(known), one)}

    return Target(
        name=name,
        version=row["version"].text(),
        sources=row["sources"].texts(),
        schedules=names("schedules", SCHEDULES),
        one_stage=row["one_stage"].texts(SCHEDULES),
        several=row["several"].texts(SCHEDULES),
        fills_interleaved=row["fills_interleaved"].flag(),
        zero=stages("zero"),
        zero_with_stages=stages("zero_with_stages"),
        cp=names("cp", _KINDS),
        cp_needs=str(row["cp_needs"].value),
        recompute=row["recompute"].texts(RECOMPUTE),
        recomputed_blocks=row["recomputed_blocks"].text(_BLOCKS),
        sp_with_experts=row["sp_with_experts"].flag(),
        beside_ep=row["beside_ep"].texts(_AXES),
        expert_groups=row["expert_groups"].flag(),
        vocabulary=row["vocabulary"].flag(),
        block_lists=row["block_lists"].text(("any", "one")),
    )
