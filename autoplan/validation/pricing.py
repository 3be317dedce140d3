"""Published runs come in; what the cost models predict for exactly those configurations goes out.

Each shape is traced once (two blocks, the others are equal), each tensor-parallel degree measured once, and
every plan is fully pinned and priced as the search prices its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from autoplan.capture import Capture, capture_model
from autoplan.errors import AutoplanError
from autoplan.hardware import HardwareProfile, load_profile
from autoplan.plan import Mesh, Workload
from autoplan.planner.chain import Cut
from autoplan.planner.model_costs import ModelCosts
from autoplan.planner.pricing import Priced, Pricing
from autoplan.planner.space import Candidate, Pins
from autoplan.regions import Region
from autoplan.validation.clusters import cluster_of
from autoplan.validation.frameworks import dropout_of, execution_of
from autoplan.validation.points import Point
from autoplan.validation.transformer import TRACED_LAYERS, Shape, decoder_source
from autoplan_cost_models import CostModel


@dataclass(frozen=True)
class Forecast:
    """The prediction for one point, or ``skipped``: why there is none.

    ``memory_bytes`` is the peak that the source's figure counts (:func:`_counted`); ``refused`` says
    whether the search would have refused the configuration as not fitting.
    """

    point: Point
    skipped: str = ""
    step_s: float = 0.0
    memory_bytes: float = 0.0
    refused: bool = False
    breakdown_s: Mapping[str, float] | None = None

    @property
    def step_error(self) -> float | None:
        """Predicted over measured step time, less 1."""
        measured = self.point.step_time_s
        return None if self.skipped or measured is None else self.step_s / measured - 1

    @property
    def memory_error(self) -> float | None:
        """Predicted over measured peak, less 1, where the source counts the allocator's bytes."""
        measured = self.point.peak_memory_bytes
        if self.skipped or measured is None or self.point.is_nvidia_smi:
            return None
        return self.memory_bytes / measured - 1


def _counted(point: Point, priced: Priced, profile: HardwareProfile) -> float:
    """The peak as the source counts it: of all ranks or its last one's, of tensors or of what the allocator
    reserved for them."""
    kind = point.text.get("mem_kind", "")
    peaks = [stage.memory_peak_bytes for stage in priced.stages]
    peak = peaks[-1] if "last rank" in kind else max(peaks)
    return peak / (1.0 - profile.fragmentation.value) if "reserved" in kind else peak


# The dtype of the parameters for each precision; 8-bit ones are that of the linear layers' products.
DTYPES = {"bf16": "bf16", "fp16": "fp16", "fp8": "bf16", "fp8-cs": "bf16"}


def unpriced(point: Point) -> str:
    """Why a point cannot be priced, or an empty text."""
    if point.profile is None:
        return f"no hardware profile for {point.chip}"
    reasons: tuple[tuple[bool, str], ...] = (
        (point.experts > 0, "experts"),
        (point.text.get("mla") == "1", "latent attention"),
        (DTYPES.get(point.precision) is None, f"{point.precision} products"),
        ("V-Half" in point.schedule, "the V-Half schedule"),
        ("vocabulary" in point.schedule or "interlaced" in point.schedule, "a vocabulary spread over stages"),
        (point.text.get("cpu_offload") == "y", "states or activations on the host"),
    )
    return next((reason for holds, reason in reasons if holds), "")


class PointPricer:
    """Prices points, sharing captures and measured work between them."""

    def __init__(self) -> None:
        self._captures: dict[tuple[Shape, str], Capture] = {}
        self._costs: dict[tuple[Shape, str, str, str], ModelCosts] = {}
        self._profiles: dict[str, HardwareProfile] = {}

    def price(self, point: Point) -> Forecast:
        """The forecast of one point; what the models refuse is skipped with the reason."""
        reason = unpriced(point)
        if reason:
            return Forecast(point, skipped=reason)
        try:
            priced = self._priced(point)
        except AutoplanError as error:
            return Forecast(point, skipped=str(error).split(":")[0].split("\n")[0])
        return Forecast(
            point,
            step_s=priced.prediction.step_time_s,
            memory_bytes=_counted(point, priced, self._profile(point)),
            refused=not priced.fits,
            breakdown_s=priced.prediction.breakdown_s,
        )

    def _priced(self, point: Point) -> Priced:
        profile = cluster_of(point, self._profile(point))
        costs = self._model_costs(point, profile)
        mesh = Mesh(pp=point.pp, dp=point.dp, tp=point.tp, cp=point.cp, ep=point.ep)
        candidate = Candidate(
            mesh,
            point.micro_batch,
            point.microbatches,
            point.zero,
            zero_shard=point.zero_shard,
            schedule="interleaved_1f1b" if point.vpp > 1 else "1f1b",
            vpp=point.vpp,
            sp=point.sequence_parallel and point.tp > 1,
            cp_kind="ring" if point.cp > 1 else "",
        )
        workload = Workload(
            devices=point.devices,
            global_batch=point.global_batch,
            dtype=DTYPES[point.precision],
            tokens_per_sample=point.sequence,
        )
        pricing = Pricing(costs, profile, workload, Pins(), [candidate])
        return pricing.priced(candidate, published_cut(point, costs))

    def _profile(self, point: Point) -> HardwareProfile:
        name = point.profile or ""
        if name not in self._profiles:
            self._profiles[name] = load_profile(name)
        return self._profiles[name]

    def _model_costs(self, point: Point, profile: HardwareProfile) -> ModelCosts:
        """The shape's costs on this cluster, with as many blocks as the point has."""
        shape = shape_of(point)
        cluster = f"{profile.name} {profile.nic_bytes_per_s.value}"
        dtype = DTYPES[point.precision]
        key = (shape, dtype, cluster, repr(execution_of(point)))
        if key not in self._costs:
            captured = self._capture(shape, dtype)
            model = CostModel(profile, dtype, execution_of(point))
            self._costs[key] = ModelCosts(captured, model, lambda _: None)
        costs = self._costs[key]
        costs.regions = with_layers(costs.regions, point.layers)
        return costs

    def _capture(self, shape: Shape, dtype: str) -> Capture:
        if (shape, dtype) not in self._captures:
            self._captures[shape, dtype] = capture_model(decoder_source(shape), dtype=dtype)
        return self._captures[shape, dtype]


def shape_of(point: Point) -> Shape:
    """The architecture as the source states it; gated blocks are Llama's, the others GPT's."""
    squared = "squared-relu" in point.text.get("arch_note", "")
    return Shape(
        hidden=point.hidden,
        heads=point.heads,
        kv_heads=point.kv_heads,
        head_dim=point.head_dim,
        ffn=point.ffn,
        gated=point.gated,
        vocab=padded_vocabulary(point),
        tied=point.tied,
        sequence=point.sequence,
        activation="squared_relu" if squared else "gelu",
        attention="unfused" if "unfused" in point.text.get("attn_kernel", "") else "fused",
        dropout=dropout_of(point),
        rotary=point.gated or squared,
        eager=point.gated and not execution_of(point).fuses_pointwise,
    )


def padded_vocabulary(point: Point) -> int:
    """Megatron pads the vocabulary to a multiple of 128 x tp (make-vocab-size-divisible-by)."""
    unit = 128 * point.tp if "egatron" in point.framework else point.tp
    return -(-point.vocab // unit) * unit


def with_layers(regions: tuple[Region, ...], layers: int) -> tuple[Region, ...]:
    """The regions of a model with ``layers`` blocks equal to the traced ones."""
    blocks = [region for region in regions if region.name.startswith("layers.")]
    first, last = regions.index(blocks[0]), regions.index(blocks[-1])
    assert len({block.class_id for block in blocks}) == 1 and len(blocks) >= TRACED_LAYERS
    later = tuple(replace(blocks[-1], name=f"layers.{i}") for i in range(1, layers))
    return (*regions[:first], blocks[0], *later, *regions[last + 1 :])


def published_cut(point: Point, costs: ModelCosts) -> Cut:
    """Where the published run cuts its stages, and what it recomputes."""
    ahead = next(i for i, region in enumerate(costs.regions) if region.name.startswith("layers."))
    counts = layers_of_stages(point)
    ends = [ahead + sum(counts[: stage + 1]) for stage in range(len(counts))]
    ends[-1] = len(costs.regions)
    recompute = [
        _recompute_of(point, region.name) if region.name.startswith("layers.") else "none"
        for region in costs.regions
    ]
    return Cut(tuple(ends), tuple(recompute))


def layers_of_stages(point: Point) -> list[int]:
    """Blocks of each stage: even; where they do not divide, embedding and head count as a block each; where
    the source redistributes them for the output layer, by FLOPs."""
    stages, layers, notes = point.pp * point.vpp, point.layers, point.text.get("notes", "")
    if "redistributed" in point.schedule:
        return _balanced(point)
    ends = [re.search(rf"decoder-{end}-pipeline-num-layers=(\d+)", notes) for end in ("first", "last")]
    if all(ends) and stages > 2:
        first, last = (int(found[1]) for found in ends if found)
        return [first, *[(layers - first - last) // (stages - 2)] * (stages - 2), last]
    if layers % stages == 0 and "account-for" not in notes:
        return [layers // stages] * stages
    if (layers + 2) % stages == 0 and stages > 1:
        each = (layers + 2) // stages
        return [each - (stage in (0, stages - 1)) for stage in range(stages)]
    return [layers // stages + (stage < layers % stages) for stage in range(stages)]


def _balanced(point: Point) -> list[int]:
    """The last stage gives up blocks as long as that shortens the longest stage; late stages take them, where
    fewer micro-batches are in flight."""
    matrices = 3 if point.gated else 2
    block = 2 * point.hidden * point.head_dim * (point.heads + point.kv_heads)
    block += matrices * point.hidden * point.ffn + point.sequence * point.heads * point.head_dim
    head = point.hidden * point.vocab / block
    others = point.pp - 1

    def longest(last: int) -> float:
        return max(last + head, -(-(point.layers - last) // others))

    last = min(range(point.layers // point.pp, -1, -1), key=longest)
    rest = point.layers - last
    early = others - rest % others
    return [rest // others + (stage >= early) for stage in range(others)] + [last]


def _recompute_of(point: Point, region: str) -> str:
    if "every 2nd" in point.text.get("recompute_detail", ""):
        return "full" if int(region.rpartition(".")[2]) % 2 else "none"
    return point.recompute if point.recompute in ("selective", "full") else "none"


Say = Callable[[str], None]


def price_points(points: list[Point], say: Say) -> list[Forecast]:
    """Forecasts in the order of the points; runs of one shape are priced together."""
    pricer = PointPricer()
    order = sorted(range(len(points)), key=lambda i: (str(points[i].profile), str(shape_of(points[i])), i))
    found: dict[int, Forecast] = {}
    for done, index in enumerate(order):
        say(f"pricing {points[index].subset} ({done + 1} of {len(points)})")
        found[index] = pricer.price(points[index])
    return [found[index] for index in range(len(points))]
