"""A model comes in; the same model with the settings that let it train and trace statically goes out.

The settings are those of libraries that keep a ``config`` on every module (Hugging Face style): no
cache, named outputs, the fused attention call, and experts by grouped matmul instead of a loop.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Generator
from typing import Any
from unittest import mock

from torch import nn

# attribute of a config -> value, set only where the attribute exists
SETTINGS: dict[str, Any] = {
    "use_cache": False,
    "return_dict": True,
    "_attn_implementation": "sdpa",
    "_experts_implementation": "grouped_mm",
}
NOISY_LOGGERS = ("transformers", "torch", "torch._dynamo", "torch.export", "torch._export", "huggingface_hub")


def set_for_training(model: nn.Module) -> dict[tuple[int, str], tuple[Any, Any]]:
    """Apply ``SETTINGS`` to every config in the model; returns what they were, for :func:`restore`."""
    before: dict[tuple[int, str], tuple[Any, Any]] = {}
    for module in model.modules():
        config = module.__dict__.get("config")
        if config is None or isinstance(config, dict):
            continue
        for name, value in SETTINGS.items():
            current = getattr(config, name, None)
            if current is None and name not in vars(config):
                continue
            if current == value or not _supports(module, name):
                continue
            before.setdefault((id(config), name), (config, current))
            with contextlib.suppress(Exception):
                setattr(config, name, value)
    return before


def restore(before: dict[tuple[int, str], tuple[Any, Any]]) -> None:
    """Undo :func:`set_for_training`."""
    for (_, name), (config, value) in before.items():
        with contextlib.suppress(Exception):
            setattr(config, name, value)


def _supports(module: nn.Module, name: str) -> bool:
    """Whether a module says that it can run with the setting (``_supports_sdpa`` and the like)."""
    if name == "_attn_implementation":
        return bool(getattr(module, "_supports_sdpa", False))
    if name == "_experts_implementation":
        can = getattr(module, "_can_set_experts_implementation", None)
        return bool(can()) if callable(can) else False
    return True


@contextlib.contextmanager
def offline() -> Generator[None]:
    """Libraries that download weights fail at once instead of asking the network."""
    constants = sys.modules.get("huggingface_hub.constants")
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {"HF_HUB_OFFLINE": "1"}))
        if constants is not None:
            stack.enter_context(mock.patch.object(constants, "HF_HUB_OFFLINE", True))
        yield


@contextlib.contextmanager
def as_script(path: str) -> Generator[None]:
    """The user's code sees the command line of ``python path``, not autoplan's own options."""
    with mock.patch.object(sys, "argv", [path]):
        yield


@contextlib.contextmanager
def quiet() -> Generator[None]:
    """No log lines and no Python warnings from libraries while a model is built and traced."""
    levels = {name: logging.getLogger(name).level for name in NOISY_LOGGERS}
    for name in levels:
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
