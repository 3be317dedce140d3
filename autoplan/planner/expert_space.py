"""Which expert-parallel degrees are searched: candidates without one and the model's experts in, all out.

Unpinned, three a mesh: experts whole, over as many ranks as a node has (rows then travel inside it), and over
as many as there are (least memory).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from autoplan.errors import BadInputError
from autoplan.planner.space import Candidate, Pins


def with_experts(
    found: Sequence[Candidate], degrees: Sequence[int], pins: Pins, node: int
) -> list[Candidate]:
    """Every candidate at the degrees to be tried: of ``degrees``, which divide the model's experts, some of
    those that divide its data-parallel degree. ``node`` is how many devices one has.

    Raises BadInputError for a pinned degree that no candidate has.
    """
    made = [
        replace(candidate, mesh=replace(candidate.mesh, ep=ep))
        for candidate in found
        for ep in _tried(_legal(degrees, candidate.mesh.dp), pins, node // candidate.mesh.tp)
    ]
    if not made:
        dps = ", ".join(map(str, sorted({candidate.mesh.dp for candidate in found})))
        raise BadInputError(
            f"--pin ep={pins.ep}: expected a degree that divides the model's experts "
            f"({', '.join(map(str, degrees))}) and the data-parallel degree ({dps}). "
            "Leave the pin out, or change it."
        )
    return made


def _legal(degrees: Iterable[int], dp: int) -> list[int]:
    return [ep for ep in degrees if dp % ep == 0]


def _tried(legal: Sequence[int], pins: Pins, near: int) -> list[int]:
    """The pinned degree; else none, the most of ``near`` ranks, and the most."""
    if pins.ep is not None:
        return [ep for ep in legal if ep == pins.ep]
    return sorted({1, max(legal), max(ep for ep in legal if ep <= max(near, 1))})
