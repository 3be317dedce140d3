"""Low-precision parameters of a stage in, the fp32 master copies that the optimizer updates out.

The gradient of each micro-batch is added to the master's in fp32 as soon as it is complete, and the
low-precision gradient is freed: 2 + 4 + 4 bytes a parameter for weight, master and gradient.
"""

from __future__ import annotations

import torch
from torch import nn


class MasterWeights:
    """Masters of the trainable parameters of a stage, by the parameter they stand for."""

    def __init__(self) -> None:
        self._pairs: dict[nn.Parameter, nn.Parameter] = {}

    def add(self, parameter: nn.Parameter, exact: torch.Tensor) -> nn.Parameter:
        """Make the master of ``parameter``, with the values of ``exact`` (its piece before rounding)."""
        if not parameter.requires_grad or parameter in self._pairs:
            return self._pairs.get(parameter, parameter)
        master = nn.Parameter(exact.detach().to(parameter.device, torch.float32, copy=True).contiguous())
        parameter.register_post_accumulate_grad_hook(self._collect)
        self._pairs[parameter] = master
        return master

    def round(self) -> None:
        """Write the masters' values into the parameters that compute."""
        with torch.no_grad():
            for parameter, master in self._pairs.items():
                parameter.copy_(master)

    def _collect(self, parameter: torch.Tensor) -> None:
        if parameter.grad is None or not isinstance(parameter, nn.Parameter):
            return
        master = self._pairs[parameter]
        if master.grad is None:
            master.grad = parameter.grad.to(torch.float32)
        else:
            master.grad += parameter.grad
        parameter.grad = None
