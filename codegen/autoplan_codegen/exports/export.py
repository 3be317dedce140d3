"""A plan and the name of a training framework in, that framework's own settings out, with what is lost.

Each setting says whether it changes how the run executes or also what it converges to. What the target
cannot express is listed with what stands in for it, and as pins under which the plan can be priced again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autoplan.errors import BadInputError
from autoplan.plan import Part, Plan
from autoplan.targets import target_named
from autoplan_codegen.exports.accelerate import accelerate_files
from autoplan_codegen.exports.blocks import decided, pins_of
from autoplan_codegen.exports.deepspeed import deepspeed_files
from autoplan_codegen.exports.megatron import loongforge_files, megatron_files
from autoplan_codegen.exports.outcome import Files, Lost, Outcome, Setting
from autoplan_codegen.exports.torchtitan import torchtitan_files

__all__ = ["TARGETS", "Export", "Files", "Lost", "Outcome", "Setting", "Target", "export_plan"]


@dataclass(frozen=True)
class Target:
    """A framework: the version whose settings are written, and who writes them."""

    name: str
    version: str
    write: Callable[[Plan, Part, Mapping[str, str]], Outcome]


TARGETS: Mapping[str, Target] = {
    target.name: target
    for target in (
        Target("megatron", target_named("megatron").version, megatron_files),
        Target("loongforge", target_named("loongforge").version, loongforge_files),
        Target("torchtitan", target_named("torchtitan").version, torchtitan_files),
        Target("deepspeed", "DeepSpeed 0.19", deepspeed_files),
        Target("accelerate", "Accelerate 1.15 (FSDP2)", accelerate_files),
    )
}


@dataclass(frozen=True)
class Export:
    """``files`` maps names to text; ``lost`` is what the target cannot express; ``pins`` describe to
    ``autoplan search`` the plan that the target will really run."""

    target: str
    version: str
    files: Files
    settings: tuple[Setting, ...]
    lost: tuple[Lost, ...]
    pins: tuple[str, ...]

    @property
    def faithful(self) -> bool:
        """Whether the target runs exactly the plan."""
        return not self.lost


def export_plan(plan: Plan, target: str, environment: Mapping[str, str] | None = None) -> Export:
    """Write ``plan`` for ``target``; ``environment`` is what the chip's software needs set.

    Raises BadInputError for an unknown target or a plan of several parts.
    """
    if target not in TARGETS:
        raise BadInputError(f"--to {target}: expected one of {', '.join(TARGETS)}.")
    if len(plan.parts) != 1:
        raise BadInputError(
            f"Expected a plan of one part to export, this one has {len(plan.parts)}: "
            f"{', '.join(part.name for part in plan.parts)}. Search again without parts of their own mesh."
        )
    chosen = TARGETS[target]
    outcome = chosen.write(plan, plan.parts[0], environment or {})
    return Export(target, chosen.version, outcome.files, outcome.settings, outcome.lost, _pins(plan, outcome))


def _pins(plan: Plan, outcome: Outcome) -> tuple[str, ...]:
    """Pins of everything the plan decided, with the target's own where it has others (None: no pin)."""
    return (*pins_of({**decided(plan), **outcome.runs_as}), *outcome.region_pins)
