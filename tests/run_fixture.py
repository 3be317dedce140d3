"""Plans made by hand (no search): even stages, layouts by the LP under flat prices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from torch import fx

from autoplan.capture import Capture
from autoplan.plan import Layout, Mesh, ModelIdentity, Part, Plan, RegionPlan, Stage, Workload
from autoplan.planner.boundaries import mark_dims, token_boundaries
from autoplan.planner.context import Context, joined
from autoplan.planner.layout import WHOLE, Boundary, LayoutSettings, choose_layout
from autoplan.planner.layout_pricing import SEQUENCE_SETTINGS
from autoplan.planner.space import Inside
from autoplan.regions import Region, find_regions, region_graph
from autoplan_passes.experts import expert_layout
from autoplan_passes.shard import dry_groups, shard_region
from autoplan_passes.stages import capture_loss
from autoplan_passes.states import State, parse_state


class FlatPrices:
    """Products dear, the rest cheap; a collective costs its bytes."""

    def operation_s(self, node: fx.Node, fraction: float) -> float:
        heavy = any(word in str(node.target) for word in ("linear", "matmul", "attention", "bmm", "addmm"))
        return fraction * (1e-2 if heavy else 1e-5)

    def collective_s(self, kind: str, bytes: float) -> float:
        return 1e-5 + bytes * 1e-10


@dataclass
class HandPlans:
    """Plans of one capture; layouts are chosen once per class and way to cut.

    ``stored`` says how parameters whose name ends so are stored on tp.
    """

    capture: Capture
    name: str
    global_batch: int = 8
    stored: Mapping[str, str] = field(default_factory=dict)
    regions: tuple[Region, ...] = ()
    layouts: dict[tuple[str, Inside], Layout] = field(default_factory=dict)
    graphs: dict[str, fx.GraphModule] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.regions = find_regions(self.capture)
        self.batch = max(2, self.capture.batch) if self.capture.batch_form.known else self.capture.batch

    def graph(self, class_id: str) -> fx.GraphModule:
        """The class's graph at two samples, where the batch can be told from the tokens."""
        if class_id not in self.graphs:
            region = next(r for r in self.regions if r.class_id == class_id)
            self.graphs[class_id] = region_graph(self.capture, region, self.batch)
        return self.graphs[class_id]

    def boundary(self, region: Region, inside: Inside) -> Boundary:
        if not inside.sp:
            return WHOLE
        kinds = mark_dims(self.capture, self.regions, self.graph, self.batch)
        found = token_boundaries(kinds, self.regions, self.graph, self.batch, inside.tp, before=inside.cp)
        return found[region.class_id]

    def context(self, region: Region, inside: Inside) -> Layout:
        """The layout on cp."""
        if inside.cp == 1:
            return Layout(region.class_id)
        kinds = mark_dims(self.capture, self.regions, self.graph, self.batch)
        shared = Context(kinds, self.regions, self.graph, self.batch, capture_loss(self.capture))
        return shared.layout(region.class_id, inside.cp, inside.cp_kind, FlatPrices())

    def layout(self, region: Region, inside: Inside, pinned: Mapping[str, State]) -> Layout:
        key = (region.class_id, inside)
        if key not in self.layouts:
            context = self.context(region, inside)
            local = shard_region(self.graph(region.class_id), context)
            experts = expert_layout(local, inside.ep)
            before = joined(context, Layout("").replace_axis("ep", experts))
            graph = shard_region(self.graph(region.class_id), before)
            names = {n.meta["source"]: n.name for n in graph.graph.nodes if n.meta.get("kind") == "parameter"}
            held = {names[source]: state for source, state in pinned.items() if source in names}
            for source, name in names.items() if inside.tp > 1 else ():
                for text in (text for end, text in self.stored.items() if source.endswith(end)):
                    held[name] = parse_state(text)
            with dry_groups(before):
                chosen = choose_layout(
                    graph,
                    inside.tp,
                    FlatPrices(),
                    pinned_parameters=held,
                    settings=SEQUENCE_SETTINGS if inside.sp else LayoutSettings(),
                    boundary=self.boundary(region, inside),
                )
            placed = joined(before, chosen)
            self.layouts[key] = replace(placed, region_class=region.class_id)
        return self.layouts[key]

    def plan(
        self,
        *,
        pp: int = 1,
        dp: int = 1,
        tp: int = 1,
        ep: int = 1,
        sp: bool = False,
        cp: int = 1,
        cp_kind: str = "ulysses",
        micro_batch: int = 2,
        recompute: Sequence[str] = ("none",),
        zero: int = 0,
        zero_shard: int = 0,
        schedule: str = "1f1b",
        vpp: int = 1,
    ) -> Plan:
        """Regions spread evenly over the stages, ``recompute`` kinds in turn."""
        layouts: dict[str, Layout] = {}
        pinned: dict[str, State] = {}
        for region in reversed(self.regions):  # the head first: a tied table follows it
            layout = self.layout(region, Inside(tp, cp, ep, sp, cp_kind if cp > 1 else ""), pinned)
            layouts[region.class_id] = layout
            graph = region_graph(self.capture, region, self.capture.batch)
            for node in graph.graph.nodes:
                if node.meta.get("kind") == "parameter":
                    pinned.setdefault(
                        node.meta["source"], parse_state(layout.tp.parameters.get(node.name, "R"))
                    )
        entries = [
            RegionPlan(region.name, region.class_id, recompute[i % len(recompute)])
            for i, region in enumerate(self.regions)
        ]
        cuts = [len(entries) * i // (pp * vpp) for i in range(pp * vpp + 1)]
        stages = tuple(Stage(tuple(entries[a:b])) for a, b in pairwise(cuts))
        microbatches = self.global_batch // dp // micro_batch
        part = Part("model", Mesh(pp, dp, tp, cp, ep), micro_batch, microbatches, schedule, zero, stages, vpp)
        part = replace(part, zero_shard=zero_shard)
        return Plan(
            model=ModelIdentity(self.name, self.capture.source, self.capture.fingerprint, 0, 0),
            hardware="cpu",
            hardware_fingerprint="",
            workload=Workload(
                pp * dp * cp * tp, self.global_batch, self.capture.dtype, sizes=self.capture.sizes
            ),
            parts=(part,),
            layouts=layouts,
        )
