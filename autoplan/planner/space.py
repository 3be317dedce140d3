"""The space that is searched: meshes, micro-batches, ZeRO stages and pins; says clearly why it is empty.

Comes in: the workload, what the model allows, and the user's pins. Goes out: :class:`Candidate` records.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from autoplan.errors import BadInputError
from autoplan.plan import FUSE, RECOMPUTE, SCHEDULES, Mesh, RegionPlan
from autoplan.planner import pipelines
from autoplan.region_runs import expand_range, fold_regions
from autoplan_cost_models.collectives import Span
from autoplan_cost_models.zero import ZeroGroups, zero_groups

MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
ZERO_STAGES = (0, 1, 2, 3)
CP_KINDS = ("ulysses", "ring")
MOST = 2**20  # devices of a cluster, samples of a batch: more is a slip of the keyboard
SPACE = (
    "dp x tp x pp over all devices (tp inside a node, with and without sequence parallelism; "
    "experts whole, over a node's ranks or over all of dp that divide them), "
    "cp for long samples (by heads or round a ring, as attention takes less time), "
    "micro-batch 1-32, ZeRO 0-3 over all replicas or groups of them (a node; for ZeRO-3 2, 4, 8.. nodes), "
    f"recompute none/selective/full per region, uneven stages, {pipelines.SPACE}"
)


# tp -> cp -> how attention may run on cp.
Contexts = Mapping[int, Mapping[int, Sequence[str]]]


@dataclass(frozen=True)
class Pins:
    """What the user fixed by hand; None is free. ``regions`` holds (region glob, recompute)."""

    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    sp: int | None = None
    cp: int | None = None
    cp_kind: str | None = None
    ep: int | None = None
    micro_batch: int | None = None
    zero: int | None = None
    zero_shard: int | None = None
    recompute: str | None = None
    schedule: str | None = None
    vpp: int | None = None
    fuse: str | None = None
    regions: tuple[tuple[str, str], ...] = ()

    def recompute_of(self, region: str) -> str | None:
        """The pinned recompute of one region, or None."""
        for glob, value in reversed(self.regions):
            if fnmatch.fnmatch(region, glob):
                return value
        return self.recompute


@dataclass(frozen=True, order=True)
class Inside:
    """How regions are cut over the ranks that share one micro-batch: the key of a region's layout.

    ``sp``: activations between regions are cut along the sequence on tp. ``cp_kind`` is how attention
    runs on cp; ``fuse`` what is fused (:data:`autoplan.plan.FUSE`). What does not apply stays at its default,
    so that equal layouts have equal keys.
    """

    tp: int = 1
    cp: int = 1
    ep: int = 1
    sp: bool = False
    cp_kind: str = ""
    fuse: str = "all"

    @property
    def spans(self) -> dict[str, Span]:
        """The group of every axis inside a region."""
        return {
            "tp": Span(self.tp, 1),
            "cp": Span(self.cp, self.tp),
            "ep": Span(self.ep, self.tp * self.cp),
        }


ALONE = Inside()


@dataclass(frozen=True)
class Candidate:
    """One mesh with a micro-batch, a ZeRO stage and a schedule: everything but boundaries and recompute.

    ``zero_shard`` replicas share one copy of what ZeRO shards, 0: all of them.
    """

    mesh: Mesh
    micro_batch: int
    microbatches: int
    zero: int
    zero_shard: int = 0
    schedule: str = "1f1b"
    vpp: int = 1
    sp: bool = False
    cp_kind: str = ""
    fuse: str = "all"

    @property
    def groups(self) -> ZeroGroups:
        """How ZeRO groups the replicas."""
        return zero_groups(self.mesh, self.zero, self.zero_shard)

    @property
    def inside(self) -> Inside:
        """The part of the candidate that decides layouts."""
        mesh = self.mesh
        return Inside(mesh.tp, mesh.cp, mesh.ep, self.sp, self.cp_kind, self.fuse)


def parse_pins(texts: Sequence[str]) -> Pins:
    """``["tp=8", "layers.0-3:recompute=full"] -> Pins``; errors name the pin and what would be right."""
    plain: dict[str, int | str] = {}
    regions: list[tuple[str, str]] = []
    for text in texts:
        where, colon, setting = text.rpartition(":")
        key, equals, value = setting.partition("=")
        if not equals or not value:
            raise BadInputError(
                f"--pin {text!r}: expected KEY=VALUE or REGION_GLOB:KEY=VALUE, such as --pin tp=8."
            )
        if not colon and key in plain and plain[key] != _plain_value(text, key, value):
            raise BadInputError(f"--pin {text!r}: {key} is pinned to {plain[key]} already; leave one out.")
        if colon:
            if key != "recompute":
                raise BadInputError(
                    f"--pin {text!r}: a region takes recompute={'|'.join(RECOMPUTE)}, got {key!r}."
                )
            regions += [(glob, _choice(text, value, RECOMPUTE)) for glob in _expand_range(where)]
        else:
            plain[key] = _plain_value(text, key, value)
    return Pins(**plain, regions=tuple(regions))  # pyright: ignore[reportArgumentType]  checked by _plain_value


def _plain_value(text: str, key: str, value: str) -> int | str:
    known = [field.name for field in fields(Pins) if field.name != "regions"]
    if key not in known:
        near = difflib.get_close_matches(key, known, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise BadInputError(f"--pin {text!r}: unknown key {key!r}; known: {', '.join(known)}.{hint}")
    if key == "recompute":
        return _choice(text, value, RECOMPUTE)
    if key == "schedule":
        return _choice(text, value, SCHEDULES)
    if key == "cp_kind":
        return _choice(text, value, CP_KINDS)
    if key == "fuse":
        return _choice(text, value, FUSE)
    if key == "sp":
        return int(_choice(text, value, ("0", "1")))
    if not value.isdigit() or (int(value) == 0 and key != "zero"):
        raise BadInputError(f"--pin {text!r}: expected a positive whole number, got {value!r}.")
    if key == "zero" and int(value) not in ZERO_STAGES:
        raise BadInputError(f"--pin {text!r}: this version plans ZeRO stages {ZERO_STAGES}, got {value}.")
    return int(value)


def _choice(text: str, value: str, choices: Sequence[str]) -> str:
    if value not in choices:
        raise BadInputError(f"--pin {text!r}: expected one of {', '.join(choices)}, got {value!r}.")
    return value


def _expand_range(where: str) -> list[str]:
    """``layers.0-3`` -> four globs, each with any prefix; anything else is one glob."""
    return [f"*{name}" for name in expand_range(where) or (where,)]


def divisors(n: int) -> list[int]:
    """All of them, ascending."""
    low = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return low + [n // d for d in reversed(low) if d * d != n]


def require_pinned_regions(pins: Pins, regions: Sequence[str]) -> None:
    """Raises BadInputError for a region pin that no region of the model answers to."""
    for glob, value in pins.regions:
        if not fnmatch.filter(regions, glob):
            runs = fold_regions([RegionPlan(name, "", "none") for name in regions])
            labels = ", ".join(run.label for run in runs)
            raise BadInputError(
                f"--pin '{glob[1:]}:recompute={value}': no region has that name; the model has {labels}."
            )


def require_counts(**counts: int | None) -> None:
    """Raises BadInputError for devices or a batch that is not a whole number from 1 to ``MOST``."""
    for name, count in counts.items():
        if count is not None and not (isinstance(count, int) and 1 <= count <= MOST):  # pyright: ignore[reportUnnecessaryIsInstance]  from the user
            option = f"--{name.replace('_', '-')}"
            raise BadInputError(f"{option} {count}: expected a whole number from 1 to {MOST:,}.")


def candidates(
    devices: int,
    global_batch: int,
    tp_degrees: Sequence[int],
    max_stages: int,
    pins: Pins,
    *,
    micro_batches: Sequence[int] = MICRO_BATCHES,
    sp_degrees: Collection[int] = (),
    contexts: Contexts | None = None,
    node: int = 0,
) -> list[Candidate]:
    """Every legal combination; raises BadInputError naming the pin or batch that leaves none.

    ``sp_degrees`` are the tp degrees that can share the tokens of activations; ``contexts`` the cp degrees
    beside each, with how attention runs on them; ``node`` is how many devices a node has, which ZeRO's groups
    are made of (0: no groups).
    """
    contexts = contexts or {}
    if pins.sp:
        tp_degrees = _sharing(tp_degrees, sp_degrees, pins)
    meshes = list(_meshes(devices, tp_degrees, max_stages, pins, contexts))
    if not meshes:
        raise BadInputError(_no_mesh_message(devices, tp_degrees, max_stages, pins))
    found = [
        Candidate(mesh, size, global_batch // (mesh.dp * size), zero, shard, sp=sp, cp_kind=kind)
        for mesh in meshes
        for size in _micro_batches(global_batch, mesh.dp, pins, micro_batches)
        for zero, shard in _zero_options(mesh, node, pins)
        for kind in (contexts[mesh.tp][mesh.cp] if mesh.cp > 1 else ("",))
        for sp in _sharings(mesh.tp in sp_degrees, pins)[-1 if mesh.cp > 1 else 0 :]
    ]
    if not found:
        raise BadInputError(_no_batch_message(global_batch, meshes, pins.micro_batch or min(micro_batches)))
    return _with_pipelines(found, max_stages, pins)


def _with_pipelines(found: Sequence[Candidate], regions: int, pins: Pins) -> list[Candidate]:
    """Every candidate under every schedule it may run by; raises BadInputError where a pin leaves none."""
    scheduled = [
        replace(one, schedule=schedule, vpp=vpp)
        for one in found
        for schedule, vpp in pipelines.pipelines(
            one.mesh, one.microbatches, one.zero, regions, pins.schedule, pins.vpp
        )
    ]
    if scheduled:
        return scheduled
    one, vpp = found[0], pins.vpp or 1
    schedule = pins.schedule or ("interleaved_1f1b" if vpp > 1 else "1f1b")
    pinned = f"--pin vpp={vpp}" if pins.vpp else f"--pin schedule={schedule}"
    raise BadInputError(f"{pinned}: {pipelines.why_not(one.mesh, one.zero, regions, schedule, vpp)}")


def _sharing(tp_degrees: Sequence[int], sp_degrees: Collection[int], pins: Pins) -> list[int]:
    """The tp degrees of a space with sequence parallelism pinned; BadInputError where there is none."""
    found = [tp for tp in tp_degrees if tp in sp_degrees]
    if not found or (pins.tp and pins.tp not in found):
        degrees = ", ".join(map(str, found)) or "none here"
        raise BadInputError(
            "--pin sp=1: sequence parallelism shares the tokens between blocks among the tp ranks, and "
            f"{f'tp={pins.tp}' if pins.tp else 'no tp degree'} cannot; valid degrees: {degrees}. "
            "Leave the pin out, or pin one of them."
        )
    return found


def _sharings(possible: bool, pins: Pins) -> tuple[bool, ...]:
    """With and without sequence parallelism, or as pinned."""
    if pins.sp is not None:
        return (bool(pins.sp),)
    return (False, True) if possible else (False,)


def _zero_options(mesh: Mesh, node: int, pins: Pins) -> Iterator[tuple[int, int]]:
    """(ZeRO stage, replicas that share a copy): all of them, those in a node; larger groups pay for ZeRO-3
    alone, whose traffic they keep from growing with the cluster."""
    replicas = mesh.replicas
    for zero in (pins.zero,) if pins.zero is not None else ZERO_STAGES:
        if replicas == 1 or zero == 0:
            if pins.zero is not None or zero == 0:
                yield zero, 0
            continue
        if pins.zero_shard:
            if replicas % pins.zero_shard == 0:
                yield zero, pins.zero_shard % replicas
            continue
        yield zero, 0
        group = node // mesh.tp
        while 1 < group < replicas and replicas % group == 0:
            yield zero, group
            group *= 2
            if zero != 3:
                break


def _meshes(
    devices: int, tp_degrees: Sequence[int], max_stages: int, pins: Pins, contexts: Contexts
) -> Iterator[Mesh]:
    insides = [(tp, cp) for tp in tp_degrees for cp in (1, *contexts.get(tp, ()))]
    for tp, cp in insides:
        if (pins.tp and tp != pins.tp) or (pins.cp and cp != pins.cp) or devices % (tp * cp):
            continue
        for pp in divisors(devices // tp // cp):
            dp = devices // tp // cp // pp
            if pp <= max_stages and (not pins.pp or pp == pins.pp) and (not pins.dp or dp == pins.dp):
                yield Mesh(pp, dp, tp, cp)


def _micro_batches(global_batch: int, dp: int, pins: Pins, allowed: Sequence[int]) -> list[int]:
    if global_batch % dp:
        return []
    share = global_batch // dp
    sizes = (pins.micro_batch,) if pins.micro_batch else allowed
    return [size for size in sizes if share % size == 0]


def _no_mesh_message(devices: int, tp_degrees: Sequence[int], max_stages: int, pins: Pins) -> str:
    axes = (("pp", pins.pp), ("dp", pins.dp), ("cp", pins.cp), ("tp", pins.tp))
    pinned = " ".join(f"{axis}={size}" for axis, size in axes if size)
    if pins.tp and pins.tp not in tp_degrees:
        valid = ", ".join(map(str, tp_degrees))
        return f"--pin tp={pins.tp}: the model allows tp degrees {valid}. Type `--pin tp={tp_degrees[-1]}`."
    if pins.pp and pins.pp > max_stages:
        return f"--pin pp={pins.pp}: the model has {max_stages} regions, so pp is at most {max_stages}."
    product = math.prod(size or 1 for _, size in axes)
    near = product * max(1, round(devices / product))
    if pins.dp:  # tp and pp alone are left to fill the devices
        degrees = [pins.tp] if pins.tp else tp_degrees
        stages = [pins.pp] if pins.pp else range(1, max_stages + 1)
        fixed = pins.dp * (pins.cp or 1)
        near = min((fixed * tp * pp for tp in degrees for pp in stages), key=lambda n: abs(n - devices))
    product_axes = " x ".join(axis for axis, size in axes if axis != "cp" or size)
    return (
        f"no mesh of {devices} devices has {pinned or 'legal degrees'}: {product_axes} must equal {devices}"
        f"{f', and the pins make a multiple of {product}' if product > 1 else ''}. "
        f"Type `--devices {near}` or change a pin."
    )


def _no_batch_message(global_batch: int, meshes: Sequence[Mesh], unit: int) -> str:
    steps = sorted({mesh.dp * unit for mesh in meshes})
    around = {
        multiple * step for step in steps for multiple in (global_batch // step, global_batch // step + 1)
    }
    nearest = sorted(around - {0}, key=lambda batch: (abs(batch - global_batch), batch))
    shown = ", ".join(str(batch) for batch in nearest[:4])
    return (
        f"--global-batch {global_batch} divides on no mesh: each takes a multiple of dp x micro-batch "
        f"({', '.join(map(str, steps[:6]))}). The nearest that work: {shown}."
    )
