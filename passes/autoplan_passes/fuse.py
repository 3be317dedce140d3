"""The pass that replaces chains of ops by fused ones: a region graph and kernel names in, :class:`Fused` out.

It runs before anything is cut or priced, so fused ops have rules, saved tensors and prices like any other.
The same names always make the same graph again::

    add(x, r) -> pow -> mean -> add(eps) -> rsqrt -> mul -> mul(w)
      --> fused_add_rms_norm(x, r, w, eps) -> getitem 0, getitem 1
"""

from __future__ import annotations

import copy
import operator
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import fx

from autoplan_passes.calls import first_tensor
from autoplan_passes.fusions import GROUPED_PRODUCT, KERNELS, TABLE, Fusion
from autoplan_passes.local_ops import find_fake_mode, propagate
from autoplan_passes.match import Found, is_cast, matches
from autoplan_passes.shifted_loss import keep_all_positions

LOSS = "linear_cross_entropy"


@dataclass(frozen=True)
class Missed:
    """What fits a pattern and was left as it is: the kernel, the node that it ends in, and why."""

    kernel: str
    node: str
    reason: str

    def __str__(self) -> str:
        return f"{self.kernel} at {self.node}: {self.reason}"


@dataclass(frozen=True)
class Fused:
    """The graph with fused ops; ``used`` are their kernels, one entry a rewrite, of those ``given``."""

    graph: fx.GraphModule
    used: tuple[str, ...] = ()
    given: tuple[str, ...] = ()

    @cached_property
    def missed(self) -> tuple[Missed, ...]:
        """What fits a pattern and was left as it was."""
        return tuple(_left(self.graph.graph, self.given))

    @property
    def kernels(self) -> tuple[str, ...]:
        """The kernels used, each once, in the order of the table."""
        return tuple(name for name in KERNELS if name in self.used)


def fuse(graph: fx.GraphModule, kernels: Collection[str]) -> Fused:
    """A copy of a region graph with as much fused as ``kernels`` (names of the table) can do."""
    made = _copied(keep_all_positions(graph) if LOSS in kernels else graph)
    used = _rewritten(made, kernels)
    if LOSS in kernels and LOSS not in used:  # the loss keeps the form that it was written in
        made = _copied(graph)
        used = _rewritten(made, kernels)
    made.graph.lint()
    made.recompile()
    return Fused(made, used, tuple(kernels))


def _copied(graph: fx.GraphModule) -> fx.GraphModule:
    return fx.GraphModule(graph, copy.deepcopy(graph.graph))


def _rewritten(made: fx.GraphModule, kernels: Collection[str]) -> tuple[str, ...]:
    used: list[str] = []
    with find_fake_mode(made.graph):
        for fusion in TABLE:
            if fusion.kernel in kernels:
                used += [fusion.kernel] * _apply(made.graph, fusion)
    return tuple(used)


def _apply(graph: fx.Graph, fusion: Fusion) -> int:
    """Replace every fit, from the last node to the first; how many there were."""
    count = 0
    for root in reversed(list(graph.nodes)):
        if root.op != "call_function" or _is_erased(root):
            continue
        for found in matches(fusion.pattern, root):
            if not _objection(fusion, found, root):
                _replace(graph, fusion, found, root)
                count += 1
                break
    return count


def _is_erased(node: fx.Node) -> bool:
    return not node.users  # region graphs have no dead nodes but those replaced


def _objection(fusion: Fusion, found: Found, root: fx.Node) -> str:
    """Why a fit may not be replaced; nothing where it may."""
    for condition in fusion.conditions:
        reason = condition(found, root)
        if reason:
            return reason
    kept = {root, *found.outs.values()}
    inside = set(found.inside)
    for node in found.inside:
        outside = [user for user in node.users if user not in inside]
        if node not in kept and outside and not is_cast(node):
            return f"{node.name} is used by {outside[0].name} too"
    return "" if _place(fusion, found, root) is not None else "its results are needed before its inputs"


def _place(fusion: Fusion, found: Found, root: fx.Node) -> fx.Node | None:
    """The node after which the fused op may stand: all its inputs are there, none of its users yet."""
    order = {node: index for index, node in enumerate(root.graph.nodes)}
    inputs = [value for value in fusion.arguments(found, root) if isinstance(value, fx.Node)]
    last = max(inputs, key=order.__getitem__)
    inside = {*found.inside}
    users = [user for node in (root, *found.outs.values()) for user in node.users if user not in inside]
    return last if all(order[user] > order[last] for user in users) else None


def _replace(graph: fx.Graph, fusion: Fusion, found: Found, root: fx.Node) -> None:
    after = root if not fusion.outs else found.outs[fusion.outs[0]]
    rows = {name: _as_rows(graph, found.tensors[name], after) for name in fusion.as_rows}
    given = replace(found, tensors={**found.tensors, **rows})
    made = [node for name, node in rows.items() if node is not found.tensors[name]]
    with graph.inserting_after(made[0] if made else after):
        node = graph.call_function(fusion.function, fusion.arguments(given, root))
    node.meta = {key: value for key, value in root.meta.items() if key != "val"}
    propagate(node)
    results = [root, *(found.outs[name] for name in fusion.outs)]
    news = [node]
    if fusion.outs:
        news, point = [], node
        for index in range(len(results)):
            with graph.inserting_after(point):
                point = graph.call_function(operator.getitem, (node, index))
            news.append(point)
    inside = {*found.inside}
    for old, new in zip(results, news):
        new.meta = {**{k: v for k, v in old.meta.items() if k != "val"}, **new.meta}
        propagate(new)
        cast = _same_precision(graph, new, old)
        for user in [user for user in old.users if user not in inside]:
            user.replace_input_with(old, cast)
    _erase(graph, found, root)


def _as_rows(graph: fx.Graph, tensor: fx.Node, after: fx.Node) -> fx.Node:
    """The tensor as a matrix of its last dim."""
    size = list(first_tensor(tensor).shape)
    if len(size) == 2:
        return tensor
    with graph.inserting_after(after):
        rows = graph.call_function(torch.ops.aten.reshape.default, (tensor, [-1, size[-1]]))
    rows.meta = {key: value for key, value in tensor.meta.items() if key not in ("val", "kind")}
    return propagate(rows)


def _same_precision(graph: fx.Graph, new: fx.Node, old: fx.Node) -> fx.Node:
    """The new result in the precision of the old one."""
    dtype = first_tensor(old).dtype
    if first_tensor(new).dtype == dtype:
        return new
    with graph.inserting_after(new):
        cast = graph.call_function(torch.ops.aten._to_copy.default, (new,), {"dtype": dtype})
    cast.meta = {key: value for key, value in new.meta.items() if key != "val"}
    return propagate(cast)


def _erase(graph: fx.Graph, found: Found, root: fx.Node) -> None:
    """Remove what the fused op does now, as far as nothing else uses it."""
    pending = [root, *found.inside]
    while pending:
        dead = [node for node in pending if not node.users and not node._erased]  # pyright: ignore[reportPrivateUsage] - fx marks them so
        if not dead:
            return
        sources = [source for node in dead for source in node.all_input_nodes]
        for node in dict.fromkeys(dead):
            graph.erase_node(node)
        pending = [n for n in (*pending, *sources) if n.op == "call_function"]


def _left(graph: fx.Graph, kernels: Collection[str]) -> Iterator[Missed]:
    """What still fits a pattern, and the reason against it."""
    seen: set[tuple[str, fx.Node]] = set()
    for fusion in TABLE:
        for root in reversed(list(graph.nodes)):
            if root.op != "call_function" or fusion.kernel == GROUPED_PRODUCT:
                continue
            found = next(matches(fusion.pattern, root), None)
            core = root.all_input_nodes[0] if is_cast(root) else root
            if found is None or (fusion.kernel, core) in seen:
                continue
            seen.add((fusion.kernel, core))
            reason = _objection(fusion, found, root)
            if fusion.kernel not in kernels:
                yield Missed(fusion.kernel, core.name, reason or "the chip has no kernel for it")
            elif reason:
                yield Missed(fusion.kernel, core.name, reason)


def described(missed: Sequence[Missed]) -> tuple[str, ...]:
    """One text for equal reasons (node numbers aside), with how often they hold."""
    counts: dict[str, int] = {}
    for one in missed:
        text = f"{one.kernel}: {re.sub(r'_[0-9]+', '', one.reason)}"
        counts[text] = counts.get(text, 0) + 1
    return tuple(text if count == 1 else f"{text} ({count} times)" for text, count in counts.items())


def fused_region(graph: fx.GraphModule, kernels: Collection[str]) -> fx.GraphModule:
    """The graph that :func:`fuse` makes; the graph itself where nothing is to be fused."""
    return fuse(graph, kernels).graph if kernels else graph


__all__ = ["KERNELS", "Fused", "Missed", "described", "fuse", "fused_region"]
