"""Settings and the price of what they describe in, the verdict out: legal, fits, wasted, better.

Comes in: :class:`~autoplan.importing.settings.Settings` and, for prices, a
:class:`~autoplan.planner.pricer.Pricer` of the model. Goes out: :class:`ImportReport`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from autoplan.errors import AutoplanError
from autoplan.importing.rules import Finding, findings, layers_of, replicas
from autoplan.importing.settings import Settings
from autoplan.planner.pricer import Pricer, Quote
from autoplan.region_runs import container_of, fold_names
from autoplan.units import bytes_text

MOST_CHANGES = 3
IDLE_SHARE = 0.3
BUBBLE_SHARE = 0.1


@dataclass(frozen=True)
class Change:
    """One change of the settings, and the step time it gives."""

    pins: tuple[str, ...]
    text: str
    step_time_s: float
    relative: float


@dataclass(frozen=True)
class ImportReport:
    """``quote`` is None where the settings are illegal or cannot be priced (``unpriced`` says why)."""

    settings: Settings
    findings: tuple[Finding, ...]
    pins: tuple[str, ...] = ()
    quote: Quote | None = None
    unpriced: str = ""
    wasted: tuple[str, ...] = ()
    changes: tuple[Change, ...] = field(default=())

    @property
    def legal(self) -> bool:
        return not any(finding.severity == "error" for finding in self.findings)


def check_settings(settings: Settings, make_pricer: Callable[[], Pricer] | None) -> ImportReport:
    """The whole verdict; ``make_pricer`` None leaves prices out."""
    found = tuple(findings(settings))
    report = ImportReport(settings, found)
    if not report.legal or make_pricer is None:
        return report
    devices, dp, batch = settings.devices, replicas(settings), settings.global_batch
    if devices is None or dp is None or batch is None:
        needed = "--devices N" if devices is None else "--global-batch N"
        return ImportReport(settings, found, unpriced=f"the script does not say it: give {needed}.")
    try:
        pricer = make_pricer()
        pins = plan_pins(settings, dp, block_names(pricer))
        quote = pricer.price(pins, stage_layers=stage_layers_of(settings))
    except AutoplanError as error:
        return ImportReport(settings, found, unpriced=str(error))
    changes = tuple(best_changes(pricer, settings, dp, quote))
    return ImportReport(settings, found, pins, quote, "", tuple(waste(settings, quote)), changes)


def block_names(pricer: Pricer) -> list[str]:
    """The model's blocks, in order."""
    return [region.name for region in pricer.costs.regions if container_of(region.name)]


def stage_layers_of(settings: Settings) -> tuple[int, ...]:
    """Blocks of every stage, where the framework places them so; even ones too."""
    return layers_of(settings) if settings.pp > 1 else ()


def plan_pins(settings: Settings, dp: int, blocks: Sequence[str]) -> tuple[str, ...]:
    """The settings as pins of ours. Selective recompute of attention scores is what a fused attention kernel
    does anyway, so it stays none."""
    plain = {
        "tp": settings.tp,
        "pp": settings.pp,
        "dp": dp,
        "micro_batch": settings.micro_batch,
        "zero": settings.zero if dp * settings.cp > 1 else 0,
    }
    plain |= {"cp": settings.cp, "ep": settings.ep, "vpp": settings.vpp}
    pins = [f"{name}={value}" for name, value in plain.items()]
    pins += [f"sp={int(settings.sp)}"] if settings.tp > 1 else []
    pins += [f"schedule={'interleaved_1f1b' if settings.vpp > 1 else '1f1b'}"]
    return (*pins, *_recompute_pins(settings, blocks))


def _recompute_pins(settings: Settings, blocks: Sequence[str]) -> list[str]:
    if settings.recompute != "full":
        return ["recompute=none"]
    counts = _recomputed(settings, len(blocks))
    if counts is None:
        return ["recompute=none", *(f"{label}:recompute=full" for label in fold_names(blocks))]
    layers = stage_layers_of(settings) or (len(blocks),)
    chosen: list[str] = []
    first = 0
    for held, count in zip(layers, counts):
        chosen += blocks[first : first + min(count, held)]
        first += held
    return ["recompute=none", *(f"{label}:recompute=full" for label in fold_names(chosen))]


def _recomputed(settings: Settings, layers: int) -> list[int] | None:
    """Layers recomputed in each stage; None is all of them (the uniform method)."""
    stages = len(stage_layers_of(settings)) or 1
    if settings.stage_recompute:
        each = list(settings.stage_recompute)
        return each if len(each) == stages else [count // settings.vpp for count in each] * settings.vpp
    if settings.recompute_method == "uniform":
        return None
    return [settings.recompute_layers or layers] * stages


def waste(settings: Settings, quote: Quote) -> list[str]:
    """What the settings leave unused."""
    found: list[str] = []
    idle = quote.memory_limit_bytes - quote.memory_peak_bytes
    if settings.recompute == "full" and idle > IDLE_SHARE * quote.memory_limit_bytes:
        found.append(
            f"{bytes_text(idle)} of memory stay idle on every device while layers are recomputed "
            f"({quote.breakdown_s.get('recompute', 0.0) / quote.step_time_s:.1%} of the step)"
        )
    bubble = quote.breakdown_s.get("pipeline_bubble", 0.0) / quote.step_time_s
    if bubble > BUBBLE_SHARE:
        found.append(
            f"pipeline bubbles take {bubble:.1%} of the step ({quote.part.microbatches} micro-batches)"
        )
    return found


def best_changes(pricer: Pricer, settings: Settings, dp: int, quote: Quote) -> list[Change]:
    """The changes that fit and save the most time, each priced."""
    found: list[Change] = []
    for text, pins in _neighbours(settings, dp):
        try:
            other = pricer.price(pins)
        except AutoplanError:
            continue
        relative = other.step_time_s / quote.step_time_s - 1
        if other.fits and (relative < -0.005 or not quote.fits):
            found.append(Change(pins, text, other.step_time_s, relative))
    return sorted(found, key=lambda change: change.step_time_s)[:MOST_CHANGES]


def _neighbours(settings: Settings, dp: int) -> list[tuple[str, tuple[str, ...]]]:
    """Settings with one thing changed, or one degree moved to data parallelism."""
    degrees = {"tp": settings.tp, "pp": settings.pp, "dp": dp, "cp": settings.cp, "ep": settings.ep}
    held = {"micro_batch": settings.micro_batch, "zero": settings.zero if dp > 1 else 0}

    def pins(**changes: object) -> tuple[str, ...]:
        merged = {**degrees, **held, **changes}
        return tuple(
            f"{key}={value}" for key, value in merged.items() if key not in ("cp", "ep") or value != 1
        )

    found = [(f"recompute {kind}", (*pins(), f"recompute={kind}")) for kind in ("none", "selective", "full")]
    found += [
        (f"micro-batch {size}", pins(micro_batch=size))
        for size in (settings.micro_batch * 2, settings.micro_batch // 2)
        if size
    ]
    for axis in ("tp", "pp", "cp"):
        if degrees[axis] > 1:
            half = degrees[axis] // 2
            found.append((f"{axis} {half}, dp {dp * 2}", pins(**{axis: half, "dp": dp * 2})))
    found += [(f"ZeRO {zero}", pins(zero=zero)) for zero in (0, 1, 3) if dp > 1 and zero != held["zero"]]
    return found
