"""A plan: everything decided about one training run, as frozen data that a person can read.

Comes in: what the search decided, or a YAML file. Goes out: a :class:`Plan`, loss-free YAML
(``Plan.save`` / ``Plan.load``) and a table (``str(plan)``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from autoplan.errors import BadPlanError

if TYPE_CHECKING:
    from autoplan.hardware import HardwareProfile

RECOMPUTE = ("none", "selective", "full")
AXES = ("pp", "dp", "cp", "tp")
FUSE = ("all", "keep_logits", "off")
SCHEDULES = ("1f1b", "gpipe", "interleaved_1f1b", "zb_h1")


@dataclass(frozen=True)
class ModelIdentity:
    """Which model the plan is for; ``fingerprint`` hashes ops, shapes and parameters of the capture."""

    name: str
    source: str
    fingerprint: str
    parameters: int
    trainable_parameters: int
    tied_parameters: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Workload:
    """What is trained and on how many devices; ``sizes`` are passed to ``example_inputs``.

    ``target`` names what is to run the plan (``autoplan.targets``).
    """

    devices: int
    global_batch: int
    dtype: str = "bf16"
    optimizer: str = "adamw"
    sizes: Mapping[str, int] = field(default_factory=dict[str, int])
    tokens_per_sample: int = 1
    pins: tuple[str, ...] = ()
    opaque: tuple[str, ...] = ()
    target: str = "autoplan"


@dataclass(frozen=True)
class Mesh:
    """Degrees of one part's device mesh, outermost first: ranks are laid out pp, dp, cp, tp.

    ``ep`` is no axis of its own: it divides ``dp``, and peers that hold each other's experts are next to
    each other on dp (dp index = outer x ep + ep index).
    """

    pp: int = 1
    dp: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1

    @property
    def devices(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def replicas(self) -> int:
        """Ranks that hold the same dense parameters: data parallel and context parallel."""
        return self.dp * self.cp

    @property
    def stage_devices(self) -> int:
        """Ranks of one pipeline rank; the same piece of the next one is as many ranks further."""
        return self.dp * self.cp * self.tp

    def __str__(self) -> str:
        """``pp 2 x dp 4 x tp 8``; cp and ep where they are used."""
        shown = [f"{axis} {getattr(self, axis)}" for axis in ("pp", "dp", "cp", "ep", "tp")]
        return " x ".join(text for text in shown if text not in ("cp 1", "ep 1"))


@dataclass(frozen=True)
class RegionPlan:
    """How one region runs: its layout (a key of ``Plan.layouts``) and what is recomputed in backward."""

    region: str
    layout: str
    recompute: str = "none"


@dataclass(frozen=True)
class AxisLayout:
    """Placements of one region class on one mesh axis of ``size`` ranks.

    ``parameters`` maps the local name of each parameter (as in the region graph) to ``R``, ``S(d)``, or
    ``R*``: whole, its gradient summed over the axis once a step. ``rules`` maps each node of the region
    graph to ``in,in->out`` in the states of ``autoplan_passes.states`` (nodes not named run replicated).
    ``inputs`` maps the region's input placeholders, ``outputs`` the positions of its outputs (``"0"``,
    ``"1"``), to the states in which they cross the region's boundary; those not named are ``R``.
    """

    size: int
    parameters: Mapping[str, str] = field(default_factory=dict[str, str])
    rules: Mapping[str, str] = field(default_factory=dict[str, str])
    inputs: Mapping[str, str] = field(default_factory=dict[str, str])
    outputs: Mapping[str, str] = field(default_factory=dict[str, str])


NO_AXIS = AxisLayout(1)


@dataclass(frozen=True)
class Layout:
    """Placements of one region class on every axis inside a region.

    ``axes`` holds an entry for each of ``cp``, ``ep`` and ``tp`` above 1; they apply in that order, each to
    the local graph that the one before left. ``kernels`` are the fusions of the region's graph, made before
    it is cut; ``unfused`` says what could have been fused and why it was not.
    Bytes are those of one micro-batch on one device; ``output_bytes`` is what the next region receives.
    """

    region_class: str
    axes: Mapping[str, AxisLayout] = field(default_factory=dict[str, AxisLayout])
    collectives_forward: Mapping[str, int] = field(default_factory=dict[str, int])
    collectives_backward: Mapping[str, int] = field(default_factory=dict[str, int])
    collective_bytes_forward: float = 0.0
    collective_bytes_backward: float = 0.0
    replicated_ops: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    output_bytes: float = 0.0
    unfused: tuple[str, ...] = ()

    def on(self, axis: str) -> AxisLayout:
        """The layout on one axis; of size 1 where the axis is not used."""
        return self.axes.get(axis, NO_AXIS)

    @property
    def tp(self) -> AxisLayout:
        return self.on("tp")

    def replace_axis(self, axis: str, placed: AxisLayout) -> Layout:
        """The same layout with other placements on one axis (left out where its size is 1)."""
        others = {name: one for name, one in self.axes.items() if name != axis}
        return replace(self, axes=others if placed.size == 1 else {**others, axis: placed})


@dataclass(frozen=True)
class MemoryItem:
    """One named contributor to the peak, in bytes on one device."""

    name: str
    bytes: float


@dataclass(frozen=True)
class StagePrediction:
    """What one stage is predicted to take on one of its devices, per micro-batch and per step.

    ``forward_parts_s`` and ``backward_parts_s`` are the same seconds by cause (compute, recompute, the axes
    whose collectives show, zero) and sum to them; ``hop_s`` is the latency to the next stage. A micro-batch
    in flight keeps ``saved_bytes``; the one that runs backward takes ``backward_bytes`` at the peak. Of
    ``backward_s`` a schedule that splits the backward puts off ``weight_s``, and keeps ``deferred_bytes`` of
    each micro-batch until then. Memory is that of the device, which holds all stages of its pipeline rank.
    Once a step: ``weight_gather_s`` is what new weights that arrive add to the first forward, ``tied_sync_s``
    the reduction of parameters that another stage holds too, after the replicas' (``gradient_sync_s``).
    ``link_bytes`` is what the device sends in a step, by mesh axis; ``tied`` is between stages that share
    parameters.
    """

    forward_s: float
    backward_s: float
    recompute_s: float
    tp_communication_s: float
    gradient_sync_s: float
    optimizer_s: float
    sends_bytes: float
    in_flight: int
    memory_limit_bytes: float
    memory_peak_bytes: float
    memory_items: tuple[MemoryItem, ...]
    forward_parts_s: Mapping[str, float] = field(default_factory=dict[str, float])
    backward_parts_s: Mapping[str, float] = field(default_factory=dict[str, float])
    hop_s: float = 0.0
    saved_bytes: float = 0.0
    backward_bytes: float = 0.0
    link_bytes: Mapping[str, float] = field(default_factory=dict[str, float])
    weight_s: float = 0.0
    deferred_bytes: float = 0.0
    weight_gather_s: float = 0.0
    tied_sync_s: float = 0.0


@dataclass(frozen=True)
class Stage:
    """Consecutive regions that run on one rank of the pp axis."""

    regions: tuple[RegionPlan, ...]
    prediction: StagePrediction | None = None


def zero_text(zero: int, zero_shard: int) -> str:
    """A ZeRO stage and its groups, for people."""
    return f"ZeRO {zero}" + (f" in groups of {zero_shard}" if zero and zero_shard else "")


@dataclass(frozen=True)
class Part:
    """A piece of the model with a mesh of its own (a plain model has one part).

    Each rank of the pp axis runs ``vpp`` stages: stage s is on rank s % pp. ``zero_shard`` is the number of
    replicas over which ZeRO divides its states (the rest hold copies: HSDP); 0 divides over all of them.
    ``fuse``: every fusion that the chip has a kernel for, all but the output layer's into its loss
    (``keep_logits``), or none (``off``).
    """

    name: str
    mesh: Mesh
    micro_batch: int
    microbatches: int
    schedule: str
    zero: int
    stages: tuple[Stage, ...]
    vpp: int = 1
    zero_shard: int = 0
    fuse: str = "all"

    @property
    def zero_text(self) -> str:
        """``ZeRO 1``, or ``ZeRO 1 in groups of 8`` where not all replicas share one copy."""
        return zero_text(self.zero, self.zero_shard)


@dataclass(frozen=True)
class Prediction:
    """The forecast of one training step of the whole plan; ``breakdown_s`` sums to ``step_time_s``."""

    step_time_s: float
    tokens_per_s: float
    mfu: float
    model_flops: float
    breakdown_s: Mapping[str, float]
    estimated_inputs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Certificate:
    """How far the plan can be from the best one: ``bound_s`` is a proved lower bound over the space."""

    objective_s: float
    bound_s: float
    gap: float
    meshes_considered: int
    meshes_solved: int
    wall_s: float
    space: str = ""


@dataclass(frozen=True)
class RunnerUp:
    """Another plan that the search priced and that fits, the best it found on its mesh.

    ``recompute`` counts regions by kind; ``memory_peak_bytes`` is the fullest stage's.
    """

    mesh: Mesh
    micro_batch: int
    microbatches: int
    schedule: str
    zero: int
    vpp: int
    zero_shard: int
    recompute: Mapping[str, int]
    step_time_s: float
    mfu: float
    memory_peak_bytes: float
    breakdown_s: Mapping[str, float]


@dataclass(frozen=True)
class Plan:
    """Everything decided about one training run. Build with ``autoplan.search``; never edit in place."""

    model: ModelIdentity
    hardware: str
    hardware_fingerprint: str
    workload: Workload
    parts: tuple[Part, ...]
    layouts: Mapping[str, Layout]
    prediction: Prediction | None = None
    certificate: Certificate | None = None
    assumptions: tuple[str, ...] = ()
    wall_s: Mapping[str, float] = field(default_factory=dict[str, float])
    runners_up: tuple[RunnerUp, ...] = ()

    def save(self, path: str | Path) -> None:
        """Write the plan as YAML that a person can read and that refuses to be edited."""
        from autoplan.plan_file import save_plan

        save_plan(self, path)

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan, exactly as it was saved; BadPlanError names the field that is wrong or was edited."""
        from autoplan.plan_file import load_plan

        return load_plan(path)

    def __str__(self) -> str:
        from autoplan.plan_table import plan_table

        return plan_table(self)

    def require_model(self, fingerprint: str, name: str) -> None:
        """BadPlanError unless the plan was made for exactly this captured model."""
        if fingerprint == self.model.fingerprint:
            return
        if name != self.model.name:
            raise _foreign("model.name", self.model.name, name)
        raise _foreign("model.fingerprint", self.model.fingerprint, fingerprint, "the model changed since")

    def require_hardware(self, profile: HardwareProfile) -> None:
        """BadPlanError unless the plan was made for this profile as it is now."""
        if profile.name != self.hardware:
            raise _foreign("hardware", self.hardware, profile.name)
        if self.hardware_fingerprint and profile.fingerprint != self.hardware_fingerprint:
            since = "the profile changed since"
            raise _foreign("hardware_fingerprint", self.hardware_fingerprint, profile.fingerprint, since)

    def require_sizes(self, sizes: Mapping[str, int]) -> None:
        """BadPlanError unless the plan was made for these sizes of ``example_inputs``."""
        for key in sorted({*sizes, *self.workload.sizes}):
            planned, found = self.workload.sizes.get(key), sizes.get(key)
            if planned != found:
                raise _foreign(f"workload.sizes.{key}", planned, found)


def _foreign(field_path: str, planned: object, found: object, reason: str = "") -> BadPlanError:
    because = f" ({reason})" if reason else ""
    return BadPlanError(
        f"{field_path}: the plan was made for {planned}, found {found}{because}.\n"
        "Search again: its times and memory do not hold here."
    )
