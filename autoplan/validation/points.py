"""A CSV of published training runs comes in; typed :class:`Point` records go out, each with its source.

``points.csv`` beside this file holds the runs that can be reproduced by calculation; its columns are those
that ``autoplan validate --data ROWS.csv`` takes.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from autoplan.errors import BadInputError

SHIPPED = Path(__file__).parent / "points.csv"
REQUIRED = (
    *("id", "subset", "framework", "model", "layers", "hidden", "heads", "ffn", "vocab", "chip"),
    *("num_gpus", "precision", "seq_len", "gbs", "mbs", "tp", "pp", "dp"),
)
# What a source calls a chip -> the profile that describes it.
CHIPS = {
    "A100": "a100-80",
    "A100-80G": "a100-80",
    "A100-40G": "a100-40",
    "H100-80G": "h100",
    "H800-80G": "h800",
    "H200": "h200",
    "B200": "b200",
    "B300": "b300",
    "GB200": "gb200",
    "Ascend-910B (Atlas 900 A2)": "ascend-910b",
}


@dataclass(frozen=True)
class Point:
    """One published run: architecture, configuration and what was measured, as published.

    ``step_time_s`` and ``peak_memory_bytes`` are None where the source does not say or says so with low
    confidence. ``text`` keeps every column.
    """

    name: str
    subset: str
    chip: str
    framework: str
    model: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    gated: bool
    vocab: int
    tied: bool
    experts: int
    devices: int
    precision: str
    sequence: int
    global_batch: int
    micro_batch: int
    tp: int
    pp: int
    vpp: int
    dp: int
    cp: int
    ep: int
    sequence_parallel: bool
    zero: int
    recompute: str
    schedule: str
    step_time_s: float | None
    peak_memory_bytes: float | None
    out_of_memory: bool
    text: Mapping[str, str]

    @property
    def profile(self) -> str | None:
        """The hardware profile of the chip, or None."""
        return CHIPS.get(self.chip)

    @property
    def microbatches(self) -> int:
        return self.global_batch // (self.dp * self.micro_batch)

    @property
    def zero_shard(self) -> int:
        """How many replicas share one copy of what ZeRO shards; 0: all of them."""
        stated = self.text.get("zero_shard_size", "").strip()
        replicas = self.dp * self.cp
        groups = self.zero > 0 and stated.isdigit() and 0 < int(stated) < replicas
        return int(stated) if groups and replicas % int(stated) == 0 else 0

    @property
    def workload_key(self) -> tuple[object, ...]:
        """Equal for runs that differ in nothing but how they were configured."""
        architecture = (self.layers, self.hidden, self.heads, self.kv_heads, self.ffn, self.vocab)
        trained = (self.sequence, self.global_batch, self.devices, self.precision, self.framework)
        repaired = "fix" in self.text.get("notes", "")  # a cluster before and after its repair is two
        return (self.subset, self.chip, *architecture, *trained, repaired)

    @property
    def is_nvidia_smi(self) -> bool:
        """Whether the memory is that of the whole device, not of the allocator."""
        return "smi" in self.text.get("mem_kind", "")


def read_points(path: Path | None = None) -> list[Point]:
    """The rows of ``path`` (default: those that ship); BadInputError names a missing column or bad value."""
    file = path or SHIPPED
    if not file.is_file():
        raise BadInputError(f"{file}: no such file; --data takes a CSV with the columns of {SHIPPED.name}.")
    with file.open(newline="", encoding="utf-8") as stream:
        rows = csv.DictReader(stream)
        missing = [name for name in REQUIRED if name not in (rows.fieldnames or ())]
        if missing:
            raise BadInputError(f"{file}: expected the columns {', '.join(missing)}, which it lacks.")
        return list(_points(file, rows))


def _points(file: Path, rows: Iterable[Mapping[str, str]]) -> Iterable[Point]:
    for number, row in enumerate(rows, start=2):
        try:
            yield _point({key: value or "" for key, value in row.items() if key})
        except ValueError as error:
            raise BadInputError(f"{file}:{number}: {error}.") from None


def _point(row: dict[str, str]) -> Point:
    def whole(name: str, default: int | None = None) -> int:
        text = row.get(name, "").strip()
        if not text and default is not None:
            return default
        try:
            return int(float(text))
        except ValueError:
            raise ValueError(f"column {name} should be a whole number, got {text!r}") from None

    heads, hidden = whole("heads"), whole("hidden")
    ffn = whole("ffn", 0) or whole("moe_ffn", 0)
    certain = row.get("confidence") != "low"
    return Point(
        name=row["id"],
        subset=row["subset"],
        chip=row["chip"],
        framework=row["framework"],
        model=row["model"],
        layers=whole("layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=whole("kv_heads", heads),
        head_dim=whole("head_dim", hidden // heads),
        ffn=ffn,
        gated=row.get("gated_mlp") == "1",
        vocab=whole("vocab"),
        tied=row.get("tied_embeddings") == "1",
        experts=whole("experts", 0),
        devices=whole("num_gpus"),
        precision=row["precision"],
        sequence=whole("seq_len"),
        global_batch=whole("gbs"),
        micro_batch=whole("mbs"),
        tp=whole("tp"),
        pp=whole("pp"),
        vpp=whole("vpp", 1),
        dp=whole("dp"),
        cp=whole("cp", 1),
        ep=whole("ep", 1),
        sequence_parallel=row.get("sp") == "y",
        zero=_zero_stage(row.get("dist_opt", "")),
        recompute=row.get("recompute") or "none",
        schedule=row.get("schedule", ""),
        step_time_s=_measured(row, "step_time_s", 1.0) if certain else None,
        peak_memory_bytes=_measured(row, "peak_mem_gb", 1e9),
        out_of_memory="OOM" in row.get("status", ""),
        text=row,
    )


def _measured(row: Mapping[str, str], name: str, unit: float) -> float | None:
    text = row.get(name, "").strip()
    try:
        return float(text) * unit if text else None
    except ValueError:
        raise ValueError(f"column {name} should be a number, got {text!r}") from None


def _zero_stage(optimizer: str) -> int:
    """``zero1 (distributed optimizer)`` -> 1; full sharding by any name is 3."""
    found = re.search(r"zero[ -]?([0-3])", optimizer.lower())
    if found and not optimizer.startswith("none"):
        return int(found.group(1))
    return 3 if "fsdp" in optimizer.lower() else 0
