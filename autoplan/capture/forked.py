"""A function of plain result comes in; it runs in a forked copy of this process, beside this one."""

from __future__ import annotations

import gc
import multiprocessing
import os
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch


class Beside:
    """Runs ``function()`` in a forked child; ``result()`` is what it gave, or None when that failed.

    The result must be picklable and the function must not need this process's threads. Where the
    system cannot fork, ``result()`` is None at once and the caller computes it itself.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self._process = None
        self._receiver: Connection | None = None
        if not hasattr(os, "fork") or (os.cpu_count() or 1) < 2:
            return
        context = multiprocessing.get_context("fork")
        self._receiver, sender = context.Pipe(duplex=False)
        self._process = context.Process(target=_answer, args=(function, sender), daemon=True)
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # Python 3.12 warns of forking beside threads; the child uses none
            self._process.start()
        sender.close()

    def result(self, timeout_s: float) -> Any:
        """What the function gave, or None: no fork, an exception in the child, or no answer in time."""
        if self._process is None or self._receiver is None:
            return None
        value = None
        try:
            if self._receiver.poll(timeout_s):
                value = self._receiver.recv()
        except EOFError:
            value = None
        self._receiver.close()
        if self._process.is_alive() and value is None:
            self._process.kill()
        self._process.join()
        return value


def _answer(function: Callable[[], Any], sender: Connection) -> None:
    """The child: send the answer and leave without running anybody's exit code."""
    gc.disable()
    torch.set_num_threads(1)  # OpenMP's threads are not copied by a fork: a parallel loop would wait for them
    try:
        sender.send(function())
        sender.close()
    except BaseException:
        os._exit(1)
    os._exit(0)
