"""The words of a launch command, or a config file, in; the framework's settings as our own terms out."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autoplan.errors import BadInputError
from autoplan.importing.shell import Script, read_script

FRAMEWORKS = ("megatron", "loongforge", "torchtitan", "deepspeed")


@dataclass(frozen=True)
class Settings:
    """What a launch says. Counts that it does not say are None; ``said`` holds every flag as written.

    ``stage_layers`` and ``stage_recompute`` are layers of each (virtual) stage, in order. ``model`` holds the
    architecture where the script states it (``layers hidden ffn heads kv_heads head_dim vocab experts topk
    expert_ffn``).
    """

    framework: str
    devices: int | None = None
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    vpp: int = 1
    sp: bool = False
    micro_batch: int = 1
    global_batch: int | None = None
    sequence: int | None = None
    dtype: str = "fp32"
    zero: int = 0
    replicate: int = 1
    recompute: str = "none"
    recompute_method: str = ""
    recompute_layers: int | None = None
    stage_layers: tuple[int, ...] = ()
    stage_recompute: tuple[int, ...] = ()
    model: Mapping[str, int] = field(default_factory=dict[str, int])
    gated: bool = False
    said: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    unknown: tuple[str, ...] = ()

    def has(self, flag: str) -> bool:
        return flag in self.said


def read_settings(path: Path, framework: str, given: Mapping[str, str] | None = None) -> Settings:
    """Read a launch script or config of ``framework``; nothing in it is run.

    Raises BadInputError for a file that cannot be read, an unknown framework, or a file without its settings.
    """
    if framework not in FRAMEWORKS:
        raise BadInputError(f"--from {framework}: expected one of {', '.join(FRAMEWORKS)}.")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise BadInputError(f"cannot read {path}: {reason}. Give the script that launches the run.") from None
    if framework == "torchtitan":
        return _torchtitan(path, text, given or {})
    if framework == "deepspeed":
        return _deepspeed(path, text, given or {})
    return _megatron(path, framework, read_script(text, given))


# ---- Megatron-LM and LoongForge -----------------------------------------------------------------------

# Flag -> the architecture entry it states.
ARCHITECTURE = {
    "--num-layers": "layers",
    "--hidden-size": "hidden",
    "--ffn-hidden-size": "ffn",
    "--num-attention-heads": "heads",
    "--num-query-groups": "kv_heads",
    "--kv-channels": "head_dim",
    "--vocab-size": "vocab",
    "--num-experts": "experts",
    "--moe-router-topk": "topk",
    "--moe-ffn-hidden-size": "expert_ffn",
}


def _megatron(path: Path, framework: str, script: Script) -> Settings:
    flags = flags_of(script.words)
    known = [f for f in flags if "parallel" in f or f in ("--micro-batch-size", *ARCHITECTURE)]
    if not known:
        raise BadInputError(
            f"{path}: no argument of {framework} found (such as --tensor-model-parallel-size). "
            "Give the script that holds them; variables from elsewhere: --set NAME=VALUE."
        )
    read = _Reader(path, flags)
    layout = read.text("--pipeline-model-parallel-layout")
    pp = read.count("--pipeline-model-parallel-size", 1)
    stage_layers, vpp = _stages(read, layout, pp)
    recompute = read.text("--recompute-granularity") or (
        "selective" if read.on("--recompute-activations") else "none"
    )
    fsdp = {"optim": 1, "optim_grads": 2, "optim_grads_params": 3}
    sharded = read.on("--use-megatron-fsdp") or read.on("--use-custom-fsdp")
    zero = fsdp.get(read.text("--data-parallel-sharding-strategy"), 0) if sharded else 0
    return Settings(
        framework,
        devices=_devices(script),
        tp=read.count("--tensor-model-parallel-size", 1),
        pp=pp,
        cp=max(read.count("--context-parallel-size", 1), read.count("--context-parallel-ulysses-degree", 1)),
        ep=read.count("--expert-model-parallel-size", 1),
        etp=read.maybe("--expert-tensor-parallel-size"),
        vpp=vpp,
        sp=read.on("--sequence-parallel"),
        micro_batch=read.count("--micro-batch-size", 1),
        global_batch=read.maybe("--global-batch-size"),
        sequence=read.maybe("--seq-length"),
        dtype=next((name for name in ("bf16", "fp16") if read.on(f"--{name}")), "fp32"),
        zero=zero or int(read.on("--use-distributed-optimizer")),
        replicate=read.count("--num-distributed-optimizer-instances", 1),
        recompute=recompute,
        recompute_method=read.text("--recompute-method"),
        recompute_layers=read.maybe("--recompute-num-layers"),
        stage_layers=stage_layers,
        stage_recompute=read.numbers("--custom-pipeline-recompute-layers"),
        model={entry: n for flag, entry in ARCHITECTURE.items() if (n := read.maybe(flag)) is not None},
        gated=read.on("--swiglu"),
        said=flags,
        environment={name: value for name, value in script.variables.items() if name.isupper()},
        unknown=tuple(sorted(script.unknown)),
    )


def _stages(read: _Reader, layout: str, pp: int) -> tuple[tuple[int, ...], int]:
    """Layers of every stage where the script says them, and stages a rank."""
    if layout:
        counts = layout_counts(layout)
        return counts, max(1, len(counts) // pp)
    virtual = read.numbers("--custom-virtual-pipeline-layers")
    if virtual:
        return virtual, max(1, len(virtual) // pp)
    vpp = read.count("--num-virtual-stages-per-pipeline-rank", 1)
    each, layers = read.maybe("--num-layers-per-virtual-pipeline-stage"), read.maybe("--num-layers")
    if each and layers and pp > 0:
        vpp = max(1, layers // pp // each)
    first, last = (
        read.maybe("--decoder-first-pipeline-num-layers"),
        read.maybe("--decoder-last-pipeline-num-layers"),
    )
    if layers and pp > 1 and (first or last):
        middle = layers - (first or 0) - (last or 0)
        between = pp - bool(first) - bool(last)
        inner = [middle // between] * between if between else []
        return (*([first] if first else []), *inner, *([last] if last else [])), vpp
    return read.numbers("--custom-pipeline-layers"), vpp


def layout_counts(layout: str) -> tuple[int, ...]:
    """``Et*15|t*16|(tt|)*2tL`` as layers of each stage: (15, 16, 2, 2, 1)."""
    text = re.sub(r"\(([^()]*)\)\*(\d+)", lambda m: m[1] * int(m[2]), layout.replace(",", ""))
    text = re.sub(r"([A-Za-z])\*(\d+)", lambda m: m[1] * int(m[2]), text)
    return tuple(stage.count("t") for stage in text.split("|"))


def flags_of(words: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """``--a 1 2 --b`` as ``{"--a": ("1", "2"), "--b": ()}``; of a flag given twice the last counts."""
    found: dict[str, list[str]] = {}
    current: list[str] | None = None
    for word in words:
        if word.startswith("--") and len(word) > 2:
            flag, equals, value = word.partition("=")
            current = found[flag] = [value] if equals else []
        elif current is not None and not word.startswith(("|", ">", "2>", "&")):
            current.append(word)
        else:
            current = None
    return {flag: tuple(values) for flag, values in found.items()}


@dataclass(frozen=True)
class _Reader:
    path: Path
    flags: Mapping[str, tuple[str, ...]]

    def on(self, flag: str) -> bool:
        return flag in self.flags

    def text(self, flag: str) -> str:
        values = self.flags.get(flag, ())
        return values[0] if values else ""

    def maybe(self, flag: str) -> int | None:
        """The number of a flag; None where it is not given or is a variable that nobody sets."""
        text = self.text(flag)
        if not text or text.startswith("$"):
            return None
        if not re.fullmatch(r"-?\d+", text):
            raise BadInputError(f"{self.path}: {flag} {text}: expected a whole number.")
        return int(text)

    def count(self, flag: str, otherwise: int) -> int:
        found = self.maybe(flag)
        if found is not None and found < 1:
            raise BadInputError(f"{self.path}: {flag} {found}: expected at least 1.")
        return otherwise if found is None else found

    def numbers(self, flag: str) -> tuple[int, ...]:
        return tuple(int(part) for part in self.text(flag).split(",") if part.strip().isdigit())


def _devices(script: Script) -> int | None:
    """Nodes x processes a node, as the launcher is told or the usual variables say."""
    flags = flags_of(script.words)

    def first(*names: str) -> int | None:
        for name in names:
            text = script.variables.get(name, "") or " ".join(flags.get(name, ())[:1])
            if text.isdigit():
                return int(text)
        return None

    each = first("--nproc_per_node", "--nproc-per-node", "GPUS_PER_NODE", "NPROC_PER_NODE", "--num_gpus")
    nodes = first("--nnodes", "NNODES", "NUM_NODES", "NODES", "--num_nodes")
    world = first("WORLD_SIZE")
    return each * nodes if each and nodes else world or None


# ---- torchtitan ---------------------------------------------------------------------------------------


def _toml_flags(path: Path, text: str) -> dict[str, tuple[str, ...]]:
    """``[parallelism] tensor_parallel_degree = 8`` as ``--parallelism.tensor_parallel_degree 8``."""
    try:
        import tomllib  # Python 3.11 and later
    except ImportError:
        raise BadInputError(f"{path}: reading TOML needs Python 3.11. Give the options instead.") from None
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadInputError(f"{path}: not TOML: {error}.") from None
    sections = {name: entries for name, entries in table.items() if isinstance(entries, dict)}
    return {
        f"--{section}.{name}": (str(value),)
        for section, entries in sections.items()
        for name, value in entries.items()
    }


def _torchtitan(path: Path, text: str, given: Mapping[str, str]) -> Settings:
    """A TOML file (torchtitan up to 0.2), or a script with ``--parallelism.NAME VALUE`` options."""
    script = Script()
    if path.suffix == ".toml":
        flags = _toml_flags(path, text)
    else:
        script = read_script(text, given)
        flags = flags_of(script.words)
    read = _Reader(path, flags)
    if not any(flag.startswith(("--parallelism.", "--training.")) for flag in flags):
        raise BadInputError(
            f"{path}: no setting of torchtitan found (such as --parallelism.tensor_parallel_degree)."
        )
    p = "--parallelism."
    shard = read.maybe(f"{p}data_parallel_shard_degree")
    reshard = read.text(f"{p}fsdp_reshard_after_forward") or "default"
    modes = read.text("--activation_checkpoint.mode") or ("full" if "FullAC" in text else "none")
    pp = read.count(f"{p}pipeline_parallel_degree", 1)
    return Settings(
        "torchtitan",
        devices=_devices(script),
        tp=read.count(f"{p}tensor_parallel_degree", 1),
        pp=pp,
        cp=read.count(f"{p}context_parallel_degree", 1),
        ep=read.count(f"{p}expert_parallel_degree", 1),
        sp=read.count(f"{p}tensor_parallel_degree", 1) > 1,
        micro_batch=read.count(f"{p}pipeline_parallel_microbatch_size", 1)
        if pp > 1
        else read.count("--training.local_batch_size", 8),
        global_batch=read.maybe("--training.global_batch_size"),
        sequence=read.maybe("--training.seq_len"),
        dtype="bf16",
        zero=0 if shard == 1 else (2 if reshard == "never" else 3),
        replicate=read.count(f"{p}data_parallel_replicate_degree", 1),
        recompute={"full": "full", "selective": "selective"}.get(modes, "none"),
        said=flags,
        unknown=tuple(sorted(script.unknown)),
    )


# ---- DeepSpeed ----------------------------------------------------------------------------------------


def _deepspeed(path: Path, text: str, given: Mapping[str, str]) -> Settings:
    """A config file, or a script whose ``--deepspeed FILE`` names one."""
    script = Script()
    if path.suffix == ".json":
        config = _json(path, text)
    else:
        script = read_script(text, given)
        flags = flags_of(script.words)
        named = next((flags[f][0] for f in ("--deepspeed_config", "--deepspeed") if flags.get(f)), "")
        if not named:
            raise BadInputError(f"{path}: no --deepspeed_config FILE found. Give the JSON itself.")
        file = path.parent / named
        try:
            config = _json(file, file.read_text(encoding="utf-8"))
        except OSError as error:
            raise BadInputError(
                f"{path}: cannot read {file}: {error.strerror}. Give the JSON itself."
            ) from None
    zero: Any = config.get("zero_optimization", {})
    micro = config.get("train_micro_batch_size_per_gpu", 1)
    tp = config.get("tensor_parallel", {}).get("autotp_size", 1)
    said = {f"--{key}": (json.dumps(value),) for key, value in config.items()}
    batch = config.get("train_batch_size")
    return Settings(
        "deepspeed",
        devices=_devices(script),
        tp=int(tp),
        micro_batch=micro if isinstance(micro, int) else 1,
        global_batch=batch if isinstance(batch, int) else None,
        dtype="bf16"
        if config.get("bf16", {}).get("enabled")
        else ("fp16" if config.get("fp16", {}).get("enabled") else "fp32"),
        zero=int(zero.get("stage", 0)),
        said=said,
        unknown=tuple(sorted(script.unknown)),
    )


def _json(path: Path, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise BadInputError(f"{path}: not JSON: {error}.") from None
    if not isinstance(found, dict):
        raise BadInputError(f"{path}: expected an object of settings, found a {type(found).__name__}.")
    return found
