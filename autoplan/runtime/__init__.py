"""A plan and a model in, a parallel training run (or the proof that it equals one process) out."""

from autoplan.runtime.parallel import ParallelModel, parallelize

__all__ = ["ParallelModel", "parallelize"]
