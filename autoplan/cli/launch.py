"""How to start a plan's ranks: a plan and a chip's profile in, a command with its environment out."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoplan.hardware import HardwareProfile
from autoplan.plan import Plan
from autoplan.runtime.devices import BACKEND, DEVICE_TYPE


@dataclass(frozen=True)
class Launch:
    """One process a device: ``per_node`` processes on each of ``nodes`` hosts."""

    devices: int
    nodes: int
    per_node: int
    environment: Mapping[str, str]

    def text(self, script: str, arguments: Sequence[str] = ()) -> str:
        """What to type, on every host where there are several."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        hosts = ["--standalone"]
        if self.nodes > 1:
            hosts = [f"--nnodes {self.nodes}", "--rdzv-backend c10d", "--rdzv-endpoint FIRST_HOST:29500"]
        words = ["torchrun", *hosts, f"--nproc-per-node {self.per_node}", shlex.quote(script)]
        return " ".join((*settings, *words, *map(shlex.quote, arguments)))

    def options(self, script: str, arguments: Sequence[str] = ()) -> list[str]:
        """What torchrun is given to start all ranks on this host."""
        return ["--standalone", "--nproc-per-node", str(self.devices), script, *arguments]


def launch_of(plan: Plan, profile: HardwareProfile) -> Launch:
    """As many processes as the plan's meshes hold, node by node; a CPU's ranks all on one host."""
    devices = sum(part.mesh.devices for part in plan.parts)
    environment = dict(profile.software.environment)
    if profile.software.device_type == "cpu":
        environment |= {"CUDA_VISIBLE_DEVICES": ""}  # gloo, even where there is an accelerator
        if profile.software.collective_backend != "gloo":
            environment |= {BACKEND: profile.software.collective_backend}
        return Launch(devices, 1, devices, environment)
    software = profile.software
    if (software.device_type, software.collective_backend) != ("cuda", "nccl"):
        environment |= {DEVICE_TYPE: software.device_type, BACKEND: software.collective_backend}
    per_node = min(devices, profile.devices_per_node)
    return Launch(devices, math.ceil(devices / per_node), per_node, environment)
