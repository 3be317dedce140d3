"""What fused kernels compute, in plain PyTorch: one function an op, differentiable, with what it keeps.

Tensors in, a tensor (or two) out. Generated stage modules carry a copy. On a chip for which a kernel of the
same name is registered (``torch.ops.autoplan.rms_norm`` ...) the kernel runs; everywhere else these lines do,
which keep no more than the kernel does. Sums run in single precision or better; results are rounded once.
"""

from __future__ import annotations

from typing import Any

import torch

from autoplan_passes.collectives import Tensor

SIXTEEN_BITS = (torch.bfloat16, torch.float16)


def _kernel(name: str, x: Tensor) -> Any:
    """The registered kernel of that name, for tensors that lie on an accelerator; else None."""
    return getattr(torch.ops.autoplan, name, None) if x.device.type not in ("cpu", "meta") else None


def _exact(x: Tensor) -> Tensor:
    return x.float() if x.dtype in SIXTEEN_BITS else x


def _summed_to(x: Tensor, like: Tensor) -> Tensor:
    """The gradient of a tensor that was broadcast."""
    return x.sum_to_size(like.shape).to(like.dtype)


# --- norms over the last dim ---------------------------------------------------------------------


class _RMSNorm(torch.autograd.Function):
    """Keeps x, the weight and one number a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = _exact(x)
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale * weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight, scale = ctx.saved_tensors
        gradient, unit = _exact(gradients[0]), _exact(x) * scale
        towards = gradient * weight
        of_x = scale * (towards - unit * (towards * unit).mean(-1, keepdim=True))
        return of_x.to(x.dtype), _summed_to(gradient * unit, weight), None


def fused_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x**2) + eps) * weight`` over the last dim."""
    kernel = _kernel("rms_norm", x)
    return kernel(x, weight, eps) if kernel else _RMSNorm.apply(x, weight, eps)  # pyright: ignore[reportReturnType] - torch types apply as Any


class _LayerNorm(torch.autograd.Function):
    """Keeps x, the weight and two numbers a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        wide = _exact(x)
        mean = wide.mean(-1, keepdim=True)
        scale = torch.rsqrt((wide - mean).square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, mean, scale)
        return ((wide - mean) * scale * weight + bias).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight, mean, scale = ctx.saved_tensors
        gradient, unit = _exact(gradients[0]), (_exact(x) - mean) * scale
        towards = gradient * weight
        of_x = scale * (
            towards - towards.mean(-1, keepdim=True) - unit * (towards * unit).mean(-1, keepdim=True)
        )
        return of_x.to(x.dtype), _summed_to(gradient * unit, weight), _summed_to(gradient, weight), None


def fused_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`` over the last dim."""
    kernel = _kernel("layer_norm", x)
    return kernel(x, weight, bias, eps) if kernel else _LayerNorm.apply(x, weight, bias, eps)  # pyright: ignore[reportReturnType] - torch types apply as Any


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of ``x + residual``, and the sum itself."""
    kernel = _kernel("add_rms_norm", x)
    if kernel:
        return kernel(x, residual, weight, eps)
    total = x + residual
    return fused_rms_norm(total, weight, eps), total


def fused_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The norm of ``x + residual``, and the sum itself."""
    kernel = _kernel("add_layer_norm", x)
    if kernel:
        return kernel(x, residual, weight, bias, eps)
    total = x + residual
    return fused_layer_norm(total, weight, bias, eps), total


# --- gated activations -----------------------------------------------------------------------------


class _Gated(torch.autograd.Function):
    """``activation(gate) * up``; keeps both."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return (_activated(_exact(gate), activation)[0] * up).to(gate.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gate, up = ctx.saved_tensors
        gradient = _exact(gradients[0])
        value, slope = _activated(_exact(gate), ctx.activation)
        return (gradient * up * slope).to(gate.dtype), (gradient * value).to(up.dtype), None


def _activated(x: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """An activation and its slope: ``silu``, ``gelu`` (by erf) or ``gelu_tanh``."""
    if activation == "silu":
        share = torch.sigmoid(x)
        return x * share, share * (1 + x * (1 - share))
    if activation == "gelu":
        below = 0.5 * (1 + torch.erf(x * 0.5**0.5))
        return x * below, below + x * torch.exp(-0.5 * x * x) * (0.5 / torch.pi) ** 0.5
    bend = torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))
    inner = (2 / torch.pi) ** 0.5 * (1 + 3 * 0.044715 * x * x)
    return 0.5 * x * (1 + bend), 0.5 * (1 + bend) + 0.5 * x * (1 - bend * bend) * inner


def fused_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``."""
    kernel = _kernel("swiglu", gate)
    return kernel(gate, up) if kernel else _Gated.apply(gate, up, "silu")  # pyright: ignore[reportReturnType] - torch types apply as Any


def fused_geglu(gate: Tensor, up: Tensor, approximate: str) -> Tensor:
    """``gelu(gate, approximate) * up`` (``none`` or ``tanh``)."""
    kernel = _kernel("geglu", gate)
    if kernel:
        return kernel(gate, up, approximate)
    return _Gated.apply(gate, up, "gelu_tanh" if approximate == "tanh" else "gelu")  # pyright: ignore[reportReturnType] - torch types apply as Any


# --- rotary positions ------------------------------------------------------------------------------


class _Rotary(torch.autograd.Function):
    """Keeps the tables alone: a rotation's gradient is the rotation back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        wide = _exact(x)
        left, right = wide.chunk(2, -1)
        return (wide * cos + torch.cat((-right, left), -1) * sin).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        cos, sin = ctx.saved_tensors
        gradient = _exact(gradients[0])
        left, right = (gradient * sin).chunk(2, -1)
        return (gradient * cos + torch.cat((right, -left), -1)).to(gradients[0].dtype), None, None


def fused_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x * cos + cat(-right, left) * sin`` of the halves of the last dim; the tables get no gradient."""
    kernel = _kernel("rotary", x)
    return kernel(x, cos, sin) if kernel else _Rotary.apply(x, cos, sin)  # pyright: ignore[reportReturnType] - torch types apply as Any
