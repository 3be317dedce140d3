"""Prices of single graph nodes and collectives, for choosing a layout inside a region.

Comes in: nodes of an unsharded region graph and the share of the work a rank would do. Goes out: seconds
of forward plus backward.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from autoplan_cost_models.collectives import Links, Span
from autoplan_cost_models.compute import Speeds
from autoplan_cost_models.kernels import Operation
from autoplan_cost_models.node_facts import differentiable_nodes
from autoplan_cost_models.operations import node_operation


@dataclass
class NodePrices:
    """Remembers each graph's operations, so that a node asked for many fractions is read once."""

    speeds: Speeds
    links: Links
    span: Span
    _needing: dict[fx.Graph, frozenset[fx.Node]] = field(default_factory=dict[fx.Graph, frozenset[fx.Node]])
    _seconds: dict[fx.Node, tuple[float, float]] = field(default_factory=dict[fx.Node, tuple[float, float]])

    def operation_s(self, node: fx.Node, fraction: float) -> float:
        """Forward plus backward seconds of ``node`` when a rank does ``fraction`` of it (launches whole)."""
        if node not in self._seconds:
            operation = self._operation(node)
            fixed = self.speeds.operation_seconds(operation, 0.0)
            self._seconds[node] = (self.speeds.operation_seconds(operation), fixed)
        full, launches = self._seconds[node]
        return launches + fraction * (full - launches)

    def collective_s(self, kind: str, message_bytes: float) -> float:
        return self.links.seconds(kind, message_bytes, self.span)

    def _operation(self, node: fx.Node) -> Operation:
        if node.op != "call_function":
            return Operation(node.name, node.op, "free")
        if node.graph not in self._needing:
            self._needing[node.graph] = differentiable_nodes(node.graph)
        return node_operation(node, self._needing[node.graph])
