"""The cluster and what goes over its links: a plan and its chip's profile in, a picture and a table out."""

from __future__ import annotations

from collections.abc import Sequence

from autoplan.hardware import HardwareProfile
from autoplan.plan import Mesh, Part, Plan
from autoplan.report.cluster import (
    NETWORK,
    NODE,
    TIER_WORDS,
    AxisTraffic,
    NodeGroup,
    coordinates,
    link_rates,
    node_groups,
    tier_bytes,
    traffic,
)
from autoplan.report.markup import Child, Markup, tag
from autoplan.report.page.charts import bar, picture, section, table
from autoplan.report.palette import STAGE_STYLES
from autoplan.units import bytes_text

_DEVICE, _GAP = 50.0, 8.0
_SHOWN = 12  # kinds of node; a pipeline of more stages than that repeats itself
_AXES = {
    "tp": "tensor parallel",
    "cp": "context parallel",
    "ep": "expert parallel",
    "dp": "replicas (gradients, ZeRO)",
    "pp": "pipeline (activations and their gradients)",
    "tied": "parameters that stages share (their gradients)",
}


def cluster_section(plan: Plan, profile: HardwareProfile | None) -> Markup:
    """The nodes and the traffic; without the profile the bytes by axis alone."""
    inside: list[Child] = []
    for index, part in enumerate(plan.parts):
        if profile is None:
            inside.append(_bytes_only(part, plan.hardware))
            continue
        found = traffic(part, profile)
        inside += [
            _nodes(f"cluster-{index}", part, profile),
            _tiers(found, plan, profile),
            _axes(found, plan),
        ]
    return section("cluster", "Cluster and traffic", *inside)


def _bytes_only(part: Part, hardware: str) -> Markup:
    rows = [
        [f"stage {s}", axis, bytes_text(amount)]
        for s, stage in enumerate(part.stages)
        if stage.prediction is not None
        for axis, amount in stage.prediction.link_bytes.items()
    ]
    said = tag("p", f"The profile {hardware} that the plan was made for is not here, so nodes are not drawn.")
    return tag(
        "div",
        said,
        table("Bytes that a device sends in a step", ["stage", "axis", "sent"], rows, numbers_from=2),
    )


# ---- the nodes --------------------------------------------------------------------------------------


def _nodes(name: str, part: Part, profile: HardwareProfile) -> Markup:
    groups = node_groups(part, profile)
    shown = groups[:_SHOWN]
    per_node = max(len(group.stages) for group in shown)
    columns = max(1, min(3, round(24 / per_node)))
    across = min(per_node, 8)
    wide = across * (_DEVICE + _GAP) + 24
    lines = -(-per_node // across)
    high = lines * (_DEVICE + _GAP) + 76
    boxes = [
        _node(
            group,
            part,
            profile,
            4 + i % columns * (wide + 16),
            4 + i // columns * (high + 12),
            wide,
            high,
        )
        for i, group in enumerate(shown)
    ]
    hidden = len(groups) - len(shown)
    more = f" {hidden} more kinds of node follow the same pattern." if hidden else ""
    nodes = -(-part.mesh.devices // profile.devices_per_node)
    said = (
        f"{part.mesh.devices} devices in {nodes} node{'s' * (nodes > 1)} of {profile.devices_per_node}; "
        "nodes whose devices do the same are drawn once. Colours are pipeline ranks, numbers global "
        f"ranks.{more}"
    )
    width = min(columns, len(shown)) * (wide + 16) + 8
    height = 8 + -(-len(shown) // columns) * (high + 12)
    drawn = picture(name, f"Nodes of {part.name}", said, max(width, 720), height, boxes)
    return tag("div", tag("p", said), drawn)


def _node(
    group: NodeGroup, part: Part, profile: HardwareProfile, left: float, top: float, wide: float, high: float
) -> Markup:  # fmt: skip
    node = group.first // profile.devices_per_node
    count = f", x{group.count} alike" if group.count > 1 else ""
    across = min(len(group.stages), 8)
    devices = [
        _device(
            group.first + d,
            stage,
            part.mesh,
            left + 12 + d % across * (_DEVICE + _GAP),
            top + 34 + d // across * (_DEVICE + _GAP),
        )
        for d, stage in enumerate(group.stages)
    ]
    pps = sorted(set(group.stages))
    stages = f"pipeline rank{'s' * (len(pps) > 1)} {pps[0]}" + (f"-{pps[-1]}" if len(pps) > 1 else "")
    return tag(
        "g",
        tag("rect", x=left, y=top, width=wide, height=high, rx=8.0, class_="card"),
        tag("text", f"node {node}{count}: {stages}", x=left + 12, y=top + 20, class_="name"),
        _domains(len(group.stages), profile, left, top),
        devices,
        [
            tag("text", line, x=left + 12, y=top + high - 24 + 14 * i, class_="small")
            for i, line in enumerate(_links(group, part, profile))
        ],
    )  # fmt: skip


def _links(group: NodeGroup, part: Part, profile: HardwareProfile) -> tuple[str, str]:
    """Inside the node, and to others: what its busiest device sends in a step, and the rate of the link."""
    sent, rates = tier_bytes(part, profile, set(group.stages)), link_rates(profile)
    inside = sum(amount for tier, amount in sent.items() if tier != NETWORK)
    return (
        f"inside {bytes_text(inside)} a step, {rates[NODE] / 1e9:.3g} GB/s",
        f"network {bytes_text(sent.get(NETWORK, 0.0))} a step, {rates[NETWORK] / 1e9:.3g} GB/s a device",
    )


def _domains(devices: int, profile: HardwareProfile, left: float, top: float) -> Markup | None:
    """Frames round the fast domains of a node that has several in a row of eight."""
    size = profile.fast_domain
    if size >= devices or 8 % size:
        return None
    frames = [
        tag(
            "rect", x=left + 8 + d % 8 * (_DEVICE + _GAP), y=top + 30 + d // 8 * (_DEVICE + _GAP),
            width=size * (_DEVICE + _GAP) - 2, height=_DEVICE + 8, rx=6.0, class_="quad",
        )
        for d in range(0, devices, size)
    ]  # fmt: skip
    return tag("g", frames)


def _device(rank: int, stage: int, mesh: Mesh, x: float, y: float) -> Markup:
    place = coordinates(mesh, rank)
    used = {axis: at for axis, at in place.items() if getattr(mesh, axis) > 1}
    lines = [f"{axis} {at}" for axis, at in used.items()][-3:]
    whole = ", ".join(f"{axis} {at}" for axis, at in place.items())
    texts = [
        tag("text", line, x=x + _DEVICE / 2, y=y + 25 + i * 10, text_anchor="middle", class_="tiny")
        for i, line in enumerate(lines)
    ]
    return tag(
        "g",
        tag("title", f"rank {rank}: {whole}"),
        tag("rect", x=x, y=y, width=_DEVICE, height=_DEVICE, rx=5.0, class_="node"),
        tag("text", str(rank), x=x + _DEVICE / 2, y=y + 14, text_anchor="middle", class_="name"),
        texts,
        class_=f"stage-{stage % len(STAGE_STYLES)}",
    )


# ---- the traffic ------------------------------------------------------------------------------------


def _tiers(found: Sequence[AxisTraffic], plan: Plan, profile: HardwareProfile) -> Markup:
    """By kind of link: bytes, rate, and the share of the step it is busy at that rate."""
    rates = link_rates(profile)
    step_s = plan.prediction.step_time_s if plan.prediction else 0.0
    rows: list[list[Child]] = []
    for tier, said in TIER_WORDS.items():
        amount = sum(one.by_tier.get(tier, 0.0) for one in found)
        if not amount:
            continue
        busy = amount / rates[tier] / step_s if step_s else 0.0
        axes = ", ".join(one.axis for one in found if one.by_tier.get(tier))
        cells = [bytes_text(amount), f"{rates[tier] / 1e9:.3g} GB/s", bar(busy, said), f"{busy:.1%}"]
        rows.append([said, axes, *cells])
    if not rows:
        return tag("p", "Nothing goes over a link: one device has it all.")
    heads = ["link", "axes", "a device sends in a step", "rate", "", "busy at that rate"]
    return table("Traffic by link, of the busiest device", heads, rows, numbers_from=2)


def _axes(found: Sequence[AxisTraffic], plan: Plan) -> Markup | None:
    rows = [
        [
            one.axis,
            _AXES.get(one.axis, one.axis),
            str(one.size),
            "; ".join(f"{TIER_WORDS[tier]} {bytes_text(amount)}" for tier, amount in one.by_tier.items()),
            bytes_text(one.sent_bytes),
            f"pipeline rank {one.rank}",
        ]
        for one in found
    ]
    heads = ["axis", "for", "ranks", "over", "a device sends in a step", "busiest"]
    return table("Traffic by mesh axis", heads, rows, numbers_from=4) if rows else None
