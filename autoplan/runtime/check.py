"""A plan and a model source in, the proof out that the parallel run equals one process: :func:`run_check`.

The reference is the user's model in plain eager PyTorch on the whole global batch. Both start from the
same weights and data; loss, every gradient (gathered to its whole shape) and the global norm are compared.
The error of a gradient is ``max|d| / max(max|g_ref|, G / 100)``, G the largest entry of all gradients.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from autoplan.capture import Capture, ModelSource, capture_module, load_model_source
from autoplan.errors import AutoplanError, BadInputError
from autoplan.plan import AXES, Part, Plan, Stage
from autoplan.regions import Region, find_regions
from autoplan.runtime.batch import split_batch
from autoplan.runtime.exact import in_double, without_dropout
from autoplan.runtime.forked import run_ranks
from autoplan.runtime.local_graphs import GraphPass
from autoplan.runtime.parallel import ParallelModel
from autoplan.runtime.prepare import (
    RunProgram,
    first_samples,
    global_batch,
    prepare,
    require_parameters,
    single_part,
)
from autoplan.runtime.ranks import join_ranks
from autoplan.runtime.reference import Measured, in_pieces, measure_eager, sgd_steps
from autoplan.runtime.shrink import Shrunk
from autoplan.runtime.weighting import piece_weights
from autoplan_passes.fuel import VARIABLE, Fuel

DTYPES = {"fp64": torch.float64, "fp32": torch.float32}
TOLERANCE = {"fp64": 1e-9, "fp32": 1e-5}
MOST_RANKS = 8
FACTOR_TOLERANCE = 1e-6
NO_DOUBLE = ("not implemented for 'Double'", "expected scalar type", "Expected mat_a to be Float32")


@dataclass(frozen=True)
class Difference:
    """A gradient's name and how far it is from the reference, relative."""

    name: str
    relative_difference: float


@dataclass(frozen=True)
class CheckResult:
    """One plan against one process. ``bitwise`` is None where no run reduces in the same order.

    ``worst_parameter`` is that after the steps of :attr:`Checker.steps`, where there are any.
    """

    layout: str
    recompute: str
    ok: bool
    dtype: str
    tolerance: float
    ranks: int
    loss: float
    loss_reference: float
    loss_difference: float
    worst_gradient: Difference
    grad_norm_difference: float
    gradients: int
    global_batch: int
    bitwise: bool | None
    wall_s: float
    worst_parameter: Difference | None = None
    notes: tuple[str, ...] = ()


def run_check(
    plan: Plan, source: str | Path | ModelSource, *, dtype: str = "fp64", timeout_s: float = 120.0
) -> CheckResult:
    """Check one plan; falls back to fp32 where the model has an op without fp64, and says so.

    Raises :class:`BadInputError` for plans of more than eight ranks.
    """
    return Checker(source, plan, dtype=dtype, timeout_s=timeout_s).check(plan)


@dataclass
class Checker:
    """One model and batch, against which several plans are checked: built, traced and run eagerly once.

    ``plan`` gives sizes and opaque modules; the plans checked must have its global batch. ``shrunk`` trims
    the model to a shrunk plan. ``steps``: after how many steps of SGD the parameters are compared too.
    """

    source: str | Path | ModelSource
    plan: Plan
    dtype: str = "fp64"
    timeout_s: float = 120.0
    seed: int = 0
    shrunk: Shrunk | None = None
    steps: int = 0
    notes: list[str] = field(default_factory=list[str])
    passes: tuple[GraphPass, ...] = (without_dropout,)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise BadInputError(f"Expected --dtype fp64 or fp32, got {self.dtype!r}.")
        loaded = self.source if isinstance(self.source, ModelSource) else load_model_source(self.source)
        self.model_source = loaded
        torch.set_num_threads(1)  # the ranks are forked: OpenMP's threads would not survive it
        torch.manual_seed(self.seed)
        self.model = loaded.build()
        if self.shrunk:
            self.shrunk.trim(self.model)
            self._note(self.shrunk.note)
        torch.manual_seed(self.seed + 1)
        self.batch_size = global_batch(single_part(self.plan))
        self.batch = loaded.example_inputs(self.batch_size, **self.plan.workload.sizes)
        self._references: dict[int, Measured] = {}
        self._plain_runs: dict[tuple[Part, str], Measured] = {}
        self._captures: dict[int, tuple[Capture, tuple[Region, ...]]] = {}
        self._use(self.dtype)

    def _use(self, dtype: str) -> None:
        self.dtype = dtype
        self.model.to(DTYPES[dtype])
        self.batch = cast_floats(self.batch, DTYPES[dtype])
        self._references.clear()
        self._plain_runs.clear()
        self._captures.clear()

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def check(self, plan: Plan, layout: str = "", recompute: str = "") -> CheckResult:
        """One plan against the reference; ``layout`` and ``recompute`` name it in the result."""
        try:
            return self._check(plan, layout, recompute)
        except AutoplanError as error:
            if self.dtype != "fp64" or not any(words in str(error) for words in NO_DOUBLE):
                raise
        self._note("fp32 instead of fp64: an op of the model has no fp64 kernel")
        self._use("fp32")
        return self._check(plan, layout, recompute)

    def _check(self, plan: Plan, layout: str, recompute: str) -> CheckResult:
        self._refuse(single_part(plan))
        return self.compare(self.prepare(plan), layout, recompute)

    def compare(self, program: RunProgram, layout: str = "", recompute: str = "") -> CheckResult:
        """Run a prepared program on its ranks and compare it with the reference."""
        started_s = time.perf_counter()
        part = program.part
        reference = self._reference([1.0])
        run = run_ranks(part.mesh.devices, self._body(program), timeout_s=self.timeout_s)[0]
        loss_difference = relative(run.loss, reference.loss)
        worst = farthest(run.gradients, reference.gradients)
        norm_difference = abs(run.norm - reference.norm) / max(reference.norm, 1e-300)
        bitwise = self._bitwise(program, run)
        tolerance = TOLERANCE[self.dtype]
        differences = [loss_difference, worst.relative_difference, norm_difference]
        parameter = farthest(run.parameters, reference.parameters) if self.steps else None
        differences += [parameter.relative_difference] if parameter else []
        close = all(d <= tolerance for d in differences)
        factor = None if close else common_factor(run.gradients, reference.gradients)
        return CheckResult(
            layout=layout or mesh_name(part),
            recompute=recompute or recompute_name(part),
            ok=close and bitwise is not False,
            dtype=self.dtype,
            tolerance=tolerance,
            ranks=part.mesh.devices,
            loss=float(run.loss),
            loss_reference=float(reference.loss),
            loss_difference=loss_difference,
            worst_gradient=worst,
            grad_norm_difference=norm_difference,
            gradients=len(reference.gradients),
            global_batch=self.batch_size,
            bitwise=bitwise,
            wall_s=time.perf_counter() - started_s,
            worst_parameter=parameter,
            notes=(*self.notes, *([_factor_text(factor)] if factor else [])),
        )

    def _refuse(self, part: Part) -> None:
        if part.mesh.devices > MOST_RANKS:
            raise BadInputError(
                f"`check` runs at most {MOST_RANKS} ranks on the CPU, the plan has {part.mesh.devices}. "
                "Check a smaller plan of the same kind: add --shrink."
            )
        if global_batch(part) != self.batch_size:
            raise BadInputError(
                f"Expected a plan for the global batch {self.batch_size}, got one for {global_batch(part)}."
            )

    def prepare(self, plan: Plan, fuel: Fuel | None = None) -> RunProgram:
        """What the ranks of ``plan`` run, without dropout."""
        capture, regions = self.traced(single_part(plan).micro_batch)
        program = prepare(capture, regions, plan, passes=self.passes, fuel=fuel)
        if program.fuel.amount is not None and fuel is None:
            self._note(f"{VARIABLE}: {program.fuel}")
        return program

    def traced(self, micro_batch: int) -> tuple[Capture, tuple[Region, ...]]:
        """The model traced at a micro-batch, in the dtype that is compared in, and its regions."""
        if micro_batch not in self._captures:
            capture = capture_module(
                self.model,
                first_samples(self.batch, micro_batch),
                name=self.plan.model.name,
                loss_fn=self.model_source.loss,
                opaque=self.plan.workload.opaque,
            )
            if not self.shrunk:
                require_parameters(self.plan, capture)
            capture = in_double(capture) if self.dtype == "fp64" else capture
            self._captures[micro_batch] = (capture, find_regions(capture))
        return self._captures[micro_batch]

    def _reference(self, weights: list[float]) -> Measured:
        """Eager on the global batch in as many micro-batches as there are weights, in order."""
        pieces = len(weights)
        if pieces not in self._references:
            batches = in_pieces(self.batch, self.batch_size, pieces)
            self._references[pieces] = measure_eager(
                self.model_source,
                self.model,
                batches,
                weights,
                DTYPES[self.dtype],
                self.timeout_s,
                self.steps,
            )
        return self._references[pieces]

    def _body(self, program: RunProgram) -> Any:
        def body(rank: int) -> Measured | None:
            torch.set_default_dtype(DTYPES[self.dtype])
            parallel = ParallelModel(program, self.model, join_ranks(program.part.mesh))
            loss = parallel.step(self.batch)
            gradients, norm = parallel.gradients(), parallel.grad_norm()
            sgd_steps(parallel.parameters(), lambda: parallel.step(self.batch), self.steps)
            after = parallel.state_dict() if self.steps else {}
            return Measured(loss, gradients, float(norm), after) if rank == 0 else None

        return body

    def _bitwise(self, program: RunProgram, run: Measured) -> bool | None:
        """Equal to the last bit with a run that reduces in the same order; None if there is none.

        On one data and tensor rank that is one process on the same micro-batches (the traced program where
        tracing swapped a kernel: a causal mask for a flag); else the same plan without recompute, if it was
        checked before. Left out are tied parameters of several stages and micro-batches: their sum has
        another order.
        """
        part = program.part
        left_out = frozenset(program.tied if part.microbatches > 1 else ())
        if part.mesh.replicas == 1 and part.mesh.tp == 1:
            weights = piece_weights(program.loss_terms, split_batch(program, self.batch))
            whole = [piece[0] for piece in weights] if len(program.loss_terms) == 1 else None
            if whole and same_bits(run, self._reference(whole), left_out):
                return True
            self._note("bits are compared with the traced program in one process: tracing changed a kernel")
            alone = self.prepare(on_one_stage(program.plan))
            return same_bits(run, run_ranks(1, self._body(alone), timeout_s=self.timeout_s)[0], left_out)
        key = (without_recompute(part), repr(program.plan.layouts))
        if recompute_name(part) == "none":
            self._plain_runs[key] = run
            return None
        return same_bits(run, self._plain_runs[key], frozenset()) if key in self._plain_runs else None


def same_bits(one: Measured, other: Measured, left_out: frozenset[str]) -> bool:
    """Whether loss and every gradient but those left out are equal to the last bit."""
    names = other.gradients.keys() - left_out
    same = all(torch.equal(one.gradients[name], other.gradients[name]) for name in names)
    return same and torch.equal(one.loss, other.loss)


def without_recompute(part: Part) -> Part:
    """The part with nothing recomputed and no forecast."""
    stages = tuple(
        Stage(tuple(replace(entry, recompute="none") for entry in stage.regions)) for stage in part.stages
    )
    return replace(part, stages=stages)


def on_one_stage(plan: Plan) -> Plan:
    """The plan with all regions on one stage and nothing recomputed."""
    part = without_recompute(single_part(plan))
    regions = tuple(entry for stage in part.stages for entry in stage.regions)
    return replace(plan, parts=(replace(part, mesh=replace(part.mesh, pp=1), stages=(Stage(regions),)),))


def cast_floats(batch: Any, dtype: torch.dtype) -> Any:
    """The batch with its floating-point tensors in ``dtype``."""

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    if isinstance(batch, Mapping):
        return {str(key): cast(value) for key, value in batch.items()}
    return tuple(cast(value) for value in batch)


def relative(value: torch.Tensor, reference: torch.Tensor) -> float:
    """``|value - reference| / |reference|`` of two scalars."""
    return float((value.double() - reference.double()).abs() / reference.double().abs().clamp(min=1e-300))


def farthest(tensors: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]) -> Difference:
    """The tensor farthest from its reference, by the measure in the module's docstring."""
    largest = max((float(g.abs().max()) for g in reference.values() if g.numel()), default=0.0)
    worst = Difference("", 0.0)
    for name, expected in reference.items():
        if name not in tensors:
            found = 0.0 if not expected.any() else float("inf")
        elif not expected.numel():
            found = 0.0
        else:
            scale = max(float(expected.abs().max()), 1e-2 * largest, 1e-300)
            found = float((tensors[name].double() - expected.double()).abs().max()) / scale
        if not found <= worst.relative_difference:  # also where it is NaN
            worst = Difference(name, found)
    return worst


def common_factor(tensors: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]) -> float | None:
    """The one number by which all tensors differ from their references, if there is one."""
    names = [name for name in reference if name in tensors]
    found, wanted = (torch.cat([x[name].double().flatten() for name in names]) for x in (tensors, reference))
    factor = float(found @ wanted / wanted.square().sum().clamp(min=1e-300))
    apart = float((found - factor * wanted).abs().max())
    alike = apart <= FACTOR_TOLERANCE * abs(factor) * float(wanted.abs().max())
    return factor if alike and abs(factor - 1) > FACTOR_TOLERANCE else None


def _factor_text(factor: float) -> str:
    return (
        f"every gradient is {factor:.6g} times what it should be: a mean or a sum over ranks is missing, or "
        "there once too often"
    )


def mesh_name(part: Part) -> str:
    """``pp2xtp2``: the axes above 1."""
    degrees = {axis: getattr(part.mesh, axis) for axis in AXES}
    return "x".join(f"{axis}{size}" for axis, size in degrees.items() if size > 1) or "one"


def recompute_name(part: Part) -> str:
    """The recompute kinds of the part's regions, joined by ``+``."""
    kinds = {entry.recompute for stage in part.stages for entry in stage.regions}
    return "+".join(kind for kind in ("none", "selective", "full") if kind in kinds)


def with_recompute(plan: Plan, recompute: str) -> Plan:
    """The plan with one recompute kind for every region."""
    part = single_part(plan)
    stages = tuple(
        replace(stage, regions=tuple(replace(entry, recompute=recompute) for entry in stage.regions))
        for stage in part.stages
    )
    return replace(plan, parts=(replace(part, stages=stages),))
