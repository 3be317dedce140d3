"""The chip's kernels for autoplan's operators: a device in, operators that run them on it out."""

from __future__ import annotations

import importlib
import os

import torch

DEVICE = "cpu"


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Where a real chip calls its own kernel. Its gradient is that of the operator."""
    return torch.rms_norm(x, x.shape[-1:], weight, eps)


def register(device: torch.device) -> None:
    """Called once in every rank, before its stages are built."""
    if device.type != DEVICE or os.environ.get("MOCK_CHIP_FAST") != "1":  # set by the profile
        return
    importlib.import_module("autoplan_codegen.kernels")  # defines the operators
    torch.library.register_kernel("autoplan::rms_norm", DEVICE, rms_norm)
