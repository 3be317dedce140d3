"""The pass that keeps pieces of what is gathered: a gather and the products after it become one call.

::

    x = gather_reduce(piece, 1, "tp"); q = linear(x, p_q); k = linear(x, p_k)
    --> q, k = gathered_linears(piece, [p_q, p_k], [None, None], 1, "tp")

The call keeps the piece for the backward, and gathers it again there.
"""

from __future__ import annotations

import operator

from torch import fx

from autoplan.regather import regathering_products
from autoplan_passes import collectives


def regather(graph: fx.GraphModule) -> fx.GraphModule:
    """Rewrite ``graph`` in place; the products keep their names and values."""
    for node in list(graph.graph.nodes):
        products = regathering_products(node)
        if products:
            _join(graph.graph, node, products)
    graph.graph.lint()
    graph.recompile()
    return graph


def _join(graph: fx.Graph, gather: fx.Node, products: tuple[fx.Node, ...]) -> None:
    piece, *where = gather.args
    weights = [product.args[1] for product in products]
    biases = [product.kwargs.get("bias", (*product.args, None)[2]) for product in products]
    with graph.inserting_before(products[0]):
        joined = graph.call_function(collectives.gathered_linears, (piece, weights, biases, *where))
        items = [graph.call_function(operator.getitem, (joined, i)) for i in range(len(products))]
    joined.meta = {**gather.meta, "val": tuple(product.meta["val"] for product in products)}
    joined.meta["collective"] = tuple(_again(one) for one in gather.meta["collective"])
    joined.meta["collective"] = (*joined.meta["collective"], *gather.meta["collective"])
    for product, item in zip(products, items):
        item.meta = dict(product.meta)
        product.replace_all_uses_with(item)
        name = product.name
        graph.erase_node(product)
        item.name = name
    graph.erase_node(gather)


def _again(sent: tuple[str, str, float, float, str]) -> tuple[str, str, float, float, str]:
    """What the backward sends first: the gather, once more."""
    forward, _, sent_bytes, _, axis = sent
    return ("none", forward, 0.0, sent_bytes, axis)
