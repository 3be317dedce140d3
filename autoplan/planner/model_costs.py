"""What each region class costs under each way to cut it: layouts chosen and measured once, priced many times.

Comes in: a capture and a cost model. Goes out: layouts, measured work and costs per (region class, Inside).
"""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import fx

from autoplan.capture.program import Capture
from autoplan.errors import BadInputError
from autoplan.plan import FUSE, Layout
from autoplan.planner.boundaries import mark_dims, token_boundaries
from autoplan.planner.context import Context, joined
from autoplan.planner.fusion_space import LOSS, kernels_at
from autoplan.planner.layout import (
    WHOLE,
    Boundary,
    LayoutSettings,
    attention_heads,
    choose_layout,
    tp_degrees,
)
from autoplan.planner.layout_pricing import SEQUENCE_SETTINGS
from autoplan.planner.space import ALONE, Inside, divisors
from autoplan.regions import Region, find_regions, region_graph
from autoplan_cost_models.between import work_between
from autoplan_cost_models.execution import PLAIN_LOGIT_BYTES, Execution
from autoplan_cost_models.region_cost import CostModel, RegionCost, RegionWork, measure_region
from autoplan_passes.calls import op_name
from autoplan_passes.experts import expert_layout, find_expert_chains
from autoplan_passes.fuse import Fused, described, fuse
from autoplan_passes.shard import dry_groups, shard_region
from autoplan_passes.stages import capture_loss
from autoplan_passes.states import State, parse_state


@dataclass(frozen=True)
class Measured:
    """One region class under one way to cut it."""

    layout: Layout
    work: RegionWork


# By level of fusion: layouts and work by class, and the states that tied parameters have.
Known = dict[str, tuple[dict[tuple[str, Inside], Measured], dict[tuple[str, Inside], State]]]


class ModelCosts:
    """Measures lazily and remembers; everything is per region class, never per region."""

    def __init__(
        self,
        capture: Capture,
        cost_model: CostModel,
        say: Callable[[str], None],
        kernels: Sequence[str] = (),
        *,
        vocabulary: bool = False,
    ) -> None:
        """``kernels``: the chip's fused ones (:func:`autoplan.planner.fusion_space.fused_kernels`).
        ``vocabulary``: tp cuts token tables along the vocabulary, whatever else may be faster."""
        self.capture, self._vocabulary = capture, vocabulary
        self.cost_model = cost_model
        self.kernels = tuple(kernels)
        self._less_fused: dict[str, ModelCosts] = {}
        self.regions = find_regions(capture)
        self.classes: dict[str, Region] = {}
        for region in self.regions:
            self.classes.setdefault(region.class_id, region)
        self.names = _class_names(self.classes)
        self.spent_s = 0.0
        self._timing = False
        self._say = say
        self._graphs: dict[tuple[str, int], Fused] = {}
        self._measured: dict[tuple[str, Inside], Measured] = {}
        self._tied = _parameters_of_several_classes(self.regions)
        self._pinned: dict[tuple[str, Inside], State] = {}
        self._costs: dict[tuple[str, Inside, int], RegionCost] = {}
        self._exact: dict[tuple[str, Inside, int], RegionWork] = {}
        self._boundaries: dict[tuple[int, int], dict[str, Boundary]] = {}
        # A layout is chosen for two samples, where dims that merge samples with tokens show it.
        self._batch = max(2, capture.batch) if capture.batch_form.known else capture.batch
        self._kinds = mark_dims(capture, self.regions, self._base_graph, self._batch)
        self.context = Context(
            self._kinds, self.regions, self._base_graph, self._batch, capture_loss(capture)
        )

    def repriced(self, cost_model: CostModel) -> ModelCosts:
        """The same layouts and measured work at other prices."""
        other = copy.copy(self)
        other.cost_model, other._costs = cost_model, {}
        other._less_fused = {fuse: costs.repriced(cost_model) for fuse, costs in self._less_fused.items()}
        return other

    def _fused(self, class_id: str, batch: int) -> Fused:
        """The class's graph at one micro-batch, with what the chip has kernels for fused."""
        if (class_id, batch) not in self._graphs:
            graph = region_graph(self.capture, self.classes[class_id], batch)
            self._graphs[class_id, batch] = fuse(graph, self.kernels)
        return self._graphs[class_id, batch]

    def _graph(self, class_id: str, batch: int) -> fx.GraphModule:
        return self._fused(class_id, batch).graph

    @property
    def fused_kernels(self) -> frozenset[str]:
        """The kernels that some region can use."""
        return frozenset(name for class_id in self.classes for name in self._kernels_of(class_id))

    def _kernels_of(self, class_id: str) -> tuple[str, ...]:
        return self._fused(class_id, self._batch).kernels

    def _at(self, inside: Inside) -> tuple[ModelCosts, Inside]:
        """The costs at a level of fusion, which differ in their graphs alone."""
        if inside.fuse == FUSE[0]:
            return self, inside
        if inside.fuse not in self._less_fused:
            fewer = kernels_at(self.kernels, inside.fuse)
            self._less_fused[inside.fuse] = ModelCosts(
                self.capture, self.cost_model, self._say, fewer, vocabulary=self._vocabulary
            )
        return self._less_fused[inside.fuse], replace(inside, fuse=FUSE[0])

    def _base_graph(self, class_id: str) -> fx.GraphModule:
        return self._graph(class_id, self._batch)

    def _boundary(self, class_id: str, inside: Inside) -> Boundary:
        """What crosses the class's boundary on tp: cut along its tokens under sequence parallelism."""
        if not inside.sp:
            return WHOLE
        return self._boundaries_at(inside.tp, inside.cp)[class_id]

    def _boundaries_at(self, tp: int, cp: int = 1) -> dict[str, Boundary]:
        if (tp, cp) not in self._boundaries:
            self._boundaries[tp, cp] = token_boundaries(
                self._kinds, self.regions, self._base_graph, self._batch, tp, before=cp
            )
        return self._boundaries[tp, cp]

    def cuts_tokens(self, tp: int) -> bool:
        """Whether some tensor between regions has tokens that ``tp`` ranks can share."""
        return any(boundary.inputs for boundary in self._boundaries_at(tp).values())

    def heads(self) -> list[tuple[str, int, int]]:
        """(class name, query heads, key-value heads) of every attention op of the model."""
        found: list[tuple[str, int, int]] = []
        for class_id in self.classes:
            graph = self._graph(class_id, self.capture.batch)
            found += [(self.names[class_id], q, kv) for _, q, kv in attention_heads(graph)]
        return found

    def tp_degrees(self, most: int) -> list[int]:
        """Degrees up to ``most`` by which the heads of every attention op may be cut."""
        found = [set(degrees) for c in self.classes if (degrees := tp_degrees(self._base_graph(c)))]
        return [t for t in range(1, most + 1) if all(t in degrees for degrees in found)]

    @cached_property
    def expert_degrees(self) -> list[int]:
        """Degrees that divide the experts of every region class that has some; 1 alone where none has."""
        experts = [size for sizes in self._experts.values() for size in sizes]
        return divisors(math.gcd(*experts)) if experts else [1]

    @cached_property
    def _experts(self) -> dict[str, list[int]]:
        """How many experts each chain of a class has, for the classes that have any."""
        chains = {c: find_expert_chains(self._base_graph(c).graph) for c in self.classes}
        return {c: [chain.experts for chain in found] for c, found in chains.items() if found}

    def _own(self, class_id: str, inside: Inside) -> Inside:
        """A class without experts is the same at every ep, one with nothing less to fuse at every level."""
        inside = inside if class_id in self._experts else replace(inside, ep=1)
        sharing = [c for c in self._order(class_id) if c in self.classes]
        lost = any(set(self._kernels_of(c)) - {*kernels_at(self.kernels, inside.fuse)} for c in sharing)
        return inside if lost else replace(inside, fuse=FUSE[0])

    def measured(self, class_id: str, inside: Inside) -> Measured:
        """The class's best layout under ``inside`` and its measured work."""
        inside = self._own(class_id, inside)
        if inside.fuse != FUSE[0]:
            with self.timed():
                other, plain = self._at(inside)
                return other.measured(class_id, plain)
        if (class_id, inside) not in self._measured:
            with self.timed():
                for other in self._order(class_id):
                    if (other, inside) not in self._measured:
                        self._say(f"choosing the layout of {self.names[other]} for {inside_text(inside)}")
                        measure = self._measure if inside.ep == 1 else self._measure_experts
                        self._measured[other, inside] = measure(other, inside)
        return self._measured[class_id, inside]

    def known(self) -> Known:
        """What has been measured, at every level of fusion."""
        levels = {FUSE[0]: self, **self._less_fused}
        return {level: (costs._measured, costs._pinned) for level, costs in levels.items()}

    def learn(self, known: Known) -> None:
        """Take over what was measured elsewhere."""
        for level, (measured, pinned) in known.items():
            costs, _ = self._at(replace(ALONE, fuse=level))
            costs._measured |= measured
            costs._pinned |= pinned

    @contextlib.contextmanager
    def timed(self) -> Generator[None]:
        """Adds to ``spent_s``; measuring one class may ask for another, which is counted once."""
        outermost, self._timing = not self._timing, True
        start = time.perf_counter()
        try:
            yield
        finally:
            if outermost:
                self.spent_s += time.perf_counter() - start
                self._timing = False

    def cost(self, class_id: str, inside: Inside, micro_batch: int) -> RegionCost:
        """The class's cost at a micro-batch."""
        inside = self._own(class_id, inside)
        if inside.fuse != FUSE[0]:
            other, plain = self._at(inside)
            return other.cost(class_id, plain, micro_batch)
        key = (class_id, inside, micro_batch)
        if key not in self._costs:
            work = self._work_at(class_id, inside, micro_batch)
            self._costs[key] = self.cost_model.region_cost(work, micro_batch, inside.spans)
        return self._costs[key]

    def layouts(self, inside: Inside, micro_batch: int) -> dict[str, Layout]:
        """The layout of every class by class name, with the bytes of one micro-batch of that size."""
        return {
            self.names[class_id]: self._layout(class_id, inside, micro_batch) for class_id in self.classes
        }

    def _layout(self, class_id: str, inside: Inside, micro_batch: int) -> Layout:
        found, work = self.measured(class_id, inside), self._work_at(class_id, inside, micro_batch)
        steps = work.steps_to(micro_batch)
        sizes = [(form, form.size.at(steps)) for form in work.collectives]
        other, _ = self._at(self._own(class_id, inside))
        fused = other._fused(class_id, self._batch)
        missed = [
            one for one in fused.missed if one.kernel in other.kernels or one.kernel not in self.kernels
        ]
        return replace(
            found.layout,
            kernels=fused.kernels,
            unfused=described(missed),
            collective_bytes_forward=sum(form.forward * size for form, size in sizes),
            collective_bytes_backward=sum(form.backward * size for form, size in sizes),
            output_bytes=self.cost(class_id, inside, micro_batch).output_bytes,
        )

    def _measure_experts(self, class_id: str, inside: Inside) -> Measured:
        """Layouts are chosen at the least degree, and measured there and at the largest: see
        :func:`work_between`."""
        degrees = self.expert_degrees
        least, most = degrees[1], degrees[-1]
        if inside.ep == least:
            return self._measure(class_id, inside)
        first = self.measured(class_id, replace(inside, ep=least))
        layout = first.layout.replace_axis("ep", replace(first.layout.on("ep"), size=inside.ep))
        if inside.ep == most:
            whole = self.measured(class_id, ALONE).work
            return Measured(layout, self._work(class_id, layout, whole))
        last = self.measured(class_id, replace(inside, ep=most))
        return Measured(layout, work_between(first.work, last.work, (least, most), inside.ep))

    def _measure(self, class_id: str, inside: Inside) -> Measured:
        before, base = self._on_cp(class_id, inside)
        if inside.ep > 1:
            experts = Layout("").replace_axis("ep", expert_layout(base, inside.ep))
            with dry_groups(before):
                base = shard_region(base, experts)
            before = with_sends(before.replace_axis("ep", experts.on("ep")), base)
        prices = self.cost_model.layout_prices(inside.spans["tp"])
        pinned = {
            node.name: self._pinned[node.meta["source"], inside]
            for node in base.graph.nodes
            if node.op == "placeholder" and (node.meta["source"], inside) in self._pinned
        }
        if self._vocabulary:
            pinned = {**vocabulary_pins(base.graph, inside.tp), **pinned}
        with dry_groups(before):
            layout = choose_layout(
                base,
                inside.tp,
                prices,
                pinned_parameters=pinned,
                settings=SEQUENCE_SETTINGS if inside.sp else LayoutSettings(),
                boundary=self._boundary(class_id, inside),
            )
        layout = replace(joined(before, layout), region_class=self.names[class_id])
        for node in base.graph.nodes:
            if node.op == "placeholder" and node.meta["source"] in self._tied:
                state = parse_state(layout.tp.parameters.get(node.name, "R"))
                self._pinned[node.meta["source"], inside] = state
        whole = self.measured(class_id, ALONE).work if inside != ALONE else None
        return Measured(layout, self._work(class_id, layout, whole))

    def _on_cp(self, class_id: str, inside: Inside) -> tuple[Layout, fx.GraphModule]:
        """The class's layout on cp, and the local graph that it leaves to tp."""
        whole = self._base_graph(class_id)
        if inside.cp == 1:
            return Layout(self.names[class_id]), whole
        prices = self.cost_model.layout_prices(inside.spans["cp"])
        layout = self.context.layout(class_id, inside.cp, inside.cp_kind, prices)
        return layout, shard_region(whole, layout)

    def _work_at(self, class_id: str, inside: Inside, micro_batch: int) -> RegionWork:
        """The work from which one micro-batch is priced: measured there where samples are paired with one
        another (sizes then grow with the square of the batch), else linear from two others."""
        other, inside = self._at(self._own(class_id, inside))
        if other is not self:
            return other._work_at(class_id, inside, micro_batch)
        found = self.measured(class_id, inside)
        if not self.capture.coupled_at:
            return found.work
        key = (class_id, inside, micro_batch)
        if key not in self._exact:
            whole = self._work_at(class_id, ALONE, micro_batch) if inside != ALONE else None
            with dry_groups(found.layout):
                local = shard_region(self._graph(class_id, micro_batch), found.layout)
                self._exact[key] = self._measured_work({micro_batch: local}, whole)
        return self._exact[key]

    def _work(self, class_id: str, layout: Layout, whole: RegionWork | None) -> RegionWork:
        """Measure the class's local graphs at two micro-batches; from the second on, where the first takes
        other kernels (a broadcast over one sample needs no sum in its backward)."""
        first = self.capture.batch
        pairs = [(first, first + 1), (first + 1, first + 2)] if self.capture.batch_form.known else [(first,)]
        for pair in pairs:
            with dry_groups(layout):
                local = {batch: shard_region(self._graph(class_id, batch), layout) for batch in pair}
                try:
                    return self._measured_work(local, whole)
                except BadInputError:
                    if pair == pairs[-1]:
                        raise
        raise AssertionError("no micro-batch pair")

    def _measured_work(self, graphs: dict[int, fx.GraphModule], whole: RegionWork | None) -> RegionWork:
        model = self.cost_model
        return measure_region(
            graphs, whole=whole, fused_attention=model.fused_attention, execution=self._execution
        )

    @property
    def _execution(self) -> Execution:
        """As the cost model says; without kernels of its own a chip makes the fused loss op by op."""
        execution, own = self.cost_model.execution, self.cost_model.profile.kernels
        plain = not {"triton", LOSS} & {*own}
        return replace(execution, logit_bytes=PLAIN_LOGIT_BYTES) if plain else execution

    def _order(self, class_id: str) -> list[str]:
        """Classes that share a parameter are laid out together, the last of them (the head) first."""
        region = self.classes[class_id]
        if not self._tied.intersection(region.parameters):
            return [class_id]
        sharing = [c for c, other in self.classes.items() if self._tied.intersection(other.parameters)]
        return list(reversed(sharing))


def with_sends(layout: Layout, local: fx.GraphModule) -> Layout:
    """The layout with the counts of what its experts' rows send."""
    found = [one for node in local.graph.nodes for one in node.meta.get("collective", ())]
    sent = [one for one in found if one[-1] == "ep"]
    forward = Counter(kind for kind, *_ in sent if kind != "none")
    backward = Counter(kind for _, kind, *_ in sent if kind != "none")
    return replace(
        layout,
        collectives_forward=dict(Counter(layout.collectives_forward) + forward),
        collectives_backward=dict(Counter(layout.collectives_backward) + backward),
    )


def vocabulary_pins(graph: fx.Graph, tp: int) -> dict[str, State]:
    """How frameworks store tables: the largest of a region cut along its rows (the vocabulary), the others
    (of positions, of types) whole."""
    lookups = [node for node in graph.nodes if op_name(node) == "aten.embedding"]
    tables = {node.args[0] for node in lookups if getattr(node.args[0], "op", "") == "placeholder"}
    ranked = sorted(tables, key=lambda table: -table.meta["val"].numel())
    if tp == 1 or not ranked or ranked[0].meta["val"].shape[0] % tp:
        return {}
    return {table.name: parse_state("R" if i else "S(0)") for i, table in enumerate(ranked)}


def inside_text(inside: Inside) -> str:
    """``tp=8 cp=2 ring sp``: the axes that are used."""
    degrees = [
        f"{axis}={size}"
        for axis, size in (("tp", inside.tp), ("cp", inside.cp), ("ep", inside.ep))
        if size > 1
    ]
    words = (*degrees, inside.cp_kind, "sp" if inside.sp else "")
    return " ".join(word for word in words if word) or "one device"


def _class_names(classes: dict[str, Region]) -> dict[str, str]:
    """Readable unique names: the module class, numbered when several classes share it."""
    names: dict[str, str] = {}
    seen: Counter[str] = Counter()
    for class_id, region in classes.items():
        base = region.module_class or region.name
        seen[base] += 1
        names[class_id] = base if seen[base] == 1 else f"{base}-{seen[base]}"
    return names


def _parameters_of_several_classes(regions: tuple[Region, ...]) -> set[str]:
    """Qualified names of parameters that regions of different classes read."""
    readers: dict[str, set[str]] = {}
    for region in regions:
        for name in region.parameters:
            readers.setdefault(name, set()).add(region.class_id)
    return {name for name, classes in readers.items() if len(classes) > 1}
