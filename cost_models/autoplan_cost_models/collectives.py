"""How long a collective takes on a group of ranks, by the links the group crosses.

Comes in: kind, bytes, and a :class:`Span` (how many ranks, how far apart). Goes out: seconds, from the
profile's fits ``alpha + s F / bandwidth + c s / (s + s0)``.

A group meets up to three kinds of link: inside a fast domain, inside a node across fast domains (the
P800's two quads: the profile's ``intra`` fits of more than ``fast_domain`` ranks), across nodes (``inter``
fits, made for one rank a node). With g ranks of the group in each node, all_reduce, all_gather and
reduce_scatter use g shares of the node's network cards, at most the rate inside the node; all_to_all and
p2p do not, since each rank's own bytes leave through its own share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from autoplan.errors import BadProfileError
from autoplan.hardware import CollectiveFit, HardwareProfile

# NCCL has no tree for these two: their ring takes one network hop per node (14 us each in NCCL's own cost
# model, ring, Simple protocol: NVIDIA/nccl@5067397:src/graph/tuning.cc). It is what limits full sharding over
# thousands of devices.
RING_KINDS = frozenset({"all_gather", "reduce_scatter"})
RING_HOP_S = 14e-6
# Compute and communication that run at once slow each other down by about this much, an estimate:
# Galvatron (PKU-DAIR/Hetu-Galvatron) ships 1.126 as the coefficient it measured.
OVERLAP_SLOWDOWN = 1.126


@dataclass(frozen=True)
class Span:
    """A group of ``size`` ranks, ``stride`` apart in global rank order (tp: 1; dp: tp; pp: tp x dp)."""

    size: int
    stride: int = 1

    def ranks_within(self, block: int) -> int:
        """How many of the group's ranks share one aligned block of ``block`` consecutive ranks."""
        return max(1, min(self.size, block // self.stride))


def traffic_factor(kind: str, ranks: int) -> float:
    """F of the fit: the part of the message that crosses a rank's link (nccl-tests, PERFORMANCE.md)."""
    if kind == "p2p":
        return 1.0
    return (2.0 if kind == "all_reduce" else 1.0) * (ranks - 1) / ranks


def sent_bytes(kind: str, message_bytes: float, ranks: int) -> float:
    """What one rank of ``ranks`` puts on its link in one collective on ``message_bytes``; see
    :meth:`Links.seconds`."""
    if ranks <= 1 or kind == "none":
        return 0.0
    return message_bytes * traffic_factor(kind, ranks)


def overlap_adds_s(compute_s: float, traffic_s: float) -> float:
    """What traffic alongside adds to compute: ``c min(a, b) + |a - b|`` in all, less the compute."""
    together = OVERLAP_SLOWDOWN * min(compute_s, traffic_s) + abs(compute_s - traffic_s)
    return together - compute_s


@dataclass(frozen=True)
class Links:
    """Collective times on one cluster; ``fits[tier][kind]`` come from the profile."""

    profile: HardwareProfile
    _known: dict[tuple[str, float, Span], float] = field(
        default_factory=dict[tuple[str, float, Span], float], init=False, repr=False, compare=False
    )

    def seconds(self, kind: str, message_bytes: float, span: Span) -> float:
        """Time of one collective; 0 for a group of one.

        ``message_bytes`` is the largest buffer of a rank: the whole tensor over the group (gathered, or
        before it is reduced), but in an all_to_all what one rank holds. Raises BadProfileError when the
        profile has no fit for the kind.
        """
        if span.size <= 1 or message_bytes <= 0 or kind == "none":
            return 0.0
        key = kind, message_bytes, span
        if key not in self._known:
            self._known[key] = self._seconds(kind, message_bytes, span)
        return self._known[key]

    def _seconds(self, kind: str, message_bytes: float, span: Span) -> float:
        inside = span.ranks_within(self.profile.devices_per_node)
        if kind == "p2p":
            return self._point_to_point(message_bytes, span)
        if kind == "ring":
            return (span.size - 1) * self._point_to_point(message_bytes / span.size, self._next_on_ring(span))
        if inside == span.size:
            return self._inside_node(kind, message_bytes, inside, span)
        return self._across_nodes(kind, message_bytes, inside, span)

    def estimated(self, kind: str, span: Span) -> frozenset[str]:
        """Names of the estimated quantities that ``seconds`` reads for this collective."""
        if span.size <= 1 or kind == "none":
            return frozenset()
        if kind == "ring":
            return self.estimated("p2p", self._next_on_ring(span))
        inside = span.ranks_within(self.profile.devices_per_node)
        names: set[str] = set()
        if inside > 1 and self._node_fit(kind, inside, span).tag == "estimated":
            names.add(f"{kind} inside a node")
        if inside < span.size and self._network_fit(kind, span.size // inside).tag == "estimated":
            names.add(f"{kind} across nodes")
        return frozenset(names)

    def _next_on_ring(self, span: Span) -> Span:
        """The slowest hop of a ring: across nodes where the group spans several."""
        node = self.profile.devices_per_node
        return Span(2, span.stride if span.ranks_within(node) == span.size else max(node, span.stride))

    def _point_to_point(self, message_bytes: float, span: Span) -> float:
        inside_node = span.stride < self.profile.devices_per_node
        fit = self._node_fit("p2p", 2, span) if inside_node else self._network_fit("p2p", 2)
        return fit.alpha_s + message_bytes / fit.bytes_per_s + _ramp(fit, message_bytes)

    def _inside_node(self, kind: str, message_bytes: float, ranks: int, span: Span) -> float:
        fit = self._node_fit(kind, ranks, span)
        transfer = message_bytes * traffic_factor(kind, ranks) / fit.bytes_per_s
        return fit.alpha_s * _depth(ranks, fit.ranks) + transfer + _ramp(fit, message_bytes)

    def _across_nodes(self, kind: str, message_bytes: float, inside: int, span: Span) -> float:
        nodes = math.ceil(span.size / inside)
        fit = self._network_fit(kind, nodes)
        shares = 1 if kind == "all_to_all" else inside
        bytes_per_s = shares * fit.bytes_per_s
        if inside > 1:
            bytes_per_s = min(bytes_per_s, self._node_fit(kind, inside, span).bytes_per_s)
        crossing = traffic_factor(kind, span.size)
        if kind == "all_to_all":  # what stays in the node does not cross
            crossing = (nodes - 1) / nodes
        transfer = message_bytes * crossing / bytes_per_s
        start_s = fit.alpha_s * _depth(nodes, fit.ranks)
        if kind in RING_KINDS:
            start_s = max(start_s, (nodes - 1) * RING_HOP_S)
        return start_s + transfer + _ramp(fit, message_bytes / shares)

    def _node_fit(self, kind: str, ranks: int, span: Span) -> CollectiveFit:
        """The nearest fit measured on the same side of the fast domain as the group."""
        fits = self._fits("intra", kind)
        domain = self.profile.fast_domain
        crosses = span.ranks_within(domain) < ranks
        same_side = [fit for fit in fits if (fit.ranks > domain) == crosses]
        return _nearest(same_side or fits, ranks)

    def _network_fit(self, kind: str, nodes: int) -> CollectiveFit:
        return _nearest(self._fits("inter", kind), nodes)

    def _fits(self, tier: str, kind: str) -> Sequence[CollectiveFit]:
        fits = self.profile.collectives.get(tier, {}).get(kind, ())
        if not fits and tier == "inter":
            fits = self.profile.collectives.get("intra", {}).get(kind, ())
        if not fits:
            raise BadProfileError(
                f"hardware profile {self.profile.name} has no {tier} fit for {kind}: expected an entry "
                f"collectives.{tier}.{kind} with ranks, alpha_s, bytes_per_s, ramp_s and ramp_bytes; "
                "add it to the profile's YAML."
            )
        return fits


def _nearest(fits: Sequence[CollectiveFit], ranks: int) -> CollectiveFit:
    return min(fits, key=lambda fit: (abs(math.log2(fit.ranks) - math.log2(ranks)), fit.ranks))


def _depth(ranks: int, fitted_ranks: int) -> float:
    """Latency grows with the depth of a tree over the ranks; never below the fitted one's share."""
    return math.log2(max(ranks, 2)) / math.log2(max(fitted_ranks, 2))


def _ramp(fit: CollectiveFit, message_bytes: float) -> float:
    return fit.ramp_s * message_bytes / (message_bytes + fit.ramp_bytes)
