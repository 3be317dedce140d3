"""Bytes that this process's tensors really take, as they are made and let go: :class:`Allocations`."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Counts storages once each, from the operation that made them to their release.

    ``held`` are tensors there before. ``live_bytes`` is what is alive now, ``peak_bytes`` the most so far.
    """

    def __init__(self, held: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self._known: dict[int, Any] = {}
        for tensor in held:
            self._add(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf)
        return result

    def restart(self) -> None:
        """Forget the peak so far."""
        self.peak_bytes = self.live_bytes

    def _add(self, tensor: torch.Tensor) -> None:
        local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
        local = getattr(local, "elem", local)  # of a result that a collective still writes
        storage = local.untyped_storage()
        where = id(storage)
        known = self._known.get(where)
        if known is not None and known() is storage:
            return
        size = storage.nbytes()
        self._known[where] = weakref.ref(storage)
        weakref.finalize(storage, self._free, size)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _free(self, size: int) -> None:
        self.live_bytes -= size
