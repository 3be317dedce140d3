"""Measured collectives in, ``t(s) = alpha + s*F/bw + c*s/(s+s0)`` fits by kind and number of ranks out.

Intra-node fits come from nccl-tests tables. Inter-node fits are for one rank a node: a measured run of
full nodes is divided by its ranks a node, since each device brings its own share of the network.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

MIB = 2.0**20
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
TABLE_NAMES = {"all_to_all": "alltoall"}
RAMPS_MIB = tuple(2.0**e for e in range(-6, 7))
INTER_NODES = (4, 32, 128, 1024)


@dataclass(frozen=True)
class Fit:
    """One fitted collective in the units of the profile files, and its median relative error."""

    ranks: int
    alpha_us: float
    gb_per_s: float
    ramp_us: float
    ramp_mib: float
    tag: str
    source: str
    error: float = 0.0

    def time_us(self, kind: str, size_bytes: float) -> float:
        moved = size_bytes * traffic(kind, self.ranks) / self.gb_per_s / 1e3
        return self.alpha_us + moved + self.ramp_us * size_bytes / (size_bytes + self.ramp_mib * MIB)


Fits = dict[str, list[Fit]]


def traffic(kind: str, ranks: int) -> float:
    """F: bytes a rank moves per byte of message (nccl-tests' bus bandwidth factors)."""
    if kind == "p2p":
        return 1.0
    return (2.0 if kind == "all_reduce" else 1.0) * (ranks - 1) / ranks


def fit_points(points: Sequence[tuple[float, float]], kind: str, ranks: int, tag: str, source: str) -> Fit:
    """Least squares on relative error over (bytes, microseconds), all coefficients at least 0."""
    candidates = (
        Fit(ranks, *coefficients, ramp_mib, tag, source)
        for ramp_mib in RAMPS_MIB
        for coefficients in _solve(points, traffic(kind, ranks), ramp_mib)
    )
    fit = min(candidates, key=lambda f: sum(e * e for e in _errors(f, points, kind)))
    return replace(fit, error=statistics.median(_errors(fit, points, kind)))


def _solve(
    points: Sequence[tuple[float, float]], factor: float, ramp_mib: float
) -> Iterator[tuple[float, float, float]]:
    """(alpha_us, gb_per_s, ramp_us) for every set of terms that comes out with no negative coefficient."""
    sizes, times = (np.array(column, dtype=float) for column in zip(*points))
    basis = np.stack([np.ones_like(sizes), sizes * factor / 1e3, sizes / (sizes + ramp_mib * MIB)])
    for chosen in ((0, 1, 2), (0, 1), (1, 2), (1,)):
        rows = (basis[list(chosen)] / times).T
        found = np.zeros(3)
        found[list(chosen)] = np.linalg.lstsq(rows, np.ones_like(times), rcond=None)[0]
        if (found >= 0).all() and found[1] > 0:
            yield float(found[0]), float(1 / found[1]), float(found[2])


def _errors(fit: Fit, points: Sequence[tuple[float, float]], kind: str) -> list[float]:
    return [abs(fit.time_us(kind, size) / time - 1) for size, time in points]


def fit_intra(rows: Iterable[Mapping[str, str]], chip: str) -> Fits:
    """2, 4 and 8 ranks of one node, where the aiconfigurator nccl tables have them (a GB200 tray has 4)."""
    rows = [r for r in rows if r["chip"] == chip and "nccl_perf.parquet" in r["source"]]
    fits: Fits = {}
    for kind in KINDS:
        name = TABLE_NAMES.get(kind, kind)
        for ranks in (2, 4, 8):
            found = [r for r in rows if r["op"] == name and int(r["n_ranks"]) == ranks]
            if not found:
                continue
            points = [(float(r["bytes"]), float(r["time_us"])) for r in found]
            fits.setdefault(kind, []).append(fit_points(points, kind, ranks, "measured", found[0]["source"]))
    return fits


def point_to_point(intra: Fits, gb_per_s: float, source: str) -> Fit:
    """Send and receive: measured plateau, start-up and ramp of the 2-rank all-gather (half its size)."""
    pair = intra["all_gather"][0]
    return Fit(2, pair.alpha_us, gb_per_s, pair.ramp_us, pair.ramp_mib / 2, "estimated", source)


def scale(fits: Fits, factor: float, why: str, limit: float = 1e9) -> Fits:
    """A relative's fits for a chip without its own: bandwidth times ``factor``, at most ``limit`` GB/s."""
    return {
        kind: [
            replace(f, gb_per_s=min(f.gb_per_s * factor, limit), tag="estimated", source=why, error=0.0)
            for f in kind_fits
        ]
        for kind, kind_fits in fits.items()
    }


def from_bandwidths(
    gb_per_s_by_ranks: Mapping[int, float], like: Fits, alpha_us: float | None, why: str
) -> Fits:
    """One bus bandwidth for all kinds by ranks; start-up and ramp as ``like``'s, or one given start-up."""
    fits: Fits = {}
    for kind in KINDS:
        for ranks, gb_per_s in gb_per_s_by_ranks.items():
            near = min(like[kind], key=lambda f: abs(f.ranks - ranks))
            alpha, ramp = (near.alpha_us, near.ramp_us) if alpha_us is None else (alpha_us, 0.0)
            fit = Fit(ranks, alpha, gb_per_s, ramp, near.ramp_mib, "estimated", why)
            fits.setdefault(kind, []).append(fit)
    return fits


def fit_inter_h100(rows: Sequence[Mapping[str, str]], nic_gb_per_s: float) -> Fits:
    """All-reduce of full DGX H100 nodes (NVLSTree, InfiniBand), per device; two nodes as four."""
    all_reduce: list[Fit] = []
    for nodes in INTER_NODES:
        found = [
            row
            for row in rows
            if row["chip"] == "DGX-H100" and row["op"] == "all_reduce" and row["nodes"] == str(nodes)
            if row["library"] == "NCCL NVLSTree" and row["bytes"].isdigit()
        ]
        sizes = [float(row["bytes"]) for row in found]
        widths = [float(row["busbw_GBps"]) for row in found]
        points = [(size, _time_us(size, width, 8 * nodes)) for size, width in zip(sizes, widths)]
        whole = fit_points(points, "all_reduce", 8 * nodes, "estimated", found[0]["source"])
        why = f"{whole.source}: full nodes, divided by their 8 devices"
        share = min(whole.gb_per_s / 8, 0.96 * nic_gb_per_s)
        all_reduce.append(
            replace(whole, ranks=nodes, gb_per_s=share, ramp_mib=whole.ramp_mib / 8, source=why)
        )
    pair = replace(all_reduce[0], ranks=2, source=f"as four nodes: {all_reduce[0].source}", error=0.0)
    return _other_kinds([pair, *all_reduce], nic_gb_per_s)


def _time_us(size_bytes: float, bus_gb_per_s: float, ranks: int) -> float:
    return size_bytes * traffic("all_reduce", ranks) / bus_gb_per_s / 1e3


def inter_like(reference: Fits, all_reduce_gb_per_s: float, nic_gb_per_s: float, why: str) -> Fits:
    """The H100's start-up and ramp with another network's bandwidth per device."""
    own = [replace(f, gb_per_s=all_reduce_gb_per_s, source=why, error=0.0) for f in reference["all_reduce"]]
    return _other_kinds(own, nic_gb_per_s)


def _other_kinds(all_reduce: Sequence[Fit], nic_gb_per_s: float) -> Fits:
    """Half of an all-reduce for its two halves; all-to-all and p2p run at 0.96 of the NIC (GTC slides)."""
    halves = [replace(f, alpha_us=f.alpha_us / 2, ramp_us=f.ramp_us / 2, error=0.0) for f in all_reduce]
    half_why = [replace(f, source=f"half of all_reduce: {f.source}") for f in halves]
    slide = "NVIDIA GTC24 S62129 slide via stas00/ml-engineering@744d01e:network/README.md (0.96 of the NIC)"
    wide = 0.96 * nic_gb_per_s
    spread = [replace(f, gb_per_s=wide, source=slide) for f in halves]
    pair = Fit(2, 20.0, wide, 0.0, 1.0, "estimated", f"{slide}; start-up assumed")
    return {
        "all_reduce": list(all_reduce),
        "all_gather": half_why,
        "reduce_scatter": half_why,
        "all_to_all": spread,
        "p2p": [pair],
    }
