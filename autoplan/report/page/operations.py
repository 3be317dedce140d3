"""The operations of each region class: local graphs in, a zoomable drawing and a table of each out."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence

from torch import fx

from autoplan.plan import Plan
from autoplan.report.draw import render
from autoplan.report.markup import Child, Markup, tag
from autoplan.report.operations import OperationRow, operation_rows, operations_dot
from autoplan.report.page.charts import picture, section, table
from autoplan.units import count_text

_SVG = "{http://www.w3.org/2000/svg}"
_SHAPES = ("polygon", "path", "text")
_KEPT = ("points", "d", "x", "y", "text-anchor")


def operations_section(plan: Plan, graphs: Mapping[str, fx.GraphModule]) -> Markup:
    """One drawing and one table a layout; a sentence on how to have them without the model."""
    title = "Operations"
    if not graphs:
        how = "Add --model model.py to see every operation that one rank runs, with its shapes and messages."
        return section("operations", title, tag("p", how))
    intro = (
        "What one rank runs for one micro-batch, region class by region class: shapes are those on the rank. "
        "Drawings leave out views and casts that cost nothing; the tables have every operation."
    )
    classes = [
        _class(index, name, operation_rows(graph, plan.layouts[name]))
        for index, (name, graph) in enumerate(graphs.items())
        if name in plan.layouts
    ]
    return section("operations", title, tag("p", intro), classes)


def _class(index: int, name: str, rows: Sequence[OperationRow]) -> Markup:
    running = [row for row in rows if row.kind in ("product", "memory", "collective")]
    sending = sum(1 for row in running if row.kind == "collective")
    title = f"{name}: {len(running)} operations that run, {sending} collectives"
    return tag("details", tag("summary", title), _drawing(index, name, rows), _table(name, rows))


def _drawing(index: int, name: str, rows: Sequence[OperationRow]) -> Markup:
    """Graphviz's layout in this page's own style."""
    root = ElementTree.fromstring(render(operations_dot(rows), "svg"))
    left, top, wide, high = (float(number) for number in root.attrib["viewBox"].split())
    (whole,) = root.findall(f"{_SVG}g")
    parts = [_part(group) for group in whole.findall(f"{_SVG}g")]
    moved = tag("g", parts, transform=whole.attrib["transform"])
    inside = tag("g", moved, class_="scaled", transform=f"translate({-left:g},{-top:g})")
    drawn = picture(
        f"operations-{index}",
        f"Operations of {name}",
        "The table below lists them in order.",
        wide,
        high,
        inside,
    )
    return tag(
        "div", drawn, class_="zoom tall", tabindex="0", role="group", data_zoom="xy",
        aria_label=f"Graph of the operations of {name}; arrow keys move, plus and minus zoom",
    )  # fmt: skip


def _part(group: ElementTree.Element) -> Markup:
    """A node or an edge: its shapes, none of Graphviz's colours and names."""
    shapes: list[Child] = []
    for element in group.iter():
        kind = element.tag.removeprefix(_SVG)
        if kind in _SHAPES:
            kept = {key.replace("-", "_"): element.attrib[key] for key in _KEPT if key in element.attrib}
            shapes.append(tag(kind, element.text, **kept))
    return tag("g", shapes, class_=group.get("class"))


def _table(name: str, rows: Sequence[OperationRow]) -> Markup:
    cells = [
        [
            row.what,
            row.module,
            row.kind,
            row.result,
            row.placement,
            "; ".join(row.sends),
            count_text(row.flops) if row.flops else "",
        ]
        for row in rows
        if row.kind != "output"
    ]
    heads = ["operation", "module", "kind", "result on the rank", "placement", "sends", "FLOP forward"]
    return table(f"Operations of {name} in order", heads, cells, numbers_from=6)
