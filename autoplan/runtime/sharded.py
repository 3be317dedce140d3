"""A stage with whole parameters in, the same stage with parameters sharded over its replicas (ZeRO-2, 3) out.

FSDP2 (``fully_shard``): one unit a region, the rest in the root. Regions that share a tied parameter stay
in the root unit, so that the shared storage belongs to one unit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    FSDPMeshInfo,
    HSDPMeshInfo,
    ShardPlacementResult,
)
from torch.distributed.tensor import Shard

from autoplan.runtime.replication import Replicas, shard_dim
from autoplan_codegen.stage import StageSource


class ShardedStage:
    """One stage under FSDP2, from step to step.

    ZeRO-3 frees gathered parameters after each use; ZeRO-2 gathers them once a step. Groups that hold the
    same shards (HSDP) add their gradients up once a step, after the last micro-batch.
    """

    def __init__(
        self,
        stage: nn.Module,
        source: StageSource,
        replicas: Mapping[nn.Parameter, Replicas],
        zero: int,
        microbatches: int,
        low: torch.dtype | None = None,
        *,
        turns: bool = False,
    ) -> None:
        """Shard ``stage`` in place. ``replicas`` holds every parameter's that is to be sharded.

        ``turns``: a backward follows every forward at once, so the last region's parameters stay gathered.
        ``low`` is the dtype in which parameters are gathered (None: as they are); gradients are reduced in
        fp32.
        """
        # A region may return a view; the warning is about in-place ops on it, and traced graphs have none.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        self._keeps = zero == 2
        kinds = {id(one): one for one in replicas.values()}
        self._groups = any(one.across is not None for one in kinds.values())
        meshes = {key: _mesh_info(one) for key, one in kinds.items()}
        rounding = MixedPrecisionPolicy(
            param_dtype=low, reduce_dtype=torch.float32 if low else None, cast_forward_inputs=False
        )

        def place(parameter: nn.Parameter) -> ShardPlacementResult:
            one = replicas[parameter]
            return ShardPlacementResult(Shard(shard_dim(parameter.shape, one.shards)), meshes[id(one)])

        options: dict[str, Any] = {
            "mesh": next(iter(kinds.values())).mesh,
            "reshard_after_forward": zero == 3,
            "shard_placement_fn": place,
            "mp_policy": rounding,
            "ignored_params": {p for p in stage.parameters() if p not in replicas},
        }
        tied = {path.split(".")[0] for pair in source.tied_paths.items() for path in pair}
        for name, region in stage.named_children():
            if name not in tied and any(True for _ in region.parameters()):
                fully_shard(region, **options)
        fully_shard(stage, **options)
        last = list(stage.children())[-1]
        if turns and isinstance(last, FSDPModule):
            last.set_reshard_after_forward(False, recurse=False)
        self._units = [module for module in stage.modules() if isinstance(module, FSDPModule)]
        self._divide(replicas)
        for unit in self._units:
            unit.set_reshard_after_backward(not self._keeps, recurse=False)
        if self._groups:
            call_at_last_backward(stage, microbatches, lambda: self._sync_groups(True))

    def begin(self) -> None:
        """Before the first micro-batch of a step."""
        if self._groups:
            self._sync_groups(False)

    def finish(self) -> None:
        """After the last one: the optimizer updates shards, so gathered parameters are old now."""
        if self._keeps:
            for unit in self._units:
                unit.reshard()

    def _divide(self, replicas: Mapping[nn.Parameter, Replicas]) -> None:
        """FSDP2 divides summed gradients by the size of a group; experts' are divided by more."""
        by_group = {one.shard_group: one for one in replicas.values()}
        for unit in self._units:
            for group in unit._get_fsdp_state()._fsdp_param_groups:  # pyright: ignore[reportPrivateUsage] - no public name sets one group's
                info = group.mesh_info
                one = by_group[info.shard_process_group] if isinstance(info, FSDPMeshInfo) else None
                if one is not None and one.holds_sums:
                    group.gradient_divide_factor = float(one.divisor)
                    group.force_sum_reduction_for_comms = True  # gloo cannot scale as it sums

    def _sync_groups(self, required: bool) -> None:
        for unit in self._units:
            unit.set_requires_all_reduce(required, recurse=False)


def _mesh_info(one: Replicas) -> FSDPMeshInfo:
    if one.across is None:
        return FSDPMeshInfo(one.mesh, shard_mesh_dim=0)
    return HSDPMeshInfo(one.mesh, shard_mesh_dim=1, replicate_mesh_dim=0)


def call_at_last_backward(stage: nn.Module, microbatches: int, act: Callable[[], None]) -> None:
    """Call ``act`` when the last of every ``microbatches`` backwards of ``stage`` begins."""
    begun = 0

    def begin() -> None:
        nonlocal begun
        begun += 1
        if begun == microbatches:
            begun = 0
            act()

    def watch(module: nn.Module, inputs: Any, output: Any) -> None:
        del module, inputs
        first = [begin]  # emptied by the first gradient that comes back to this micro-batch's outputs

        def arrive(gradient: torch.Tensor) -> None:
            del gradient
            if first:
                first.pop()()

        for value in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(value, torch.Tensor) and value.requires_grad:
                value.register_hook(arrive)

    stage.register_forward_hook(watch)
