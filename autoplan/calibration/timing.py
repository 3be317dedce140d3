"""A piece of work in, the seconds it takes here out: warmed up, repeated, the median of several runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Clock:
    """Times work on one device.

    ``batch_s`` is how long one batch of repetitions lasts at least; ``batches`` how many are compared.
    The median of the batches is the answer: a machine that others use is slow now and then, never fast.
    """

    device: torch.device
    batch_s: float = 0.02
    batches: int = 5

    def seconds(self, work: Callable[[], Any]) -> float:
        """Median seconds of one repetition."""
        work()
        self.wait()
        once = self.total_s(work, 1)
        repeats = max(1, min(1000, int(self.batch_s / max(once, 1e-7))))
        return statistics.median(self.total_s(work, repeats) / repeats for _ in range(self.batches))

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if self.device.type != "cpu":
            torch.get_device_module(self.device.type).synchronize(self.device)

    def total_s(self, work: Callable[[], Any], repeats: int) -> float:
        """Seconds of so many repetitions, the device waited for."""
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        self.wait()
        return time.perf_counter() - start
