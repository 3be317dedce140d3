"""What a drawing says of a region, a boundary and a rank: plan records in, short lines of text out.

The pictures (DOT, SVG, Mermaid, HTML) say the same because they ask here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from autoplan.plan import Layout, Part
from autoplan.units import bytes_text

INSIDE = ("cp", "ep", "tp")  # axes that cut regions, in the order they apply


def layout_lines(name: str, layout: Layout | None) -> Iterator[str]:
    """What a region's node says under its name: placements, collectives, kernels."""
    if layout is None:
        yield f"layout {name}"
        return
    for axis, placed in layout.axes.items():
        states = Counter(placed.parameters.values())
        cut = ", ".join(f"{count} x {state}" for state, count in sorted(states.items(), reverse=True))
        if cut and placed.size > 1:
            yield f"parameters on {axis}: {cut}"
    yield from collective_lines(layout)
    if layout.kernels:
        yield f"kernels: {', '.join(layout.kernels)}"


def collective_lines(layout: Layout) -> Iterator[str]:
    """``forward: 2 all-reduce, 64.0 MiB``: counts and bytes of one micro-batch on one device."""
    directions = (
        ("forward", layout.collectives_forward, layout.collective_bytes_forward),
        ("backward", layout.collectives_backward, layout.collective_bytes_backward),
    )
    for direction, counts, amount_bytes in directions:
        kinds = counted(counts)
        if kinds:
            yield f"{direction}: {kinds}, {bytes_text(amount_bytes)}"


def counted(counts: Mapping[str, int]) -> str:
    """``2 all-reduce, 1 all-to-all``; nothing for no collectives."""
    return ", ".join(f"{count} {kind.replace('_', '-')}" for kind, count in sorted(counts.items()) if count)


def boundary(part: Part, layout: Layout | None) -> list[str]:
    """How the tensor that leaves a region lies on each axis: ``tp R``, ``dp S(0)``."""
    axes = layout.axes if layout else {}
    inside = [
        f"{axis} {axes[axis].outputs.get('0', 'R') if axis in axes else 'R'}"
        for axis in reversed(INSIDE)
        if axis != "ep" and getattr(part.mesh, axis) > 1
    ]
    return [*inside, *["dp S(0)"] * (part.mesh.dp > 1)]


def ranks_text(part: Part, stage: int) -> str:
    """``rank 3`` or ``ranks 32-63``: the devices that run a stage."""
    each = part.mesh.stage_devices
    first = stage % part.mesh.pp * each
    return f"rank {first}" if each == 1 else f"ranks {first}-{first + each - 1}"
