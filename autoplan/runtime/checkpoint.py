"""A training run under one plan in, a checkpoint out that any other plan of the same model resumes from.

It holds ``model.NAME`` and ``optimizer.state.NAME.KEY`` with the names and whole shapes of the user's model
(tied weights once), as ``torch.distributed.checkpoint`` stores them, so plain torch reads it too; and the
scheduler, the random numbers and the position in the data.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from autoplan.errors import BadInputError
from autoplan.runtime.blocks import Pieces, pieces_of, whole_pieces
from autoplan.runtime.distributed_files import checkpoint_contents, read_checkpoint, write_checkpoint
from autoplan.runtime.gradients import Owned
from autoplan.runtime.load import tensor_at
from autoplan.runtime.prepare import global_batch
from autoplan.runtime.weights import local_of

if TYPE_CHECKING:
    from autoplan.runtime.parallel import ParallelModel

GROUPS, PROGRESS = "optimizer.param_groups", "autoplan.progress"
MOMENTS = "optimizer.state."
SCHEDULER, GENERATORS, USER = "scheduler", "autoplan.generators", "user"


@dataclass(frozen=True)
class Progress:
    """How far a run was: steps taken, and the samples they read."""

    steps: int
    samples: int


def save_checkpoint(
    run: ParallelModel, path: Path, optimizer: torch.optim.Optimizer | None, scheduler: Any, extra: Any
) -> None:
    """See :meth:`ParallelModel.save` (*collective*)."""
    tensors: dict[str, Pieces] = {}
    for owned in run.owned:
        if not run.is_first_home(owned.home):
            continue
        pieces = _pieces(run, owned)
        tensors[f"model.{owned.home.name}"] = pieces
        if optimizer is not None:
            tensors |= _moments(owned, pieces, optimizer)
    if run.rank == 0:
        tensors |= {f"model.{name}": whole_pieces(value) for name, value in run.plain_state.items()}
    objects = _objects(run, optimizer, scheduler, extra) if run.rank == 0 else {}
    if run.ranks.cp == run.ranks.tp == 0:
        objects[_steps_generator(run)] = run.randomness.states
    write_checkpoint(path, tensors, objects)


def load_checkpoint(
    run: ParallelModel, path: Path, optimizer: torch.optim.Optimizer | None, scheduler: Any
) -> Any:
    """See :meth:`ParallelModel.load` (*collective*)."""
    contents = checkpoint_contents(path)
    _require_model(run, contents, path)
    tensors: dict[str, Pieces] = {}
    moments: dict[nn.Parameter, dict[str, torch.Tensor]] = {}
    saved = _saved_moments(contents)
    for number, owned in enumerate(run.owned):
        pieces = _pieces(run, owned)
        tensors[f"model.{owned.home.name}#{number}"] = pieces
        if optimizer is not None and owned.parameter not in moments and owned.parameter.requires_grad:
            moments[owned.parameter] = _empty_moments(owned.parameter, saved.get(owned.home.name, {}))
            for key, value in moments[owned.parameter].items():
                name = f"{MOMENTS}{owned.home.name}.{key}#{number}"
                tensors[name] = pieces.of(local_of(value)) if value.dim() else whole_pieces(value)
    tensors |= {f"model.{name}#": whole_pieces(value) for name, value in run.plain_state.items()}
    wanted = [PROGRESS, GENERATORS, USER, _steps_generator(run)]
    wanted += [GROUPS] if optimizer is not None else []
    wanted += [SCHEDULER] if scheduler is not None else []
    missing = [name for name in (*wanted[:1], *wanted[4:]) if name not in contents]
    if missing:
        raise BadInputError(f"{path} has no {missing[0]}: it was saved without. Load it without, too.")
    found = read_checkpoint(path, tensors, [name for name in wanted if name in contents])
    put_buffers(run)
    if optimizer is not None:
        _put_optimizer(optimizer, found[GROUPS], moments, path)
    if scheduler is not None:
        scheduler.load_state_dict(found[SCHEDULER])
    _put_random(run, found)
    run.steps_taken = _steps(found[PROGRESS], run, path)
    return found.get(USER)


def saved_progress(path: Path) -> Progress:
    """How far the run was that wrote a checkpoint; BadInputError where it is none (*collective*)."""
    checkpoint_contents(path)
    return read_checkpoint(path, {}, [PROGRESS])[PROGRESS]


def steps_passed(progress: Progress, run: ParallelModel, path: Path) -> int:
    """The steps of this run that have read as many samples; BadInputError where no number of them has."""
    return _steps(progress, run, path)


def _steps(progress: Progress, run: ParallelModel, path: Path) -> int:
    size = global_batch(run.program.part)
    if progress.samples % size:
        raise BadInputError(
            f"{path} was saved after {progress.samples} samples, which is no number of global batches of "
            f"{size}. Resume with a global batch that divides it, such as that of the first run."
        )
    return progress.samples // size


def _pieces(run: ParallelModel, owned: Owned) -> Pieces:
    return pieces_of(owned, run.program.parameters[owned.home.name].shape, run.ranks)


def _moments(owned: Owned, pieces: Pieces, optimizer: torch.optim.Optimizer) -> dict[str, Pieces]:
    """The optimizer's tensors of one parameter: they lie as it does, but for single numbers."""
    found: dict[str, Pieces] = {}
    for key, value in optimizer.state.get(owned.parameter, {}).items():
        name = f"{MOMENTS}{owned.home.name}.{key}"
        if value is None:
            continue
        if not isinstance(value, torch.Tensor):
            found[name] = whole_pieces(torch.tensor(value))
        elif local_of(value).shape == pieces.piece.shape and value.dim():
            found[name] = pieces.of(local_of(value).detach())
        elif value.numel() == 1:
            found[name] = whole_pieces(local_of(value).detach().reshape(()))
        else:
            raise BadInputError(
                f"{type(optimizer).__name__} keeps {key!r} of shape {list(value.shape)} for "
                f"{owned.home.name}, whose piece here has shape {list(pieces.piece.shape)}: that cannot be "
                "cut another way. Save without the optimizer, or use one whose state is shaped like its "
                "parameters."
            )
    return found


def _objects(
    run: ParallelModel, optimizer: torch.optim.Optimizer | None, scheduler: Any, extra: Any
) -> dict[str, Any]:
    objects: dict[str, Any] = {
        PROGRESS: Progress(run.steps_taken, run.steps_taken * global_batch(run.program.part)),
        GENERATORS: {
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "shared": run.randomness.alone,
        },
        USER: extra,
    }
    if optimizer is not None:
        groups = optimizer.state_dict()["param_groups"]
        objects[GROUPS] = [{k: v for k, v in group.items() if k != "params"} for group in groups]
    if scheduler is not None:
        objects[SCHEDULER] = scheduler.state_dict()
    return objects


def _steps_generator(run: ParallelModel) -> str:
    """The name of the numbers that this rank's dropout draws: they go on in a mesh of the same shape."""
    return f"autoplan.steps.{run.ranks.shape}.{run.ranks.pp}.{run.ranks.dp}".replace(" ", "")


def _require_model(run: ParallelModel, contents: Mapping[str, Any], path: Path) -> None:
    """BadInputError unless the checkpoint has every tensor of the model, with its shape."""
    shapes = {name: tuple(facts.shape) for name, facts in run.program.parameters.items()}
    shapes |= {name: tuple(value.shape) for name, value in run.plain_state.items()}
    for name, shape in shapes.items():
        stored = contents.get(f"model.{name}")
        if not isinstance(stored, TensorStorageMetadata):
            raise BadInputError(f"{path} has no {name}: it was saved for another model.")
        if tuple(stored.size) != shape:
            raise BadInputError(
                f"{path} has {name} of shape {list(stored.size)}, the model's has {list(shape)}: it was "
                "saved for another model."
            )


def _saved_moments(
    contents: Mapping[str, TensorStorageMetadata | BytesStorageMetadata],
) -> dict[str, dict[str, TensorStorageMetadata]]:
    """What the checkpoint has of the optimizer's tensors, by parameter and key."""
    found: dict[str, dict[str, TensorStorageMetadata]] = {}
    for full, stored in contents.items():
        if full.startswith(MOMENTS) and isinstance(stored, TensorStorageMetadata):
            name, _, key = full.removeprefix(MOMENTS).rpartition(".")
            found.setdefault(name, {})[key] = stored
    return found


def _empty_moments(
    parameter: nn.Parameter, saved: Mapping[str, TensorStorageMetadata]
) -> dict[str, torch.Tensor]:
    """A tensor for everything that the checkpoint has of one parameter's optimizer state."""
    return {
        key: torch.zeros_like(parameter, dtype=stored.properties.dtype, requires_grad=False)
        if len(stored.size)
        else torch.zeros((), dtype=stored.properties.dtype)
        for key, stored in saved.items()
    }


def _put_optimizer(
    optimizer: torch.optim.Optimizer,
    groups: list[dict[str, Any]],
    moments: Mapping[nn.Parameter, Mapping[str, torch.Tensor]],
    path: Path,
) -> None:
    if len(groups) != len(optimizer.param_groups):
        raise BadInputError(
            f"{path} was saved with {len(groups)} groups of parameters in the optimizer, this one has "
            f"{len(optimizer.param_groups)}. Make the optimizer as the first run did."
        )
    numbered = {p: i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    state = {numbered[p]: dict(values) for p, values in moments.items() if p in numbered and values}
    told = [
        {**saved, "params": [numbered[p] for p in group["params"]]}
        for saved, group in zip(groups, optimizer.param_groups)
    ]
    optimizer.load_state_dict({"state": state, "param_groups": told})


def put_buffers(run: ParallelModel) -> None:
    """Bring buffers that were read into the stages."""
    for source, stage in run.built:
        for path, name in source.buffers.items():
            if name in run.plain_state:
                tensor_at(stage, path).copy_(run.plain_state[name])


def _put_random(run: ParallelModel, found: Mapping[str, Any]) -> None:
    """The user's generators go on; dropout's too where the mesh is the same, else it starts anew, seeded by
    how far the run is."""
    states = found.get(GENERATORS)
    if states:
        torch.set_rng_state(states["torch"])
        random.setstate(states["python"])
        np.random.set_state(states["numpy"])
        # A run whose data had a generator to itself keeps that on one process, too.
        run.randomness.alone = run.randomness.alone and states["shared"]
    steps = found.get(_steps_generator(run))
    if steps is not None:
        run.randomness.states = list(steps)
    else:
        run.randomness.restart(found[PROGRESS].steps)
