"""A function of the rank in, its result from every rank out, each rank a forked process with gloo.

Forking after the imports brings up eight ranks in 0.2 s (spawning: 6 s). A rank that fails ends the run:
its error is raised here with its rank; so does a run that takes longer than its timeout.
"""

from __future__ import annotations

import os
import pickle
import selectors
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from autoplan.errors import AutoplanError

T = TypeVar("T")


class RankError(AutoplanError):
    """A rank that raised or did not answer in time; the message holds its rank and what it said."""

    exit_code = 1


@dataclass
class _Child:
    rank: int
    pid: int
    answer: int
    data: bytearray = field(default_factory=bytearray)


def run_ranks(count: int, body: Callable[[int], T], *, timeout_s: float = 120.0) -> list[T]:
    """Run ``body(rank)`` in ``count`` forked processes that form one gloo world; their results by rank.

    Results travel pickled. Raises :class:`RankError`; an :class:`AutoplanError` of a rank keeps its message.
    """
    with tempfile.TemporaryDirectory(prefix="autoplan_ranks_") as folder:
        store = str(Path(folder) / "store")
        children = [_fork(rank, count, body, store, timeout_s) for rank in range(count)]
        try:
            answers = _collect(children, time.monotonic() + timeout_s)
        finally:
            _end(children)
    failed = [(rank, text) for rank, (good, text) in sorted(answers.items()) if not good]
    if failed:
        rank, text = failed[0]
        raise RankError(f"rank {rank} of {count} failed:\n{text}")
    if len(answers) < count:
        silent = [child.rank for child in children if child.rank not in answers]
        raise RankError(
            f"ranks {silent} of {count} did not finish in {timeout_s:.0f} s: a collective that not every "
            "rank issues, or a machine too busy. Run again, or raise --timeout."
        )
    return [answers[rank][1] for rank in range(count)]


def _fork(rank: int, count: int, body: Callable[[int], Any], store: str, timeout_s: float) -> _Child:
    answer, writer = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns that other threads do not survive a fork; the ranks use none of them.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        os.close(writer)
        return _Child(rank, pid, answer)
    code = 1
    try:
        os.close(answer)
        message = _answer(rank, count, body, store, timeout_s)
        with os.fdopen(writer, "wb") as stream:
            stream.write(message)
        code = 0
    finally:
        os._exit(code)


def _answer(rank: int, count: int, body: Callable[[int], Any], store: str, timeout_s: float) -> bytes:
    """What a rank sends back: ``(True, result)`` or ``(False, what went wrong)``."""
    try:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, count),
            rank=rank,
            world_size=count,
            timeout=timedelta(seconds=timeout_s),
        )
        result = body(rank)
        message = pickle.dumps((True, result))
        dist.destroy_process_group()
    except AutoplanError as error:
        message = pickle.dumps((False, str(error)))
    except BaseException:
        message = pickle.dumps((False, traceback.format_exc()))
    return message


def _collect(children: list[_Child], deadline_s: float) -> dict[int, tuple[bool, Any]]:
    """Read every pipe to its end, or until the deadline; stops at the first rank that failed."""
    answers: dict[int, tuple[bool, Any]] = {}
    with selectors.DefaultSelector() as selector:
        for child in children:
            selector.register(child.answer, selectors.EVENT_READ, child)
        while selector.get_map() and (left_s := deadline_s - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                child: _Child = key.data
                chunk = os.read(child.answer, 1 << 20)
                child.data += chunk
                if chunk:
                    continue
                selector.unregister(child.answer)
                answers[child.rank] = (
                    pickle.loads(child.data) if child.data else (False, "the process died without a word")
                )
                if not answers[child.rank][0]:
                    return answers
    return answers


def _end(children: list[_Child]) -> None:
    """Close the pipes and end what still runs."""
    for child in children:
        os.close(child.answer)
        try:
            finished, _ = os.waitpid(child.pid, os.WNOHANG)
        except ChildProcessError:
            continue
        if not finished:
            os.kill(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)
