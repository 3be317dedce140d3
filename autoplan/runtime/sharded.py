"""A stage with whole parameters in, the same stage with parameters sharded over the dp axis (ZeRO) out.

FSDP2 (``fully_shard``): one unit a region, the rest in the root. Regions that share a tied parameter stay
in the root unit, so that the shared storage belongs to one unit.
"""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from autoplan.runtime.ranks import Ranks
from autoplan_codegen.stage import StageSource


def shard_over_replicas(
    stage: nn.Module, source: StageSource, ranks: Ranks, zero: int, low: torch.dtype | None = None
) -> None:
    """Shard in place. ``zero`` 3 frees gathered parameters after each use, 1 and 2 keep them.

    ``low`` is the dtype in which parameters are gathered (None: as they are); gradients are reduced in fp32.
    """
    # A region may return a view; the warning is about in-place ops on it, and traced graphs have none.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    mesh = ranks.mesh["dp"]
    tied = {path.split(".")[0] for pair in source.tied_paths.items() for path in pair}
    free = zero == 3
    rounding = MixedPrecisionPolicy(
        param_dtype=low, reduce_dtype=torch.float32 if low else None, cast_forward_inputs=False
    )
    for name, region in stage.named_children():
        if name not in tied and any(True for _ in region.parameters()):
            fully_shard(region, mesh=mesh, reshard_after_forward=free, mp_policy=rounding)
    fully_shard(stage, mesh=mesh, reshard_after_forward=free, mp_policy=rounding)
