"""The cluster a run was made on: a point and its chip's profile in, the profile with that network out.

A profile describes the usual cluster of its chip. A source that states another network (fewer cards a node,
slower ones) is priced on that one: the fits across nodes are scaled by the devices' share of the cards.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from autoplan.hardware import CollectiveFit, HardwareProfile
from autoplan.validation.points import Point

# Gb/s of one device, from the texts that sources use.
_PER_NODE = (
    re.compile(r"(?P<cards>\d+) ?x ?(?P<gigabits>\d+) ?Gb"),
    re.compile(r"(?P<gigabits>\d+) ?Gb/s, (?P<cards>\d+) links/node"),
    re.compile(r"(?P<gigabits>\d+) ?Gb/s .*per node"),
)
_PER_DEVICE = re.compile(r"(?P<gigabits>\d+) ?Gb/s .*per GPU")


def network_bytes_per_s(text: str, devices_per_node: int) -> float | None:
    """One device's share of its node's cards, or None where the text does not say."""
    found = _PER_DEVICE.search(text)
    if found:
        return float(found["gigabits"]) * 1e9 / 8
    for pattern in _PER_NODE:
        found = pattern.search(text)
        if found:
            cards = int(found.groupdict().get("cards") or 1)
            return cards * float(found["gigabits"]) * 1e9 / 8 / devices_per_node
    return None


def cluster_of(point: Point, profile: HardwareProfile) -> HardwareProfile:
    """The profile, with the network that the source states."""
    stated = network_bytes_per_s(point.text.get("inter_node", ""), profile.devices_per_node)
    if stated is None or stated == profile.nic_bytes_per_s.value:
        return profile
    factor = stated / profile.nic_bytes_per_s.value
    across = {kind: _scaled(fits, factor) for kind, fits in profile.collectives["inter"].items()}
    spans: Mapping[str, Mapping[str, tuple[CollectiveFit, ...]]] = {**profile.collectives, "inter": across}
    nic = replace(profile.nic_bytes_per_s, value=stated, source=f"{point.text.get('source', '')}")
    return replace(profile, collectives=spans, nic_bytes_per_s=nic)


def _scaled(fits: tuple[CollectiveFit, ...], factor: float) -> tuple[CollectiveFit, ...]:
    return tuple(replace(fit, bytes_per_s=fit.bytes_per_s * factor, tag="estimated") for fit in fits)
