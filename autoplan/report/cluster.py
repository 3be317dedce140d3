"""Traffic of a step on the cluster's links: a plan and its chip's profile in, bytes by axis and link out.

What a device sends on each axis is in the plan; how far an axis reaches follows from the order of ranks and
the profile's node. On a group that spans nodes with g ranks in each, a ring's traffic leaves the node once
in g hops; in an all-to-all what goes to other nodes does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autoplan.hardware import HardwareProfile
from autoplan.plan import Mesh, Part
from autoplan_cost_models.collectives import Span
from autoplan_cost_models.zero import zero_groups

FAST, NODE, NETWORK = "fast domain", "node", "network"
TIER_WORDS: Mapping[str, str] = {
    FAST: "inside a fast domain",
    NODE: "inside a node",
    NETWORK: "between nodes",
}


@dataclass(frozen=True)
class AxisTraffic:
    """What the busiest device sends on one axis in a step, and over which links.

    ``rank`` is that device's place on the pp axis, ``by_tier`` its bytes on each kind of link.
    """

    axis: str
    size: int
    span: Span
    rank: int
    sent_bytes: float
    by_tier: Mapping[str, float]


@dataclass(frozen=True)
class NodeGroup:
    """``count`` nodes whose devices do the same, from global rank ``first`` on: device d is on pipeline rank
    ``stages[d]``."""

    first: int
    stages: tuple[int, ...]
    count: int


def axis_spans(mesh: Mesh) -> dict[str, Span]:
    """The group of every axis that is used; pp as the pair of neighbouring stages, ``tied`` as the first and
    the last."""
    spans = {
        "tp": Span(mesh.tp, 1),
        "cp": Span(mesh.cp, mesh.tp),
        "ep": Span(mesh.ep, mesh.tp * mesh.cp),
        "dp": zero_groups(mesh, 0).all,
        "pp": Span(2 if mesh.pp > 1 else 1, mesh.stage_devices),
        "tied": Span(2 if mesh.pp > 1 else 1, mesh.stage_devices * (mesh.pp - 1)),
    }
    return {axis: span for axis, span in spans.items() if span.size > 1}


def sent_by_rank(part: Part) -> tuple[dict[str, float], ...]:
    """What a device of each pipeline rank sends in a step, by axis: that of all its stages."""
    ranks: list[dict[str, float]] = [{} for _ in range(part.mesh.pp)]
    for index, stage in enumerate(part.stages):
        own = ranks[index % part.mesh.pp]
        for axis, amount in (stage.prediction.link_bytes if stage.prediction else {}).items():
            own[axis] = own.get(axis, 0.0) + amount
    return tuple(ranks)


def traffic(part: Part, profile: HardwareProfile) -> tuple[AxisTraffic, ...]:
    """One entry an axis that carries anything, the innermost first."""
    found: list[AxisTraffic] = []
    ranks = sent_by_rank(part)
    for axis, span in axis_spans(part.mesh).items():
        sent = [one.get(axis, 0.0) for one in ranks]
        most = max(sent)
        if most:
            size = part.mesh.pp if axis == "pp" else span.size
            tiers = _by_tier(axis, most, span, profile)
            found.append(AxisTraffic(axis, size, span, sent.index(most), most, tiers))
    return tuple(found)


def tier_bytes(part: Part, profile: HardwareProfile, ranks: Iterable[int]) -> dict[str, float]:
    """What the busiest device of these pipeline ranks sends in a step over each kind of link."""
    spans, sent = axis_spans(part.mesh), sent_by_rank(part)
    most: dict[str, float] = {}
    for rank in ranks:
        own: dict[str, float] = {}
        for axis, span in spans.items():
            for tier, amount in _by_tier(axis, sent[rank].get(axis, 0.0), span, profile).items():
                own[tier] = own.get(tier, 0.0) + amount
        most = {tier: max(most.get(tier, 0.0), own.get(tier, 0.0)) for tier in {**most, **own}}
    return most


def _by_tier(axis: str, sent: float, span: Span, profile: HardwareProfile) -> dict[str, float]:
    inside = span.ranks_within(profile.devices_per_node)
    if inside == span.size:
        return {_within(span, span.size, profile): sent}
    if axis == "ep":
        leaving = sent * (span.size - inside) / (span.size - 1)
    else:
        leaving = sent / inside
    within = _within(span, inside, profile)
    return {name: amount for name, amount in ((within, sent - leaving), (NETWORK, leaving)) if amount}


def _within(span: Span, ranks: int, profile: HardwareProfile) -> str:
    """The link that joins ``ranks`` of a group in one node; a node of one fast domain is just a node."""
    whole = profile.fast_domain == profile.devices_per_node
    return FAST if not whole and span.ranks_within(profile.fast_domain) == ranks else NODE


def link_rates(profile: HardwareProfile) -> dict[str, float]:
    """Bytes a second of one device on each kind of link, as fitted for large messages."""
    fits = profile.collectives["intra"]["all_reduce"]
    fast = [fit for fit in fits if fit.ranks <= profile.fast_domain] or list(fits)
    across = [fit for fit in fits if fit.ranks > profile.fast_domain] or list(fits)
    return {
        FAST: fast[-1].bytes_per_s,
        NODE: across[-1].bytes_per_s,
        NETWORK: profile.nic_bytes_per_s.value,
    }


def node_groups(part: Part, profile: HardwareProfile) -> tuple[NodeGroup, ...]:
    """The cluster's nodes, those alike folded, in order of their first."""
    per_node, each = profile.devices_per_node, part.mesh.stage_devices
    groups: dict[tuple[int, ...], list[int]] = {}
    for first in range(0, part.mesh.devices, per_node):
        last = min(first + per_node, part.mesh.devices)
        groups.setdefault(tuple(rank // each for rank in range(first, last)), []).append(first)
    return tuple(NodeGroup(firsts[0], stages, len(firsts)) for stages, firsts in groups.items())


def coordinates(mesh: Mesh, rank: int) -> dict[str, int]:
    """A global rank's place on each axis."""
    rest, tp = divmod(rank, mesh.tp)
    rest, cp = divmod(rest, mesh.cp)
    pp, dp = divmod(rest, mesh.dp)
    return {"pp": pp, "dp": dp, "cp": cp, "tp": tp}
