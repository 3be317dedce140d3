"""The ranks of a launched group in, latency and bandwidth of every collective out.

``t(s) = alpha + s F / bandwidth`` (F as in the profiles), the two numbers that make the relative errors over
all sizes smallest; every rank measures, the slowest counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from autoplan.calibration.timing import Clock
from autoplan_cost_models.collectives import traffic_factor

SIZES_BYTES = (2**10, 2**14, 2**18, 2**20, 2**22, 2**24)
QUICK_BYTES = (2**10, 2**16, 2**20)


@dataclass(frozen=True)
class LinkFit:
    """One collective on ``ranks`` ranks; ``residual`` is the root mean square relative error."""

    kind: str
    ranks: int
    alpha_s: float
    bytes_per_s: float
    residual: float


def measure_links(clock: Clock, sizes: Sequence[int], say: Callable[[str], None]) -> list[LinkFit]:
    """All collectives over the whole world (*collective*)."""
    ranks = dist.get_world_size()
    found: list[LinkFit] = []
    for kind, work in COLLECTIVES.items():
        say(f"{kind} over {ranks} ranks")
        times = [_slowest(clock, _maker(work, size // 4 // ranks * ranks or ranks)) for size in sizes]
        found.append(fit_link(kind, ranks, dict(zip(sizes, times))))
    return found


def fit_link(kind: str, ranks: int, times_s: Mapping[int, float]) -> LinkFit:
    """Least squares of the relative error over message sizes in bytes; both numbers stay positive."""
    factor = traffic_factor(kind, ranks)
    sizes = np.array(list(times_s), dtype=np.float64) * factor
    times = np.array(list(times_s.values()), dtype=np.float64)
    design = np.stack([np.ones_like(sizes), sizes], axis=1) / times[:, None]
    (alpha, per_byte), *_ = np.linalg.lstsq(design, np.ones_like(times), rcond=None)
    if alpha <= 0:
        alpha, per_byte = times.min() * 0.5, float(np.sum(sizes / times) / np.sum((sizes / times) ** 2))
    if per_byte <= 0:
        alpha, per_byte = float(np.median(times)), times[-1] / max(sizes[-1], 1.0) * 1e-3
    errors = (alpha + per_byte * sizes) / times - 1
    return LinkFit(kind, ranks, float(alpha), float(1 / per_byte), float(np.sqrt(np.mean(errors**2))))


def _maker(work: Callable[[torch.Tensor], None], numel: int) -> Callable[[torch.device], Callable[[], None]]:
    def make(device: torch.device) -> Callable[[], None]:
        tensor = torch.ones(numel, device=device)
        return lambda: work(tensor)

    return make


def _slowest(clock: Clock, make: Callable[[torch.device], Callable[[], None]]) -> float:
    """Every rank repeats the same number of times, so that none waits for a collective nobody joins."""
    work = make(clock.device)
    work()
    dist.barrier()
    own = torch.tensor([clock.total_s(work, REPEATS) / REPEATS])
    own = own.to(clock.device)
    dist.all_reduce(own, op=dist.ReduceOp.MAX)
    return float(own)


REPEATS = 5


def _all_reduce(x: torch.Tensor) -> None:
    dist.all_reduce(x)


def _all_gather(x: torch.Tensor) -> None:
    pieces = list(torch.empty_like(x).chunk(dist.get_world_size()))
    dist.all_gather(pieces, pieces[0].clone())


def _reduce_scatter(x: torch.Tensor) -> None:
    pieces = list(x.chunk(dist.get_world_size()))
    dist.reduce_scatter(torch.empty_like(pieces[0]), pieces)


def _all_to_all(x: torch.Tensor) -> None:
    dist.all_to_all_single(torch.empty_like(x), x)


def _p2p(x: torch.Tensor) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    ops = [
        dist.P2POp(dist.isend, x, (rank + 1) % world),
        dist.P2POp(dist.irecv, torch.empty_like(x), (rank - 1) % world),
    ]
    for request in dist.batch_isend_irecv(ops):
        request.wait()


COLLECTIVES: Mapping[str, Callable[[torch.Tensor], None]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "p2p": _p2p,
}
