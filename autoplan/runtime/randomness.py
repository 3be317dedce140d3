"""A rank's place in the mesh in, the random numbers of its dropout out, apart from the user's own.

Ranks of one tp group must draw the same numbers (a dropped value is dropped in every piece), replicas and
stages different ones. The user's generator is untouched: every rank goes on drawing the same data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator

import torch

from autoplan.runtime.ranks import Ranks


class StepRandomness:
    """The generator state of the steps, kept from one step to the next."""

    def __init__(self, ranks: Ranks) -> None:
        self.alone = ranks.shape.devices == 1
        self.devices = [ranks.device] if ranks.device.type != "cpu" else []
        self.seed: int | None = (torch.initial_seed() + 7919 * (ranks.pp * ranks.shape.dp + ranks.dp)) % 2**63
        self.states: list[torch.Tensor] = []

    def restart(self, steps: int) -> None:
        """Begin anew, with other numbers than a run that begins with its first step."""
        self.seed, self.states = ((self.seed or 0) + 104729 * steps) % 2**63, []

    @contextlib.contextmanager
    def use(self) -> Generator[None]:
        """Draw from this rank's own generator inside the block (a single process uses the user's)."""
        if self.alone:
            yield
            return
        kind = self.devices[0].type if self.devices else "cuda"
        with torch.random.fork_rng(devices=self.devices, device_type=kind):
            self._enter()
            try:
                yield
            finally:
                self.states = self._now()

    def _enter(self) -> None:
        if not self.states:
            torch.manual_seed(self.seed or 0)
            return
        torch.set_rng_state(self.states[0])
        for device, state in zip(self.devices, self.states[1:]):
            torch.get_device_module(device.type).set_rng_state(state, device)

    def _now(self) -> list[torch.Tensor]:
        devices = [torch.get_device_module(d.type).get_rng_state(d) for d in self.devices]
        return [torch.get_rng_state(), *devices]
