"""Which device and collective backend a process uses: what the launcher set in the environment in, both out.

A chip's profile says how torch names it and what its collectives are called; the launch command passes both
on where they are not CUDA's.
"""

from __future__ import annotations

import os

import torch

from autoplan.errors import BadInputError

DEVICE_TYPE, BACKEND = "AUTOPLAN_DEVICE_TYPE", "AUTOPLAN_COLLECTIVE_BACKEND"


def local_device() -> torch.device:
    """The accelerator of this process (``LOCAL_RANK``), or the CPU where there is none.

    Raises BadInputError for a device type that this torch has no module for.
    """
    kind = os.environ.get(DEVICE_TYPE, "cuda")
    module = getattr(torch, kind, None)
    if kind == "cpu" or (kind == "cuda" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if module is None:
        raise BadInputError(
            f"{DEVICE_TYPE}={kind}: expected a device that this torch {torch.__version__} knows, found no "
            f"torch.{kind}. Install the chip's own torch or extension on this machine."
        )
    device = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")))
    module.set_device(device)
    return device


def collective_backend(device: torch.device) -> str:
    """The torch.distributed backend of the device."""
    return os.environ.get(BACKEND) or ("gloo" if device.type == "cpu" else "nccl")
