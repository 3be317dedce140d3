"""A plain model and a plan in, the rank's share of a parallel training run out: :func:`parallelize`.

What a rank runs is the generated code of its stage; this module feeds it micro-batches, and brings loss
and gradients together, so that a training loop around ``ParallelModel.step`` sees one model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autoplan.plan import Plan
from autoplan.runtime.agreement import require_equal
from autoplan.runtime.batch import split_batch, tensors_of, to_device
from autoplan.runtime.checkpoint import load_checkpoint, save_checkpoint
from autoplan.runtime.gradients import (
    Owned,
    TiedParameter,
    global_norm,
    scale_gradients,
    set_aside,
    store_whole,
    sum_over_homes,
    whole_tensor,
)
from autoplan.runtime.lengths import further_programs, serving
from autoplan.runtime.load import (
    Place,
    build_stage,
    first_names,
    import_stage,
    model_tensors,
    share_parameters,
    tensor_at,
)
from autoplan.runtime.partial import PartialGradients
from autoplan.runtime.pipeline import Pipeline, RankStage
from autoplan.runtime.prepare import Home, RunProgram, single_part, trace_and_prepare
from autoplan.runtime.pretrained import library_of
from autoplan.runtime.randomness import StepRandomness
from autoplan.runtime.ranks import Ranks, join_ranks, tied_group
from autoplan.runtime.reduction import GradientReduction
from autoplan.runtime.replication import join_replicas, replicas_of
from autoplan.runtime.resume import Checkpoints
from autoplan.runtime.rounding import WeightRefresh
from autoplan.runtime.sharded import ShardedStage
from autoplan.runtime.step_log import StepLog
from autoplan.runtime.weight_files import load_pretrained, save_pretrained
from autoplan.runtime.weighting import piece_weights
from autoplan.runtime.weights import Trained, train_shard, train_whole
from autoplan_passes.placements import parse_placement

SEED_REMEDY = "Put torch.manual_seed(0) before the line that builds the model."
BATCH_REMEDY = (
    "Every rank passes the whole global batch and takes its share: seed the data loading, "
    "torch.manual_seed(0)."
)


class ParallelModel:
    """One rank's share of a model under a plan. Make it with :func:`parallelize`.

    The optimizer takes ``parameters()``: local pieces, updated where they are. Methods marked
    *collective* must be called by every rank.
    """

    def __init__(
        self,
        program: RunProgram,
        model: nn.Module,
        ranks: Ranks,
        stages_dir: Path | None = None,
        others: Sequence[RunProgram] = (),
    ) -> None:
        """``others``: programs for batches of other sizes, which compute with the same parameters."""
        self.program, self.ranks, self.rank, self.mesh = program, ranks, ranks.rank, ranks.mesh
        tensors = model_tensors(model)
        require_equal(tensors, "weights", SEED_REMEDY, ranks.device)
        self.state_names = first_names(model)
        planned = {home.name for home in program.homes}
        self.plain_state = {
            name: tensors[name].detach().cpu().clone()
            for name, canonical in self.state_names.items()
            if canonical not in planned
        }
        part = program.part
        self._zero = part.zero if ranks.shape.replicas > 1 else 0
        self._replicas = join_replicas(ranks, part.zero_shard if self._zero else 0)
        self._low = program.low_precision
        held: dict[tuple[str, str], nn.Parameter] = {}
        here = self._build(program, tensors, held, stages_dir)
        further = [
            self._build(other, tensors, held, stages_dir / f"size_{i}" if stages_dir else None)
            for i, other in enumerate(others, 1)
        ]
        self.stages = {stage.number: stage.module for stage in here}
        self._fully_sharded = [self._shard(number) for number in self.stages] if self._zero > 1 else []
        trained: dict[nn.Parameter, Trained] = {}
        homes = [home for home in program.homes if home.stage in self.stages]
        self.owned = tuple(self._own(home, tensors, trained) for home in homes)
        modules = [stage.module for stages in (here, *further) for stage in stages]
        programs = zip((program, *others), (here, *further))
        self.built = [(one.sources[s.number], s.module) for one, stages in programs for s in stages]
        self._refresh = WeightRefresh(list(trained.values()), modules)
        self._reduction = GradientReduction(list(trained.values()))
        self._partial = PartialGradients(self.owned, ranks)
        self._tied = tuple(self._tie(name) for name in program.tied)
        first = {home.name: home for home in reversed(program.homes)}
        self._first_homes = frozenset(first.values())
        self._pipelines = [Pipeline(s, p, ranks) for p, s in zip((program, *others), (here, *further))]
        self.randomness = StepRandomness(ranks)
        self._fed = False
        self.steps_taken = 0
        self._log = StepLog(self.rank)
        self.library = library_of(model)
        self.pretrained_from: Path | None = None
        self._checkpoints: Checkpoints | None = None

    def step(self, batch: Any) -> torch.Tensor:
        """Forward and backward of one global batch (*collective*); returns the mean loss, on all ranks.

        Every rank passes the whole global batch and takes its share. Gradients are added to ``.grad``,
        already summed and averaged over the ranks. :class:`BadInputError` if the batch does not fit the plan.
        """
        pipeline = self._pipelines[serving([one.program for one in self._pipelines], batch)]
        pieces = split_batch(pipeline.program, batch)
        weights = piece_weights(pipeline.program.loss_terms, pieces)
        if not self._fed:
            require_equal(tensors_of(batch), "global batch", BATCH_REMEDY, self.ranks.device)
            self._fed = True
        set_aside(self._tied)
        parts = [self._refresh, self._reduction, *self._fully_sharded]
        self._partial.begin()
        for part in parts:
            part.begin()
        with self.randomness.use():
            loss = pipeline.run(*self._share(pieces, weights))
        for part in parts:
            part.finish()
        self._partial.finish()
        if self.ranks.shape.replicas > 1:
            dist.all_reduce(loss, group=self.ranks.group("replicas"))
            loss /= self.ranks.shape.replicas
        sum_over_homes(self._tied, self.ranks)
        if self.ranks.shape.pp > 1:
            last = self.ranks.rank_at(pp=self.ranks.shape.pp - 1)
            dist.broadcast(loss, src=last, group=self.ranks.group("pp"))
        self.steps_taken += 1
        self._log.note(self.steps_taken)
        return loss

    def _build(
        self,
        program: RunProgram,
        tensors: dict[str, torch.Tensor],
        held: dict[tuple[str, str], nn.Parameter],
        stages_dir: Path | None,
    ) -> list[RankStage]:
        """This rank's stages of a program, with the parameters of ``held`` where it has them already."""
        ranks, here = self.ranks, list[RankStage]()
        # FSDP2 keeps its shards in fp32 and rounds what it gathers.
        stored = torch.float32 if self._low and self._zero > 1 else self._low
        for number in range(ranks.pp, len(program.stages), ranks.shape.pp):
            source = program.sources[number]
            code = import_stage(source, number, stages_dir)
            if hasattr(code, "bind"):
                vars(code)["bind"]({axis: ranks.group(axis) for axis in ranks.region_axes})
            place = Place(ranks.places, ranks.device)
            split = {r.path for r in source.parameters if replicas_of(r.placement, self._replicas).shards > 1}
            stage = build_stage(code, source, tensors, program.constants, place, self._low, stored, split)
            here.append(RankStage(number, stage, code))
            if self._zero < 2:
                share_parameters(stage, source, held)
        return here

    def _share(
        self, pieces: list[dict[str, torch.Tensor]], weights: list[tuple[float, ...]]
    ) -> tuple[list[dict[str, torch.Tensor]], list[tuple[float, ...]]]:
        """The micro-batches of this replica, on its device, and their weights.

        On cp each rank has a part of a loss that is their sum, and the mean over replicas divides by cp.
        """
        count, cp = self.program.part.microbatches, self.ranks.shape.cp
        own = slice(self.ranks.dp * count, (self.ranks.dp + 1) * count)
        mine = [to_device(piece, self.program, self.ranks.device) for piece in pieces[own]]
        return mine, [tuple(cp * weight for weight in piece) for piece in weights[own]]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters by their names in the user's model, each once."""
        for parameter, name in {owned.parameter: owned.home.name for owned in self.owned}.items():
            yield name, parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, for the optimizer."""
        for _, parameter in self.named_parameters():
            yield parameter

    def zero_grad(self) -> None:
        """Forget all gradients of this rank."""
        for parameter in self.parameters():
            parameter.grad = None

    def train(self) -> ParallelModel:
        """The model itself: how it trains was fixed when it was traced."""
        return self

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients so that their 2-norm over the model is at most ``max_norm`` (*collective*).

        Returns the norm before, each parameter counted once, as ``torch.nn.utils.clip_grad_norm_`` would.
        """
        norm = self.grad_norm()
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        scale_gradients(self.parameters(), factor)
        return norm

    def grad_norm(self) -> torch.Tensor:
        """The 2-norm of all gradients of the model (*collective*)."""
        return global_norm(self.owned, self._first_homes, self.ranks)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The whole model's state as the user's model has it, on the CPU of every rank (*collective*)."""
        whole = self._gather(gradients=False)
        state: dict[str, torch.Tensor] = {}
        for name, canonical in self.state_names.items():
            state[name] = whole[canonical] if canonical in whole else self.plain_state[name]
        return state

    def gradients(self) -> dict[str, torch.Tensor]:
        """Every parameter's whole gradient by name, on the CPU of every rank (*collective*)."""
        return self._gather(gradients=True)

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Set this rank's pieces from a whole state (as :meth:`state_dict` gives it)."""
        for owned in self.owned:
            with torch.no_grad():
                store_whole(
                    owned.parameter, state[owned.home.name].to(self.ranks.device), owned.placement, self.ranks
                )

    def save(
        self,
        path: Path | str,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Any = None,
        extra: Any = None,
    ) -> None:
        """Write a checkpoint into the folder ``path``, each rank its own pieces (*collective*).

        Any plan of the same model resumes from it, on any number of devices. ``extra`` is anything that
        pickles; that of rank 0 is kept. Gradients are not saved: call it between an optimizer's step and the
        next batch.
        """
        save_checkpoint(self, Path(path), optimizer, scheduler, extra)

    def load(
        self, path: Path | str, optimizer: torch.optim.Optimizer | None = None, scheduler: Any = None
    ) -> Any:
        """Take up a run where :meth:`save` left it, each rank reading its own pieces (*collective*).

        Parameters, the optimizer's state, the scheduler, random numbers and ``steps_taken`` are as they were;
        the next batch to feed is the one after so many. Returns ``extra``.
        """
        return load_checkpoint(self, Path(path), optimizer, scheduler)

    def load_pretrained(self, folder: Path | str) -> int:
        """Read weights from safetensors files, as ``save_pretrained`` of transformers writes them.

        Every rank reads its own pieces, and returns how many bytes they are. Call it before training.
        """
        return load_pretrained(self, Path(folder))

    def save_pretrained(self, folder: Path | str, like: Path | str | None = None) -> None:
        """Write weights that ``from_pretrained`` of transformers loads (*collective*).

        Names, dtypes and files are those of ``like``, a folder of the same model (default: the one that
        weights were loaded from), and so is what lies beside them; without one, as transformers chooses.
        """
        save_pretrained(self, Path(folder), Path(like) if like else None)

    def checkpoints(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: Any = None,
        *,
        save: Path | str | None = None,
        every: int = 100,
        resume: Path | str | None = None,
    ) -> Checkpoints:
        """Saving and resuming round the training loop, the same object at every call (*collective*).

        See :class:`autoplan.runtime.resume.Checkpoints`.
        """
        if self._checkpoints is None:
            options: dict[str, Any] = {"save": save, "every": every, "resume": resume}
            self._checkpoints = Checkpoints(self, optimizer, scheduler, **options)
        return self._checkpoints

    def is_first_home(self, home: Home) -> bool:
        """Whether the parameter lives nowhere before this place."""
        return home in self._first_homes

    def whole_state(self, name: str) -> torch.Tensor:
        """One tensor of the model, by its first name, on the CPU of every rank (*collective*)."""
        if name in self.plain_state:
            return self.plain_state[name]
        home = next(home for home in self._first_homes if home.name == name)
        return self._whole(home, gradients=False)

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype of a tensor in the model that computes."""
        facts = self.program.parameters.get(name)
        return facts.dtype if facts else self.plain_state[name].dtype

    def _gather(self, *, gradients: bool) -> dict[str, torch.Tensor]:
        whole: dict[str, torch.Tensor] = {}
        for home in sorted(self._first_homes, key=lambda home: (home.stage, home.path)):
            if not gradients or self.program.parameters[home.name].differentiable:
                whole[home.name] = self._whole(home, gradients=gradients)
        return whole

    def _whole(self, home: Home, *, gradients: bool) -> torch.Tensor:
        shape = self.program.parameters[home.name].shape
        value = torch.empty(shape, dtype=self._dtype(home), device=self.ranks.device)
        if home.stage in self.stages:
            owned = next(item for item in self.owned if item.home == home)
            own = owned.parameter.grad if gradients else owned.parameter.detach()
            own = torch.zeros_like(owned.parameter) if own is None else own
            value = whole_tensor(own, owned.placement, self.ranks)
        if self.ranks.shape.pp > 1:
            value = value.contiguous()
            source = self.ranks.rank_at(pp=home.stage % self.ranks.shape.pp)
            dist.broadcast(value, src=source, group=self.ranks.group("pp"))
        return value.cpu()

    def _dtype(self, home: Home) -> torch.dtype:
        facts = self.program.parameters[home.name]
        return torch.float32 if self._low and facts.differentiable else facts.dtype

    def _shard(self, number: int) -> ShardedStage:
        """Put a stage under FSDP2 (a single number is not shared out, nor what has no copies)."""
        part, source, stage = self.program.part, self.program.sources[number], self.stages[number]
        homes = [home for home in self.program.homes if home.stage == number]
        at_home = {home: tensor_at(stage, home.path) for home in homes}
        shared = {p: replicas_of(home.placement, self._replicas) for home, p in at_home.items() if p.dim()}
        shared = {p: replicas for p, replicas in shared.items() if replicas.shards > 1}
        turns = number == len(self.program.stages) - 1 and part.schedule != "gpipe"
        return ShardedStage(stage, source, shared, self._zero, part.microbatches, self._low, turns=turns)

    def _own(
        self, home: Home, tensors: dict[str, torch.Tensor], trained: dict[nn.Parameter, Trained]
    ) -> Owned:
        parameter: nn.Parameter = tensor_at(self.stages[home.stage], home.path)
        replicas = replicas_of(home.placement, self._replicas)
        if isinstance(parameter.data, DTensor) or not parameter.requires_grad:
            return Owned(home, parameter, replicas)
        if parameter not in trained:
            exact = parse_placement(home.placement).cut(tensors[home.name].detach(), self.ranks.places)
            exact = exact.to(torch.float32) if self._low else exact
            trained[parameter] = (train_shard if self._zero else train_whole)(parameter, exact, replicas)
        return Owned(home, trained[parameter].updated, replicas)

    def _tie(self, name: str) -> TiedParameter:
        homes = self.program.homes_of(name)
        places = sorted({home.stage % self.ranks.shape.pp for home in homes})
        group = tied_group(self.ranks, places) if len(places) > 1 else None
        here = {owned.parameter: owned for owned in reversed(self.owned) if owned.home in homes}
        return TiedParameter(homes, tuple(here.values()), group)


def parallelize(
    model: nn.Module,
    plan: Plan,
    *,
    example_inputs: Any = None,
    loss_fn: Any = None,
    stages_dir: Path | str | None = None,
    batches: Sequence[Any] = (),
) -> ParallelModel:
    """Make this process one rank of ``model`` trained under ``plan``.

    ``example_inputs`` is any batch (dict or tuple) that holds at least one micro-batch; without it the
    plan's own model file makes one. ``loss_fn(outputs, inputs)`` is needed where the model does not return
    its loss. ``stages_dir`` is where the rank's code is written. ``batches``: global batches of the other
    sizes that ``step`` will get, each compiled once, for the same parameters. Start one process per device
    (``torchrun``); the process groups are made here if they are not there. The user's model is only read.
    """
    with torch.random.fork_rng(devices=[]):  # the user's data must stay what they are in one process
        ranks = join_ranks(single_part(plan).mesh)
        program = trace_and_prepare(model, plan, example_inputs=example_inputs, loss_fn=loss_fn)
        others = further_programs(model, plan, program, batches, loss_fn)
        return ParallelModel(program, model, ranks, Path(stages_dir) if stages_dir else None, others)
