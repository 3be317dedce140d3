"""One AdamW step over lists of tensors: every element is read once and written once.

The arithmetic is ``torch.optim.AdamW``'s (decoupled weight decay); gradients are multiplied by
``gradient_scale`` first. Where ``masters`` are given (fp32, one a parameter), they are stepped and the
parameter is their rounding.
"""
# pyright: reportUnknownLambdaType=false
# - an operator's lambdas take what its schema says

from __future__ import annotations

import math

import torch
from torch import Tensor

from autoplan_codegen.kernels.operators import launcher, operator, runs_triton


def _adamw_step(
    parameters: list[Tensor],
    gradients: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    masters: list[Tensor],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    gradient_scale: float,
) -> None:
    """``step`` counts from 1."""
    if not parameters:
        return
    size_1, size_2 = lr / (1 - beta1**step), 1 / math.sqrt(1 - beta2**step)
    numbers = (1 - lr * weight_decay, size_1, size_2, beta1, beta2, eps, gradient_scale)
    lists = (parameters, gradients, first, second, masters or parameters)
    if all(runs_triton(*tensors) and _same_layout(*tensors) for tensors in zip(*lists)):
        launcher("optimizer").adamw_step(*lists[:4], masters, *numbers)
        return
    for parameter, gradient, m, v, master in zip(*lists):
        _step_one(parameter, gradient, m, v, master, numbers)


def _same_layout(*tensors: Tensor) -> bool:
    return all(x.is_contiguous() for x in tensors)


def _step_one(
    parameter: Tensor, gradient: Tensor, m: Tensor, v: Tensor, master: Tensor, numbers: tuple[float, ...]
) -> None:
    keep, size_1, size_2, beta1, beta2, eps, scale = numbers
    weight = master.double() if master.dtype == torch.float64 else master.float()
    g = gradient.to(weight.dtype) * scale
    new_m = beta1 * m.to(weight.dtype) + (1 - beta1) * g
    new_v = beta2 * v.to(weight.dtype) + (1 - beta2) * g * g
    weight = weight * keep - size_1 * new_m / (new_v.sqrt() * size_2 + eps)
    for old, new in ((m, new_m), (v, new_v), (master, weight), (parameter, weight)):
        old.copy_(new)


adamw_step = operator(
    "adamw_step",
    "(Tensor(a!)[] parameters, Tensor[] gradients, Tensor(b!)[] first, Tensor(c!)[] second,"
    " Tensor(d!)[] masters, float lr, float beta1, float beta2, float eps, float weight_decay, int step,"
    " float gradient_scale) -> ()",
    _adamw_step,
    lambda *_: None,
    mutates=("parameters", "first", "second", "masters"),
)
