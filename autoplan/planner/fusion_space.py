"""What is fused on a chip, and which choices the search tries: a profile in, kernel names out.

Norms, gates and rotations are fused wherever the chip has the kernels: they move fewer bytes and keep fewer.
The output layer's fusion with its loss makes the logits twice and keeps none of them, so that both ways
are candidates.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from autoplan.hardware import HardwareProfile
from autoplan.plan import FUSE
from autoplan.planner.space import Candidate, Pins
from autoplan_passes.fusions import GROUPED_PRODUCT, KERNELS

LOSS = "linear_cross_entropy"
# Products in chunks, in PyTorch itself: every chip has it.
EVERYWHERE = (LOSS,)
GROUPED_SINCE = (2, 8)  # torch._grouped_mm; older releases multiply group by group


def fused_kernels(profile: HardwareProfile) -> tuple[str, ...]:
    """The fused kernels that the chip runs, of those that this program looks for."""
    written = KERNELS if "triton" in profile.kernels else ()
    replaced = (GROUPED_PRODUCT,) if profile.software.release < GROUPED_SINCE else ()
    named = {*EVERYWHERE, *profile.kernels, *(name for name in written if name != GROUPED_PRODUCT), *replaced}
    return tuple(name for name in KERNELS if name in named)


def kernels_at(kernels: Iterable[str], fuse: str) -> tuple[str, ...]:
    """The kernels that are used at one level of :data:`autoplan.plan.FUSE`."""
    if fuse == "off":
        return tuple(name for name in kernels if name == GROUPED_PRODUCT)
    return tuple(name for name in kernels if fuse == "all" or name != LOSS)


def with_fusions(found: Sequence[Candidate], kernels: Iterable[str], pins: Pins) -> list[Candidate]:
    """Every candidate at every level to be tried; ``kernels`` are those that some region can use."""
    if pins.fuse is not None:
        levels: tuple[str, ...] = (pins.fuse,)
    else:
        levels = FUSE[:2] if LOSS in kernels else FUSE[:1]
    return [replace(candidate, fuse=level) for candidate in found for level in levels]
