"""What one rank runs inside a region: its local graph and layout in, a row an operation and a drawing out.

The drawing leaves out what costs nothing on a device (views, transposes, casts to the same dtype): their
users are drawn on what they view. The rows have everything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from torch import fx

from autoplan.plan import Layout
from autoplan.units import bytes_text, count_text
from autoplan_cost_models.node_facts import op_name, outputs_of
from autoplan_cost_models.operations import operations
from autoplan_passes.shard import dry_groups

# Kinds of operations as a reader thinks of them; what is not here is "memory".
DRAWN_AS = {"gemm": "product", "grouped_gemm": "product", "attention": "product", "collective": "collective"}


@dataclass(frozen=True)
class OperationRow:
    """One node of the local graph, for one micro-batch on one rank.

    ``kind`` is ``input parameter product memory collective free output``; ``placement`` how the result lies
    on each axis that cuts the region, empty where it is whole; ``sends`` one text a collective.
    """

    name: str
    what: str
    module: str
    kind: str
    result: str
    placement: str
    sends: tuple[str, ...]
    flops: float
    inputs: tuple[str, ...]


def operation_rows(graph: fx.GraphModule, layout: Layout) -> tuple[OperationRow, ...]:
    """Every node in the order it runs."""
    with dry_groups(layout):
        work = {operation.name: operation for operation in operations(graph)}
    rows: list[OperationRow] = []
    for node in graph.graph.nodes:
        done = work.get(node.name)
        calls = (
            ()
            if done is None
            else (("forward", done.forward_collectives), ("backward", done.backward_collectives))
        )
        sends = tuple(
            f"{when} {call.kind.replace('_', '-')} on {call.axis}, {bytes_text(call.bytes)}"
            for when, collectives in calls
            for call in collectives
        )
        rows.append(
            OperationRow(
                name=node.name,
                what=_what(node),
                module=_module(node),
                kind=_kind(node, "" if done is None else done.kind),
                result=_result(node),
                placement=_placement(node, layout),
                sends=sends,
                flops=0.0 if done is None else done.forward_flops,
                inputs=tuple(source.name for source in node.all_input_nodes),
            )
        )
    return tuple(rows)


def _kind(node: fx.Node, priced: str) -> str:
    if node.op == "placeholder":
        return "parameter" if node.meta.get("kind") == "parameter" else "input"
    if node.op == "output":
        return "output"
    return "free" if priced == "free" else DRAWN_AS.get(priced, "memory")


def _what(node: fx.Node) -> str:
    """The op's own name; a placeholder by the name it has in the model."""
    if node.op == "placeholder":
        return str(node.meta.get("source", node.name))
    return op_name(node) if node.op == "call_function" else node.op


def _module(node: fx.Node) -> str:
    """The innermost module whose code this is."""
    stack: list[Any] = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]) if stack else ""


def _result(node: fx.Node) -> str:
    """``[2, 4096, 1024] bf16`` of the first tensor."""
    for tensor in outputs_of(node) if node.op != "output" else ():
        dtype = str(tensor.dtype).removeprefix("torch.").replace("float", "fp").replace("bfp", "bf")
        return f"{list(tensor.shape)} {dtype}"
    return ""


def _placement(node: fx.Node, layout: Layout) -> str:
    """``tp S(2)`` by axis, from the layout's own words."""
    told: list[str] = []
    for axis, placed in layout.axes.items():
        named: Mapping[str, str] = {**placed.inputs, **placed.parameters}
        state = named.get(node.name) or placed.rules.get(node.name, "").partition("->")[2].partition(" ")[0]
        if state and state != "R":
            told.append(f"{axis} {state}")
    return ", ".join(told)


# ---- the drawing's source ---------------------------------------------------------------------------


def operations_dot(rows: Sequence[OperationRow]) -> str:
    """Graphviz text: a node an operation that runs, in its kind's class; edges over what costs nothing."""
    by_name = {row.name: row for row in rows}
    lines = [
        "digraph operations {",
        '  graph [rankdir=TB, nodesep=0.25, ranksep=0.3, pad=0.1, bgcolor="none"]',
    ]
    lines.append('  node [shape=box, fontname="Arial", fontsize=11, margin="0.18,0.06"]')
    lines.append("  edge [arrowsize=0.6]")
    shown = [row for row in rows if _is_drawn(row)]
    for row in shown:
        label = "\\n".join(_quoted(line) for line in _label(row))
        lines.append(f'  "{_quoted(row.name)}" [label="{label}", class="op-{row.kind}"]')
    for row in shown:
        for source in dict.fromkeys(_drawn_sources(row, by_name)):
            lines.append(f'  "{_quoted(source)}" -> "{_quoted(row.name)}"')
    return "\n".join([*lines, "}", ""])


def _is_drawn(row: OperationRow) -> bool:
    """Parameters stand in the node that reads them."""
    return row.kind not in ("free", "parameter")


def _drawn_sources(row: OperationRow, by_name: Mapping[str, OperationRow]) -> Iterator[str]:
    """The drawn operations whose results reach this one through free ones alone."""
    for name in row.inputs:
        source = by_name[name]
        if _is_drawn(source):
            yield name
        elif source.kind == "free":
            yield from _drawn_sources(source, by_name)


def _label(row: OperationRow) -> Iterator[str]:
    module = row.module.rpartition(".")[2]
    yield f"{module}: {row.what}" if module and row.kind in ("product", "memory") else row.what
    if row.result:
        yield ", ".join(text for text in (row.result, row.placement) if text)
    if row.flops:
        yield f"{count_text(row.flops)} FLOP"
    yield from row.sends


def _quoted(text: str) -> str:
    return escape(text, quote=False).replace("\\", "\\\\").replace('"', '\\"')
