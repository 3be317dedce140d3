"""A tensor's shape in, the tile sizes and number of programs of a kernel that goes over its rows out.

Row kernels move bytes and compute little: a thread takes 16 elements (two or four accesses of 128 bits),
which leaves registers for several blocks on a multiprocessor. These are functions of the shape alone: a
block size that another chip would like better is a matter of measuring it there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import Any

import torch
import triton
from torch import Tensor

from autoplan_codegen.kernels.triton.language import interpreted

ELEMENTS_A_THREAD, THREADS_A_WARP = 16, 32
CPU_PROGRAMS = 2  # in the interpreter: enough that programs share work


def power_of_two(x: int) -> int:
    """The least power of two that is not below x."""
    return 1 << max(0, x - 1).bit_length()


@dataclass(frozen=True)
class Tile:
    """Rows and columns (powers of two) of a program, and its warps."""

    rows: int
    columns: int

    @property
    def warps(self) -> int:
        threads = self.rows * self.columns // ELEMENTS_A_THREAD
        return max(1, min(16, threads // THREADS_A_WARP))


def whole_rows(columns: int, elements: int = 2048) -> Tile:
    """Rows as they are, several where they are short."""
    width = power_of_two(columns)
    return Tile(max(1, elements // width), width)


def pieces_of_rows(columns: int, elements: int = 2048) -> Tile:
    """At most ``elements`` of a row, several rows where they are short."""
    width = min(power_of_two(columns), elements)
    return Tile(max(1, elements // width), width)


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type == "cpu":
        return CPU_PROGRAMS
    properties = torch.get_device_module(device).get_device_properties(device)
    return int(
        getattr(properties, "multi_processor_count", 0) or getattr(properties, "gpu_subslice_count", 64)
    )


def programs(x: Tensor, blocks: int, each: int = 2) -> int:
    """Programs that share blocks of work among them and keep a sum each."""
    return max(1, min(blocks, each * _multiprocessors(x.device)))


def rows_of(x: Tensor) -> Tensor:
    """x as [rows, columns] with columns next to each other; a copy only where no view is that."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x.reshape(-1, x.shape[-1])


def tuned(choices: Sequence[tuple[int, int, int, int]], key: list[str]) -> Callable[[Any], Any]:
    """Choose among (ROWS, COLUMNS, warps, stages) by measuring, once for a chip and each value of ``key``.

    Triton keeps what it measured on disk, by chip and kernel. The interpreter takes the smallest tile.
    """
    if interpreted():
        choices = [(16, 16, 1, 1)]
    configs = [
        triton.Config({"ROWS": rows, "COLUMNS": columns}, num_warps=warps, num_stages=stages)
        for rows, columns, warps, stages in choices
    ]
    kept = {"cache_results": True} if "cache_results" in signature(triton.autotune).parameters else {}
    return triton.autotune(configs, key=key, **kept)
