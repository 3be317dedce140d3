"""A stage with whole parameters in, the same stage with parameters sharded over the dp axis (ZeRO) out.

FSDP2 (``fully_shard``): one unit a region, the rest in the root. Regions that share a tied parameter stay
in the root unit, so that the shared storage belongs to one unit.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import fully_shard

from autoplan.runtime.ranks import Ranks
from autoplan_codegen.stage import StageSource


def shard_over_replicas(stage: nn.Module, source: StageSource, ranks: Ranks, zero: int) -> None:
    """Shard in place. ``zero`` 3 frees gathered parameters after each use, 1 and 2 keep them till backward."""
    mesh = ranks.mesh["dp"]
    tied = {path.split(".")[0] for pair in source.tied_paths.items() for path in pair}
    free = zero == 3
    for name, region in stage.named_children():
        if name not in tied and any(True for _ in region.parameters()):
            fully_shard(region, mesh=mesh, reshard_after_forward=free)
    fully_shard(stage, mesh=mesh, reshard_after_forward=free)
