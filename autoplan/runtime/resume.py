"""A training loop in, checkpoints of it on the way and its continuation from one out: :class:`Checkpoints`.

A resumed script runs from its first line. Batches that were trained on before pass by unused, so that
whatever makes them (epochs, shuffling, streams) comes to the same place; then the checkpoint is loaded.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from autoplan.errors import BadInputError
from autoplan.runtime.checkpoint import load_checkpoint, save_checkpoint, saved_progress, steps_passed

if TYPE_CHECKING:
    from autoplan.runtime.parallel import ParallelModel


class Checkpoints:
    """Saves and resumes around one training loop. Make it with :meth:`ParallelModel.checkpoints`.

    In the loop: ``if checkpoints.passed(): continue`` before the batch is trained on, ``after_step()`` at the
    end, ``finish()`` below it. All are *collective*.
    """

    def __init__(
        self,
        run: ParallelModel,
        optimizer: torch.optim.Optimizer,
        scheduler: Any = None,
        *,
        save: Path | str | None = None,
        every: int = 100,
        resume: Path | str | None = None,
    ) -> None:
        """``save``: a folder that a checkpoint is written into every ``every`` batches; ``resume``: such a
        folder, of which the newest is taken (none yet where it is ``save``: begin), or one checkpoint."""
        if every < 1:
            raise BadInputError(f"Expected to save every 1 or more steps, got {every}.")
        self._run, self._optimizer, self._scheduler = run, optimizer, scheduler
        self._folder, self._every = Path(save) if save else None, every
        self._start = _newest(Path(resume), may_be_empty=resume == save) if resume else None
        self._seen, self._until = 0, 0
        if self._start is not None:
            self._until = steps_passed(saved_progress(self._start), run, self._start)
            # A schedule by epoch steps while batches pass by, and is then loaded.
            warnings.filterwarnings("ignore", message=r"Detected call of `lr_scheduler\.step\(\)` before")
        self._saved = self._until
        self._updated = False
        optimizer.register_step_post_hook(self._note_update)
        if self._start is not None and not self._until:
            self._resume(self._start)

    def passed(self) -> bool:
        """Whether the batch at hand was trained on before the checkpoint that is resumed from."""
        if self._start is None:
            return False
        self._seen += 1
        if self._seen == self._until:
            self._resume(self._start)
        return True

    def after_step(self) -> None:
        """Save where a checkpoint is due and the gradients of all batches are in the weights."""
        due = self._run.steps_taken - self._saved >= self._every
        if due and self._updated:
            self._save()
        self._updated = False

    def finish(self) -> None:
        """Save the end of training, unless it is saved."""
        if self._start is not None:
            raise BadInputError(
                f"{self._start} is {self._until} batches into the data, which ended after {self._seen}: "
                "there is nothing left to train."
            )
        if self._run.steps_taken > self._saved:
            self._save()

    def _save(self) -> None:
        self._saved = self._run.steps_taken
        if self._folder is not None:
            path = self._folder / f"step_{self._saved:08d}"
            save_checkpoint(self._run, path, self._optimizer, self._scheduler, None)

    def _resume(self, path: Path) -> None:
        load_checkpoint(self._run, path, self._optimizer, self._scheduler)
        self._start = None
        if self._run.rank == 0:
            print(f"resumed from {path}, after {self._until} steps", file=sys.stderr)

    def _note_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        del optimizer, args, kwargs
        self._updated = True


def _newest(folder: Path, *, may_be_empty: bool) -> Path | None:
    """The checkpoint at ``folder``, or the last of those in it that were written to their end."""
    if (folder / ".metadata").is_file():
        return folder
    steps = sorted(path for path in folder.glob("step_*") if (path / ".metadata").is_file())
    if not steps and not may_be_empty:
        raise BadInputError(
            f"nothing to resume in {folder}: expected a checkpoint, or a folder of them (step_00000100...). "
            "Where it is also the folder to save to, a run begins when it is empty."
        )
    return steps[-1] if steps else None
