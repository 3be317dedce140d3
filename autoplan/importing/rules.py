"""Settings of a framework in, what is illegal in them out: one row a rule, as the frameworks' own checks.

Sources: ``validate_args`` of Megatron-LM, ``TransformerConfig`` of megatron-core 0.16, ``validators.py`` of
LoongForge v0.2.0, ``ParallelDims`` of torchtitan 0.3, DeepSpeed's ``DeepSpeedConfig``; what plans for these
frameworks must keep to as well is in ``autoplan/targets.yaml``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autoplan.importing.settings import Settings
from autoplan.targets import Target, targets

MEGATRON = ("megatron", "loongforge")
ALL = ("megatron", "loongforge", "torchtitan", "deepspeed")


@dataclass(frozen=True)
class Finding:
    """``rule`` is its name; ``text`` says what is, what must be, and what to change."""

    rule: str
    text: str
    severity: str = "error"


@dataclass(frozen=True)
class Rule:
    """``broken`` answers with what is wrong, or with an empty text."""

    name: str
    frameworks: tuple[str, ...]
    broken: Callable[[Settings], str]
    severity: str = "error"


def findings(settings: Settings) -> list[Finding]:
    """Every rule of the framework that the settings break."""
    found: list[Finding] = []
    for rule in RULES:
        if settings.framework in rule.frameworks and (text := rule.broken(settings)):
            found.append(Finding(rule.name, text, rule.severity))
    return found


def _model(settings: Settings, entry: str) -> int:
    return settings.model.get(entry, 0)


def stage_count(settings: Settings) -> int:
    return settings.pp * settings.vpp


def layers_of(settings: Settings) -> tuple[int, ...]:
    """Layers of each stage: as stated, or even; empty where the number of layers is unknown."""
    if settings.stage_layers:
        return settings.stage_layers
    layers, stages = _model(settings, "layers"), stage_count(settings)
    return (layers // stages,) * stages if layers else ()


def replicas(settings: Settings) -> int | None:
    each = settings.tp * settings.pp * settings.cp
    return settings.devices // each if settings.devices and settings.devices % each == 0 else None


def _world(s: Settings) -> str:
    each = s.tp * s.pp * s.cp
    if s.devices is None or s.devices % each == 0:
        return ""
    return f"{s.devices} devices are no multiple of tp {s.tp} x pp {s.pp} x cp {s.cp} = {each}"


def _heads(s: Settings) -> str:
    heads = _model(s, "heads")
    return f"{heads} attention heads do not divide by tp {s.tp}" if heads and heads % s.tp else ""


def _groups(s: Settings) -> str:
    groups = _model(s, "kv_heads")
    latent = s.has("--multi-latent-attention")
    if not groups or latent or groups % s.tp == 0:
        return ""
    return (
        f"{groups} query groups do not divide by tp {s.tp}: take tp {_largest_divisor(groups, s.tp)} or less"
    )


def _largest_divisor(number: int, most: int) -> int:
    return max(d for d in range(1, most + 1) if number % d == 0)


def _layers(s: Settings) -> str:
    layers, stages = _model(s, "layers"), stage_count(s)
    if not layers or stages == 1:
        return ""
    if s.stage_layers:
        counts = s.stage_layers
        shown = ",".join(map(str, counts))
        if len(counts) % s.pp:
            return f"layers are given for {len(counts)} stages ({shown}), which pp {s.pp} does not divide"
        if sum(counts) != layers:
            return f"the stages hold {shown} = {sum(counts)} layers, the model has {layers}"
        return ""
    extra = sum(s.has(f"--account-for-{what}-in-pipeline-split") for what in ("embedding", "loss"))
    if (layers + extra) % stages:
        of = f"pp {s.pp}" + (f" x {s.vpp} virtual stages" if s.vpp > 1 else "")
        return f"{layers} layers do not divide by {of} and no layout says where they go"
    return ""


def _batch(s: Settings) -> str:
    dp = replicas(s)
    if dp is None or s.global_batch is None or s.global_batch % (s.micro_batch * dp) == 0:
        return ""
    return f"global batch {s.global_batch} is no multiple of micro-batch {s.micro_batch} x dp {dp}"


def _interleaving(s: Settings) -> str:
    if s.vpp == 1:
        return ""
    if s.pp < 2:
        return f"{s.vpp} virtual stages need pp of at least 2"
    dp = replicas(s)
    if dp is None or s.global_batch is None:
        return ""
    count = s.global_batch // (s.micro_batch * dp)
    return (
        f"{count} micro-batches are no multiple of pp {s.pp}, as interleaving needs" if count % s.pp else ""
    )


def _sequence_parallel_alone(s: Settings) -> str:
    return "--sequence-parallel has no effect at tp 1" if s.sp and s.tp == 1 else ""


def _experts_need_sequence_parallel(s: Settings) -> str:
    moe = _model(s, "experts") > 1 or s.ep > 1
    return "experts with tp above 1 need --sequence-parallel" if moe and s.tp > 1 and not s.sp else ""


def _expert_degrees(s: Settings) -> str:
    experts = _model(s, "experts")
    if s.ep > 1 and experts and experts % s.ep:
        return f"{experts} experts do not divide by ep {s.ep}"
    inner = (s.etp or s.tp) * s.ep * s.pp
    if s.ep > 1 and s.devices and s.devices % inner:
        degrees = f"expert tp {s.etp or s.tp} x ep {s.ep} x pp {s.pp}"
        return f"{s.devices} devices are no multiple of {degrees} = {inner}"
    if s.ep > 1 and s.has("--num-experts") and experts < 2:
        return f"ep {s.ep} without experts"
    return ""


def _context(s: Settings) -> str:
    if s.cp > 1 and s.sequence and s.sequence % (2 * s.cp):
        return f"sequence {s.sequence} is no multiple of 2 x cp {s.cp}, which balances causal work"
    if s.sp and s.sequence and s.sequence % (s.tp * s.cp):
        return f"sequence {s.sequence} does not divide by tp {s.tp} x cp {s.cp} under sequence parallelism"
    return ""


def _ulysses(s: Settings) -> str:
    values = s.said.get("--context-parallel-ulysses-degree", ())
    degree, heads = (int(values[0]) if values and values[0].isdigit() else 1), _model(s, "heads")
    if degree > 1 and heads and (heads // max(1, s.tp)) % degree:
        return f"{heads} heads over tp {s.tp} do not divide by the Ulysses degree {degree}"
    return ""


def _recompute(s: Settings) -> str:
    if s.recompute not in ("none", "full", "selective"):
        return f"recompute granularity {s.recompute!r}: expected full or selective"
    if s.recompute == "full" and not s.recompute_method and not s.stage_recompute:
        return "full recompute needs --recompute-method block or uniform"
    if s.recompute == "full" and s.recompute_layers is None and not s.stage_recompute:
        return "full recompute needs --recompute-num-layers"
    if s.recompute == "selective" and s.recompute_method:
        return "selective recompute takes no --recompute-method"
    if s.recompute == "none" and s.recompute_method:
        return "--recompute-method without --recompute-granularity full"
    return ""


def _recompute_counts(s: Settings) -> str:
    layers = layers_of(s)
    if not s.stage_recompute:
        return ""
    per_rank = [sum(layers[r :: s.pp]) for r in range(s.pp)] if layers and len(layers) % s.pp == 0 else []
    if len(s.stage_recompute) not in (s.pp, s.pp * s.vpp):
        return f"recompute counts are given for {len(s.stage_recompute)} stages, pp is {s.pp}"
    if per_rank and len(s.stage_recompute) == s.pp:
        over = [(r, n, most) for r, (n, most) in enumerate(zip(s.stage_recompute, per_rank)) if n > most]
        if over:
            r, n, most = over[0]
            return (
                f"stage {r} recomputes {n} layers and holds {most} (more only where a vision tower is on it)"
            )
    return ""


def _custom_layers(s: Settings) -> str:
    values = s.said.get("--custom-pipeline-layers", ())
    return (
        "--custom-pipeline-layers needs a comma: it is for pp of at least 2"
        if values and "," not in values[0]
        else ""
    )


def _exclusive_layouts(s: Settings) -> str:
    ways = [
        "--pipeline-model-parallel-layout",
        "--custom-pipeline-layers",
        "--custom-virtual-pipeline-layers",
        "--num-layers-per-virtual-pipeline-stage",
        "--decoder-first-pipeline-num-layers",
    ]
    used = [way for way in ways if s.has(way)]
    return f"{' and '.join(used)} exclude each other" if len(used) > 1 else ""


def _two_dtypes(s: Settings) -> str:
    return "--bf16 and --fp16 exclude each other" if s.has("--bf16") and s.has("--fp16") else ""


def _offload(s: Settings) -> str:
    alone = s.has("--optimizer-cpu-offload") and not s.has("--use-precision-aware-optimizer")
    return "--optimizer-cpu-offload needs --use-precision-aware-optimizer" if alone else ""


def _packing(s: Settings) -> str:
    packed = s.has("--packing-sft-data") and s.micro_batch != 1
    return f"packed sequences need micro-batch 1, not {s.micro_batch}" if packed else ""


def _fsdp_queue(s: Settings) -> str:
    fsdp = s.has("--use-megatron-fsdp") and s.environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
    return "Megatron-FSDP must not run with CUDA_DEVICE_MAX_CONNECTIONS=1: unset it" if fsdp else ""


def _one_rank_a_batch(s: Settings) -> str:
    values = s.said.get("--gradient_accumulation_steps", ("",))[0]
    dp = replicas(s)
    if dp is None or s.global_batch is None or not values.isdigit():
        return ""
    product = s.micro_batch * int(values) * dp
    if product == s.global_batch:
        return ""
    factors = f"micro-batch {s.micro_batch} x accumulation {values} x {dp} ranks"
    return f"train_batch_size {s.global_batch} is not {factors}"


def _where(holds: Callable[[Target], bool]) -> tuple[str, ...]:
    """Frameworks of which a fact of the target table holds."""
    return tuple(name for name, target in targets().items() if holds(target))


RULES = (
    Rule("world size", ALL, _world),
    Rule("attention heads", ALL, _heads),
    Rule("query groups", MEGATRON, _groups),
    Rule("layers", (*MEGATRON, "torchtitan"), _layers),
    Rule("global batch", (*MEGATRON, "torchtitan"), _batch),
    Rule("interleaving", _where(lambda target: target.fills_interleaved), _interleaving),
    Rule("sequence parallel", MEGATRON, _sequence_parallel_alone, "note"),
    Rule("experts with tp", _where(lambda target: target.sp_with_experts), _experts_need_sequence_parallel),
    Rule("expert degrees", (*MEGATRON, "torchtitan"), _expert_degrees),
    Rule("sequence length", (*MEGATRON, "torchtitan"), _context),
    Rule("ulysses", MEGATRON, _ulysses),
    Rule("recompute", MEGATRON, _recompute),
    Rule("recompute counts", ("loongforge",), _recompute_counts, "note"),
    Rule("custom layers", ("loongforge",), _custom_layers),
    Rule("layouts", MEGATRON, _exclusive_layouts),
    Rule("dtype", MEGATRON, _two_dtypes),
    Rule("optimizer offload", MEGATRON, _offload),
    Rule("packing", ("loongforge",), _packing),
    Rule("FSDP queues", MEGATRON, _fsdp_queue),
    Rule("batch sizes", ("deepspeed",), _one_rank_a_batch),
)
