"""The pass of zero-bubble schedules: products with a weight become products whose weight gradient is put off.

::

    y = linear(x, p_up)  -->  y = linear_later(x, p_up)

Every other gradient of a weight is made with the gradients of the inputs, as before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from autoplan.deferral import deferred_weight
from autoplan_passes import collectives, deferred

LATER: Mapping[str, Callable[..., Any]] = {
    "aten.linear.default": deferred.linear_later,
    "aten._grouped_mm.default": deferred.grouped_mm_later,
}


def defer_weight_gradients(graph: fx.GraphModule) -> fx.GraphModule:
    """Rewrite ``graph`` in place; node names and values stay."""
    for node in graph.graph.nodes:
        if node.target is collectives.gathered_linears:
            node.target = deferred.gathered_linears_later
        elif deferred_weight(node) is not None:
            node.target = LATER[str(node.target)]
            node.args, node.kwargs = (*node.args, *node.kwargs.values()), {}
    graph.graph.lint()
    graph.recompile()
    return graph
