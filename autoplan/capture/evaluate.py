"""A node that depends on no data comes in; its real value, also at another length, goes out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoplan.capture.batch import flat_arguments, is_integer, output_tensors
from autoplan.capture.internals import FakeTensor, OpOverload

aten = torch.ops.aten
# ops that read the shape and dtype of their first argument, never its values
SHAPE_READERS = frozenset(
    {
        aten.empty_like.default,
        aten.full_like.default,
        aten.new_empty.default,
        aten.new_full.default,
        aten.new_ones.default,
        aten.new_zeros.default,
        aten.ones_like.default,
        aten.zeros_like.default,
    }
)
# integers up to this may be dims, counts or steps; larger ones must be the length to be scaled
SMALL_INTEGER = 8
UNBOUNDED = 1 << 62


@dataclass(frozen=True)
class Chain:
    """The nodes that compute ``root``, in order, with the real values they start from."""

    root: fx.Node
    nodes: tuple[fx.Node, ...]
    values: Mapping[fx.Node, torch.Tensor]

    @property
    def largest_numel(self) -> int:
        """Elements of the largest tensor on the way."""
        return max((t.numel() for n in self.nodes for t in output_tensors(n)), default=0)

    def only_size_is(self, length: int) -> bool:
        """Whether every integer that could be a size is ``length``: the chain may be run at another one."""
        integers = [i for n in self.nodes for i in flat_arguments(n) if is_integer(i)]
        sizes = {d for n in self.nodes for t in output_tensors(n) for d in t.shape}
        large = {abs(i) for i in [*integers, *sizes] if SMALL_INTEGER < abs(i) < UNBOUNDED}
        return large <= {length} and not self.values

    def run(self, sizes: Mapping[int, int] | None = None) -> Any:
        """The value of ``root``; integers found in ``sizes`` are replaced. Frees what is no longer needed."""
        sizes = sizes or {}
        last = {source: node for node in self.nodes for source in node.all_input_nodes}
        env: dict[fx.Node, Any] = dict(self.values)
        for node in self.nodes:
            env[node] = self._run_node(node, env, sizes)
            for source in node.all_input_nodes:
                if last[source] is node:
                    env.pop(source, None)
        return env[self.root]

    def _run_node(self, node: fx.Node, env: Mapping[fx.Node, Any], sizes: Mapping[int, int]) -> Any:
        def real(leaf: Any) -> Any:
            if isinstance(leaf, fx.Node):
                return env[leaf] if leaf in env else _stand_in(leaf, sizes)
            return sizes.get(leaf, leaf) if is_integer(leaf) else leaf

        target: Any = node.target
        leaves, structure = pytree.tree_flatten((tuple(node.args), dict(node.kwargs)))
        args, kwargs = pytree.tree_unflatten([real(leaf) for leaf in leaves], structure)
        with torch.no_grad():
            return target(*args, **kwargs)


def _stand_in(node: fx.Node, sizes: Mapping[int, int]) -> torch.Tensor:
    """A tensor of the right shape and dtype whose values nobody reads."""
    val = node.meta["val"]
    shape = [sizes.get(int(d), int(d)) for d in val.shape]
    return torch.zeros((), dtype=val.dtype).expand(shape)


def chain_of(root: fx.Node, values: Mapping[tuple[str, str], torch.Tensor]) -> Chain | None:
    """The chain behind ``root``, or None when it reads a parameter, an input's values or a random draw."""
    needed: set[fx.Node] = set()
    starts: dict[fx.Node, torch.Tensor] = {}
    stack = [root]
    while stack:
        node = stack.pop()
        if node in needed or node in starts:
            continue
        if node.op == "placeholder":
            value = values.get((node.meta["kind"], node.meta["source"]))
            if value is None or isinstance(value, FakeTensor) or value.is_meta:
                return None
            starts[node] = value
            continue
        if _is_random(node):
            return None
        needed.add(node)
        if node.target not in SHAPE_READERS:
            stack.extend(node.all_input_nodes)
    order = tuple(node for node in root.graph.nodes if node in needed)
    return Chain(root, order, starts)


def _is_random(node: fx.Node) -> bool:
    target: Any = node.target
    return isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags
