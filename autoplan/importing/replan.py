"""A launch script's settings and a better plan for the same framework in, the flags to change out.

Only flags that change how the run executes are touched: batch, sequence and precision stay, and so do flags
that this program does not plan (optimizer offload, data, logging). A flag that says what the plan says
already, in whatever way, is left alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from autoplan.importing.rules import layers_of
from autoplan.importing.settings import Settings, layout_counts
from autoplan.plan import Plan
from autoplan_codegen.exports.export import Export, export_plan

LAYOUT = "--pipeline-model-parallel-layout"
# Flags that place layers, of which a framework takes one way at most.
PLACING = (
    LAYOUT,
    "--custom-pipeline-layers",
    "--custom-virtual-pipeline-layers",
    "--num-layers-per-virtual-pipeline-stage",
    "--num-virtual-stages-per-pipeline-rank",
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
)
# Flags that a plan decides: those that it does not write must go.
PLANNED = (
    *PLACING,
    "--sequence-parallel",
    "--context-parallel-size",
    "--context-parallel-ulysses-degree",
    "--cp-comm-type",
    "--hierarchical-context-parallel-sizes",
    "--expert-model-parallel-size",
    "--expert-tensor-parallel-size",
    "--recompute-activations",
    "--recompute-granularity",
    "--recompute-method",
    "--recompute-num-layers",
    "--recompute-modules",
    "--custom-pipeline-recompute-layers",
    "--use-distributed-optimizer",
    "--overlap-grad-reduce",
    "--overlap-param-gather",
    "--num-distributed-optimizer-instances",
    "--use-megatron-fsdp",
    "--use-custom-fsdp",
    "--data-parallel-sharding-strategy",
    "--no-gradient-accumulation-fusion",
)
# What a framework does where a flag is left out.
DEFAULTS: Mapping[str, str] = {
    "--tensor-model-parallel-size": "1",
    "--pipeline-model-parallel-size": "1",
    "--context-parallel-size": "1",
    "--expert-model-parallel-size": "1",
    "--micro-batch-size": "1",
    "--parallelism.data_parallel_replicate_degree": "1",
    "--parallelism.tensor_parallel_degree": "1",
    "--parallelism.pipeline_parallel_degree": "1",
    "--parallelism.context_parallel_degree": "1",
    "--parallelism.expert_parallel_degree": "1",
}
PIPELINE = "--pipeline-model-parallel-size"
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


@dataclass(frozen=True)
class FlagChange:
    """``before`` or ``after`` is None where the flag is new or goes; ``line`` of the script, 0 if unknown."""

    flag: str
    before: str | None
    after: str | None
    line: int = 0

    @property
    def rows(self) -> tuple[str, ...]:
        """The lines of a diff."""
        texts = (("-", self.before), ("+", self.after))
        return tuple(f"{mark} {self.flag} {text}".rstrip() for mark, text in texts if text is not None)


@dataclass(frozen=True)
class Replan:
    """One plan as changes of the script; ``environment`` are variables to set (None: to unset)."""

    plan: Plan
    changes: tuple[FlagChange, ...]
    environment: Mapping[str, str | None]

    @property
    def paste(self) -> str:
        """The flags to append to the launch line, once those that go are out."""
        return " ".join(
            f"{change.flag} {_quoted(change.after)}".rstrip()
            for change in self.changes
            if change.after is not None
        )


def replan_flags(settings: Settings, plan: Plan, script: str) -> Replan:
    """What of ``script`` (its text) has to change for ``plan``, which was made for its framework."""
    export = export_plan(plan, settings.framework)
    wanted = _wanted(settings, export)
    changes = [*_changed(settings, wanted), *_gone(settings, wanted)]
    placed = tuple(replace(change, line=_line_of(script, change.flag)) for change in changes)
    return Replan(plan, placed, _environment(settings, wanted))


def _wanted(settings: Settings, export: Export) -> dict[str, str]:
    """Flags of the plan, under the names that a launch line has."""
    prefix = "" if settings.framework in ("megatron", "loongforge") else "--"
    found = {f"{prefix}{one.name}": one.value for one in export.settings if one.changes == "execution"}
    if settings.framework == "torchtitan":
        found = {
            flag: value
            for flag, value in found.items()
            if flag.startswith(("--parallelism.", "--training.")) and "module_fqns" not in flag
        }
    return found


def _changed(settings: Settings, wanted: Mapping[str, str]) -> Iterable[FlagChange]:
    for flag, after in wanted.items():
        before = " ".join(settings.said[flag]) if flag in settings.said else None
        same = before is not None and _plain(before) == _plain(after)
        if same or (before is None and DEFAULTS.get(flag) == after) or _says_so(settings, flag, wanted):
            continue
        yield FlagChange(flag, before, after)


def _gone(settings: Settings, wanted: Mapping[str, str]) -> Iterable[FlagChange]:
    for flag in PLANNED:
        if flag not in settings.said or flag in wanted:
            continue
        layout = wanted.get(LAYOUT)
        if flag in PLACING and layout is not None and _says_so(settings, LAYOUT, wanted):
            continue  # its own way to place layers is kept
        before = " ".join(settings.said[flag])
        if _plain(before) != DEFAULTS.get(flag):
            yield FlagChange(flag, before, None)


def _says_so(settings: Settings, flag: str, wanted: Mapping[str, str]) -> bool:
    """Whether the script says the same by other flags: layers in place, counts that are the default."""
    if flag == LAYOUT:
        stays = LAYOUT not in settings.said and wanted[PIPELINE] == str(settings.pp)
        return stays and layout_counts(wanted[flag]) == layers_of(settings)
    if flag != "--expert-tensor-parallel-size" or flag in settings.said:
        return False
    return wanted[flag] == wanted["--tensor-model-parallel-size"]


def _environment(settings: Settings, wanted: Mapping[str, str]) -> dict[str, str | None]:
    """One hardware queue where tp or cp overlap, none asked for under Megatron's FSDP."""
    if settings.framework == "torchtitan":
        return {}
    fsdp = "--use-megatron-fsdp" in wanted
    overlaps = int(wanted["--tensor-model-parallel-size"]) > 1 or "--context-parallel-size" in wanted
    now = settings.environment.get(QUEUES)
    if fsdp and now == "1":
        return {QUEUES: None}
    return {QUEUES: "1"} if overlaps and not fsdp and now is None else {}


def _line_of(script: str, flag: str) -> int:
    lines = script.splitlines()
    found = (i for i, line in enumerate(lines, 1) if flag in line.replace("=", " ").split("#")[0].split())
    return next(found, 0)


def _plain(text: str) -> str:
    return text.strip("\"'").replace("True", "true").replace("False", "false")


def _quoted(text: str | None) -> str:
    return f'"{text}"' if text and any(mark in text for mark in "|*(") else text or ""


def text_of(found: Sequence[Replan], index: int) -> str:
    """One replan as a diff of flags, with the lines where they stand."""
    one = found[index]
    rows = [
        f"{row}{f'    # line {change.line}' if change.line and row.startswith('-') else ''}"
        for change in one.changes
        for row in change.rows
    ]
    rows += [
        f"+ export {name}={value}" if value is not None else f"- export {name} (unset it)"
        for name, value in one.environment.items()
    ]
    return "\n".join(rows or ["the script runs this plan already"])
