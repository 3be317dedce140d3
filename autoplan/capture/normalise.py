"""The traced graph comes in; the same graph without dead weight and with attention masks as flags goes out.

``scaled_dot_product_attention(q, k, v, mask)`` becomes ``is_causal=True`` where the mask is *proven* to be
the lower triangle, and loses the mask where it is proven to be all true: the chain that computes it
is run on real values, which is possible when it reads no parameter and no value of an input.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from autoplan.capture.evaluate import Chain, chain_of
from autoplan.capture.values import is_getitem

aten = torch.ops.aten
SDPA = aten.scaled_dot_product_attention.default
# ops that give their first argument unchanged when the shape stays (an expand may do more at larger batches)
IDENTITY_BY_SHAPE = frozenset({aten.view.default, aten.slice.Tensor})
# a chain that knows other sizes than the length is evaluated whole, up to this many elements (16k x 16k)
WHOLE_NUMEL_LIMIT = 1 << 28
SMALL_LENGTHS = (24, 37)
MASK_ARGUMENT = 3


def normalise(
    graph: fx.Graph,
    constants: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    trainable: frozenset[str],
) -> None:
    """Rewrite ``graph`` in place.

    ``constants`` and ``buffers`` are the real values known, by name; ``trainable`` names the parameters
    that get gradients.
    """
    drop_identities(graph, trainable)
    values = {("constant", k): v for k, v in constants.items()} | {
        ("buffer", k): v for k, v in buffers.items()
    }
    masks: dict[fx.Node, str] = {}
    for node in graph.find_nodes(op="call_function", target=SDPA):
        mask = mask_of(node)
        if mask is None:
            continue
        if mask not in masks:
            masks[mask] = prove_mask(mask, values)
        if masks[mask]:
            _drop_mask(node, causal=masks[mask] == "causal")
    graph.eliminate_dead_code()
    for node in graph.find_nodes(op="placeholder"):
        if not node.users and node.meta["kind"] in ("buffer", "constant"):
            graph.erase_node(node)
    graph.lint()


def drop_identities(graph: fx.Graph, trainable: frozenset[str]) -> None:
    """Remove nodes that give their input back: alias, views of the same shape, x * 1.0, needless detach."""
    differentiable: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" and node.meta["kind"] == "parameter" and node.meta["source"] in trainable:
            differentiable.add(node)
        if node.op != "call_function":
            continue
        if is_getitem(node) and node.all_input_nodes[0].target is aten.broadcast_tensors.default:
            node = _as_expand(graph, node)
        if _is_identity(node, differentiable):
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.erase_node(node)
        elif node.target is not aten.detach.default and any(
            n in differentiable for n in node.all_input_nodes
        ):
            differentiable.add(node)


def _as_expand(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """``broadcast_tensors([a, b])[1]`` --> ``expand(b, shape)``, or a view of b where nothing changes."""
    given: Any = node.all_input_nodes[0].args[0]
    source: fx.Node = given[node.args[1]]
    shape = list(node.meta["val"].shape)
    target = aten.view.default if list(source.meta["val"].shape) == shape else aten.expand.default
    with graph.inserting_before(node):
        new = graph.create_node("call_function", target, (source, shape))
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    return new


def _is_identity(node: fx.Node, differentiable: set[fx.Node]) -> bool:
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return False
    if node.target is aten.alias.default:
        return True
    if node.target is aten.detach.default:
        return source not in differentiable
    before, after = source.meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    same = before.shape == after.shape and before.dtype == after.dtype and before.stride() == after.stride()
    if node.target in IDENTITY_BY_SHAPE:
        return same
    return same and node.target is aten.mul.Tensor and bool(node.args[1] == 1.0)


def mask_of(node: fx.Node) -> fx.Node | None:
    """The mask node of an attention call, if it has one."""
    mask = node.args[MASK_ARGUMENT] if len(node.args) > MASK_ARGUMENT else node.kwargs.get("attn_mask")
    return mask if isinstance(mask, fx.Node) else None


def _drop_mask(node: fx.Node, causal: bool) -> None:
    defaults: tuple[Any, ...] = (None, 0.0, False)
    arguments: list[Any] = [*node.args, *defaults[len(node.args) - MASK_ARGUMENT :]]
    kwargs = {k: v for k, v in node.kwargs.items() if k not in ("attn_mask", "dropout_p", "is_causal")}
    arguments[MASK_ARGUMENT + 1] = node.kwargs.get("dropout_p", arguments[MASK_ARGUMENT + 1])
    arguments[MASK_ARGUMENT] = None
    arguments[MASK_ARGUMENT + 2] = causal
    node.args, node.kwargs = tuple(arguments), kwargs


def prove_mask(mask: fx.Node, values: Mapping[tuple[str, str], torch.Tensor]) -> str:
    """``causal``, ``all`` (everything is attended to) or "" (neither, or it depends on data)."""
    chain = chain_of(mask, values)
    if chain is None:
        return ""
    shape = tuple(mask.meta["val"].shape)
    if len(shape) >= 2 and shape[-2] == shape[-1] > max(SMALL_LENGTHS) and chain.only_size_is(shape[-1]):
        return _kind_at_small_lengths(chain, shape[-1])
    return _kind_of_mask(chain.run(), shape) if chain.largest_numel <= WHOLE_NUMEL_LIMIT else ""


def _kind_at_small_lengths(chain: Chain, length: int) -> str:
    """The kind found at every small length; ``length`` is the only size that the chain knows."""
    values = [chain.run({length: small}) for small in SMALL_LENGTHS]
    kinds = {_kind_of_mask(value, tuple(value.shape)) for value in values}
    return kinds.pop() if len(kinds) == 1 else ""


def _kind_of_mask(value: torch.Tensor, shape: tuple[int, ...]) -> str:
    if value.dim() < 2 or tuple(value.shape) != shape:
        return ""
    for dim in range(value.dim() - 2):
        if value.shape[dim] > 1 and value.stride(dim) == 0:
            value = value.narrow(dim, 0, 1)
    allowed = _allowed(value)
    if allowed is None:
        return ""
    if bool(allowed.all()):
        return "all"
    rows, columns = allowed.shape[-2:]
    triangle = torch.ones(rows, columns, dtype=torch.bool).tril_()
    return "causal" if rows == columns and bool((allowed == triangle).all()) else ""


def _allowed(value: torch.Tensor) -> torch.Tensor | None:
    """Where a mask lets attention through; None for a bias that is neither 0 nor minus infinity."""
    if value.dtype is torch.bool:
        return value
    if not value.is_floating_point():
        return None
    lowest = max(torch.finfo(value.dtype).min / 2, -1e9)
    allowed = value == 0
    return allowed if bool((allowed | (value <= lowest)).all()) else None
