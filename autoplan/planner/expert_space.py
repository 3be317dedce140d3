"""Which expert-parallel degrees are searched: candidates without one and the model's experts in, all out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from autoplan.errors import BadInputError
from autoplan.planner.space import Candidate, Pins


def with_experts(found: Sequence[Candidate], degrees: Sequence[int], pins: Pins) -> list[Candidate]:
    """Every candidate at every degree of ``degrees`` (those that divide the model's experts) that divides
    its data-parallel degree.

    Raises BadInputError for a pinned degree that no candidate has.
    """
    wanted = degrees if pins.ep is None else [pins.ep]
    made = [
        replace(candidate, mesh=replace(candidate.mesh, ep=ep))
        for candidate in found
        for ep in _legal(wanted, degrees, candidate.mesh.dp)
    ]
    if not made:
        dps = ", ".join(map(str, sorted({candidate.mesh.dp for candidate in found})))
        raise BadInputError(
            f"--pin ep={pins.ep}: expected a degree that divides the model's experts "
            f"({', '.join(map(str, degrees))}) and the data-parallel degree ({dps}). "
            "Leave the pin out, or change it."
        )
    return made


def _legal(wanted: Iterable[int], degrees: Sequence[int], dp: int) -> list[int]:
    return [ep for ep in wanted if ep in degrees and dp % ep == 0]
