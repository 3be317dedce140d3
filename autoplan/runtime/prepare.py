"""A captured model and a plan in, everything its ranks run out: a :class:`RunProgram` with stage sources.

Nothing here communicates or holds weights: one process can prepare for all ranks, or every rank for itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from autoplan.capture import capture_model, capture_module, load_model_source
from autoplan.capture.program import Capture
from autoplan.errors import BadInputError, BadPlanError
from autoplan.plan import AxisLayout, Layout, Part, Plan
from autoplan.regions import Region, find_regions
from autoplan.runtime.issued import Issued, StageCollectives, stage_collectives
from autoplan.runtime.local_graphs import GraphPass, local_graphs, local_shapes
from autoplan.runtime.weighting import LossTerm, find_loss_terms
from autoplan.schedules import rank_orders
from autoplan_codegen.stage import StageFacts, StageSource, emit_stage
from autoplan_passes.fuel import Fuel, fuel_from_environment
from autoplan_passes.loss_terms import split_loss
from autoplan_passes.stages import StageProgram, capture_loss, split_stages


@dataclass(frozen=True)
class TensorFacts:
    """Shape at the rank's micro-batch, dtype, and whether gradients flow through it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool


@dataclass(frozen=True)
class UserInput:
    """One entry of the batch: the capture's placeholder and the keyword or position it is given by."""

    name: str
    keyword: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Home:
    """One place where a parameter lives: the stage, the attribute path there, its tp placement."""

    name: str
    stage: int
    path: str
    placement: str


@dataclass(frozen=True)
class RunProgram:
    """What the ranks of one part run. ``homes`` lists every parameter, tied ones once a place.

    ``collectives`` are what the code of each stage issues for one micro-batch, in order; all ranks of a stage
    alike; ``fuel`` the rewrites made. ``low_precision`` is the 16-bit dtype of the code where the optimizer
    keeps fp32 master weights.
    """

    plan: Plan
    part: Part
    stages: tuple[StageProgram, ...]
    sources: tuple[StageSource, ...]
    inputs: tuple[UserInput, ...]
    values: Mapping[str, TensorFacts]
    homes: tuple[Home, ...]
    parameters: Mapping[str, TensorFacts]
    constants: Mapping[str, torch.Tensor]
    loss_dtype: torch.dtype
    collectives: tuple[StageCollectives, ...] = ()
    fuel: Fuel = field(default_factory=Fuel)
    loss_terms: tuple[LossTerm, ...] = (LossTerm(),)
    low_precision: torch.dtype | None = None

    def homes_of(self, name: str) -> tuple[Home, ...]:
        return tuple(home for home in self.homes if home.name == name)

    def issued_on(self, pp_rank: int) -> Iterator[tuple[str, Issued]]:
        """What every rank at this place of the pp axis issues in a step, in order, with its direction."""
        part = self.part
        orders = rank_orders(part.schedule, part.mesh.pp, part.vpp, part.microbatches)
        for task in orders[pp_rank]:
            direction = task.kind.partition("_")[0]
            if task.kind != "backward_weight":
                for one in getattr(self.collectives[task.stage], direction):
                    yield direction, one

    def with_source(self, stage: int, text: str) -> RunProgram:
        """The same program with other code for one stage."""
        sources = list(self.sources)
        sources[stage] = replace(sources[stage], text=text)
        return replace(self, sources=tuple(sources))

    @property
    def tied(self) -> tuple[str, ...]:
        """Parameters with several storages, whose gradients are summed over them."""
        names = [home.name for home in self.homes]
        return tuple(name for name in dict.fromkeys(names) if names.count(name) > 1)


def trace_and_prepare(
    model: nn.Module,
    plan: Plan,
    *,
    example_inputs: Any = None,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    passes: Sequence[GraphPass] = (),
) -> RunProgram:
    """Trace ``model`` at the plan's micro-batch and prepare it; see :func:`autoplan.runtime.parallelize`."""
    part = single_part(plan)
    if example_inputs is None:
        source = load_model_source(plan.model.source)
        example_inputs = source.example_inputs(part.micro_batch, **plan.workload.sizes)
        loss_fn = loss_fn or source.loss
    low = low_precision(plan)
    capture = capture_module(
        model,
        first_samples(example_inputs, part.micro_batch),
        name=plan.model.name,
        dtype=plan.workload.dtype if low else None,
        loss_fn=loss_fn,
        opaque=plan.workload.opaque,
    )
    require_parameters(plan, capture)
    program = prepare(capture, find_regions(capture), plan, passes=passes)
    return replace(program, low_precision=low)


def require_parameters(plan: Plan, capture: Capture) -> None:
    """:class:`BadPlanError` unless the model has as many parameters as the one the plan was made for."""
    found = sum(math.prod(info.shape) for info in capture.parameters.values() if not info.is_buffer)
    if plan.model.parameters not in (0, found):
        raise BadPlanError(
            f"model.parameters: the plan was made for a model of {plan.model.parameters:,} parameters, this "
            f"one has {found:,}.\nSearch again for this model: autoplan search MODEL.py"
        )


def low_precision(plan: Plan) -> torch.dtype | None:
    """The dtype of a mixed-precision plan; None where parameters compute in the dtype they are kept in."""
    if plan.workload.dtype == "fp16":
        raise BadPlanError(
            "Expected a plan in bf16, fp32 or fp64 to run, got fp16, whose gradients underflow without loss "
            "scaling. Search again with --dtype bf16."
        )
    return torch.bfloat16 if plan.workload.dtype == "bf16" else None


def first_samples(inputs: Any, count: int) -> Any:
    """The first ``count`` samples of example inputs, each tensor a copy of its own.

    The batch size is dim 0 of the first tensor; tensors whose dim 0 is a multiple of it are cut in step.
    (Two inputs that share memory would be traced as one.)
    """
    values = list(inputs.values()) if isinstance(inputs, Mapping) else list(inputs)
    batch = next((int(v.shape[0]) for v in values if isinstance(v, torch.Tensor) and v.dim()), 1)
    if batch < count:
        raise BadInputError(
            f"Expected example inputs of at least one micro-batch ({count} samples), got {batch}. "
            "Pass a larger batch as example_inputs."
        )

    def cut(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        whole = not value.dim() or value.shape[0] % batch
        samples = value if whole else value[: value.shape[0] // batch * count]
        return samples.clone(memory_format=torch.contiguous_format)

    if isinstance(inputs, Mapping):
        return {str(key): cut(value) for key, value in inputs.items()}
    return tuple(cut(value) for value in values)


def single_part(plan: Plan) -> Part:
    """The plan's only part; :class:`BadPlanError` for plans with several."""
    if len(plan.parts) != 1:
        names = ", ".join(part.name for part in plan.parts)
        raise BadPlanError(
            f"Expected a plan of one part to run, this one has {len(plan.parts)}: {names}.\n"
            "Search again without giving parts of the model a mesh of their own."
        )
    return plan.parts[0]


def global_batch(part: Part) -> int:
    """Samples of one step."""
    return part.micro_batch * part.microbatches * part.mesh.dp


def prepare_from_file(plan: Plan, model: str | Path | None = None) -> RunProgram:
    """What the ranks run, from the plan and its model's file alone: no weights are made, nothing is run.

    ``model`` None: the file the plan names. Raises BadPlanError when the file's model is another one.
    """
    capture = capture_planned(plan, model, batch=single_part(plan).micro_batch)
    return prepare(capture, find_regions(capture), plan)


def capture_planned(plan: Plan, model: str | Path | None = None, *, batch: int = 1) -> Capture:
    """Trace the plan's model as the plan was made for it, at ``batch`` samples; ``model`` as in
    :func:`prepare_from_file`. Raises BadPlanError when the file's model is another one."""
    workload = plan.workload
    capture = capture_model(
        model or plan.model.source,
        dtype=workload.dtype,
        sizes=workload.sizes,
        opaque=workload.opaque,
        batch=batch,
    )
    plan.require_model(capture.fingerprint, capture.name)
    return capture


def prepare(
    capture: Capture,
    regions: Sequence[Region],
    plan: Plan,
    *,
    passes: Sequence[GraphPass] = (),
    fuel: Fuel | None = None,
) -> RunProgram:
    """Shard, cut into stages and write the code. ``capture`` is traced at the part's micro-batch.

    ``passes`` rewrite each region graph before it is sharded; ``fuel`` None: as ``AUTOPLAN_FUEL`` says.
    """
    part, fuel = single_part(plan), fuel or fuel_from_environment()
    programs = split_stages(capture, regions, part)
    graphs = local_graphs(capture, programs, plan, passes, fuel)
    terms = find_loss_terms(capture)
    if len(terms) > 1:
        last = programs[-1].calls[-1]
        position = last.region.outputs.index(programs[-1].loss)
        graphs[last.graph_key] = split_loss(graphs[last.graph_key], position, len(terms))
    facts = stage_facts(capture, plan, part)
    sources = tuple(emit_stage(program, graphs, facts) for program in programs)
    differentiable = differentiable_values(capture)
    crossing = {name for program in programs for name in program.receives}
    shapes = local_shapes(programs, graphs)
    return RunProgram(
        plan=plan,
        part=part,
        stages=programs,
        sources=sources,
        inputs=user_inputs(capture),
        values={
            n.name: replace(_facts(n, differentiable), shape=shapes[n.name])
            for n in capture.graph.nodes
            if n.name in crossing
        },
        homes=tuple(
            Home(row.name, program.index, row.path, row.placement)
            for program, source in zip(programs, sources)
            for row in source.parameters
        ),
        parameters={
            name: TensorFacts(info.shape, info.dtype, info.trainable)
            for name, info in capture.parameters.items()
            if not info.is_buffer
        },
        constants=capture.constants,
        loss_dtype=next(n for n in capture.graph.nodes if n.name == capture_loss(capture)).meta["val"].dtype,
        collectives=stage_collectives(programs, graphs, part.mesh),
        fuel=fuel,
        loss_terms=terms,
    )


def stage_facts(capture: Capture, plan: Plan, part: Part) -> StageFacts:
    """The facts that the docstrings of the stage files state."""
    return StageFacts(
        model=plan.model.name,
        mesh=str(part.mesh),
        micro_batch=part.micro_batch,
        layouts={key: layout_line(layout) for key, layout in plan.layouts.items()},
        input_keywords={item.name: keyword_name(item) for item in user_inputs(capture)},
        frozen=frozenset(name for name, info in capture.parameters.items() if not info.trainable),
    )


def layout_line(layout: Layout) -> str:
    """``tp 2: qkv.weight S(0), out.weight S(1); forward 2 all_reduce`` (empty where nothing is cut)."""
    axes = [f"{axis} {placed.size}: {_cuts(placed)}" for axis, placed in layout.axes.items()]
    counts = ", ".join(f"{count} {kind}" for kind, count in layout.collectives_forward.items() if count)
    return "; ".join([*axes, *([f"forward {counts}"] if counts and axes else [])])


def _cuts(placed: AxisLayout) -> str:
    cuts = [f"{name.removeprefix('p_')} {state}" for name, state in placed.parameters.items() if state != "R"]
    crossing = {state for state in (*placed.inputs.values(), *placed.outputs.values()) if state != "R"}
    return ", ".join([*cuts, *(f"activations {state}" for state in sorted(crossing))]) or "nothing cut"


def user_inputs(capture: Capture) -> tuple[UserInput, ...]:
    """The entries of the batch that the graph reads."""
    return tuple(
        UserInput(node.name, str(node.meta["source"]), tuple(node.meta["val"].shape), node.meta["val"].dtype)
        for node in capture.graph.nodes
        if node.meta.get("kind") == "input" and isinstance(node.meta.get("val"), torch.Tensor)
    )


def keyword_name(item: UserInput) -> str:
    """The Python name a stage takes an input by."""
    return item.keyword if item.keyword.isidentifier() else item.name


def differentiable_values(capture: Capture) -> frozenset[str]:
    """Names of floating-point nodes through which a trainable parameter gets its gradient."""
    found: set[str] = set()
    for node in capture.graph.nodes:
        if node.op == "placeholder":
            trained = (
                node.meta.get("kind") == "parameter" and capture.parameters[node.meta["source"]].trainable
            )
        else:
            trained = any(source.name in found for source in node.all_input_nodes)
        if trained and _is_floating(node.meta.get("val")):
            found.add(node.name)
    return frozenset(found)


def _is_floating(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_is_floating(item) for item in value)
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _facts(node: fx.Node, differentiable: frozenset[str]) -> TensorFacts:
    value = node.meta["val"]
    return TensorFacts(tuple(value.shape), value.dtype, node.name in differentiable)
