"""Which gathered tensors are gathered again in the backward: the one rule of the rewrite and the prices.

Comes in: a node of a local region graph. Goes out: the products that read it, where they are all that does:
such a tensor is kept as this rank's piece, a share of its size, and brought together again when the gradients
of the weights need it (Megatron-LM's sequence parallelism, arXiv 2205.05198, section 4.2.2).
"""

from __future__ import annotations

from torch import fx

GATHER = "gather_reduce"


def regathering_products(node: fx.Node) -> tuple[fx.Node, ...]:
    """The ``linear`` calls that multiply a gathered tensor; () where it is kept whole."""
    if node.op != "call_function" or getattr(node.target, "__name__", "") != GATHER:
        return ()
    users = tuple(node.users)
    return users if users and all(_multiplies(user, node) for user in users) else ()


def _multiplies(user: fx.Node, node: fx.Node) -> bool:
    packet = getattr(user.target, "overloadpacket", None)
    others = [*user.args[1:], *user.kwargs.values()]
    return getattr(packet, "__name__", "") == "linear" and user.args[0] is node and node not in others
