"""The local graph of one region class in, the ``nn.Module`` class that runs it out, as readable source.

One op a line, values named after the parameter they use, the shape of each result as a comment; a value
is deleted where it is used last, so that only what the backward saved stays in memory.
"""

from __future__ import annotations

import keyword
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from autoplan_codegen.expressions import KEEPING, KEEPS_WHOLE, call_name, render
from autoplan_codegen.names import free_name
from autoplan_codegen.prelude import is_prelude_function
from autoplan_passes import deferred

RESERVED = frozenset({"torch", "nn", "F", "aten", "dist", "self", "checkpoint", "DEVICE", "slice", "float"})
INDENT = "    "


@dataclass(frozen=True)
class RegionClass:
    """A region class as code.

    ``inputs``, ``parameters`` and ``buffers`` are the attribute or argument names in the order of the graph's
    placeholders; ``placements`` how each parameter lies on the axes; ``functions`` the collectives it
    calls; ``keeps_whole``: it gathers tensors again in the backward unless its attribute of that name is set.
    """

    name: str
    inputs: tuple[str, ...]
    parameters: tuple[str, ...]
    placements: tuple[str, ...]
    buffers: tuple[str, ...]
    outputs: int
    functions: tuple[str, ...]
    source: str
    keeps_whole: bool = False


def emit_region_class(
    graph: fx.GraphModule, name: str, summary: str, frozen: frozenset[str] = frozenset()
) -> RegionClass:
    """Write one region class; ``summary`` is its docstring, ``frozen`` the parameters not trained."""
    nodes = list(graph.graph.nodes)
    placeholders = {kind: [n for n in nodes if n.meta.get("kind") == kind] for kind in _KINDS}
    buffers = [*placeholders["buffer"], *placeholders["constant"]]
    calls = [node for node in nodes if node.op == "call_function"]
    functions = tuple(dict.fromkeys(call_name(n) for n in calls if is_prelude_function(n.target)))
    attributes = _attributes([*placeholders["parameter"], *buffers])
    names: dict[fx.Node, str] = {node: f"self.{text}" for node, text in attributes.items()}
    _name_values(names, [*placeholders["input"], *calls], {*RESERVED, *functions})
    inputs = tuple(names[node] for node in placeholders["input"])
    keeping = any(node.target in KEEPING for node in calls)
    lines = [
        f"class {name}(nn.Module):",
        f'{INDENT}"""{summary}"""',
        "",
        *([f"{INDENT}{KEEPS_WHOLE} = False  # set where the region is recomputed", ""] if keeping else []),
        *_constructor(placeholders["parameter"], buffers, attributes, frozen),
        f"{INDENT}def forward({', '.join(('self', *inputs))}):",
        *(f"{INDENT * 2}# {names[node]}: {describe(node.meta['val'])}" for node in placeholders["input"]),
        *_body(calls, nodes[-1], names),
    ]
    return RegionClass(
        name=name,
        inputs=inputs,
        parameters=tuple(attributes[node] for node in placeholders["parameter"]),
        placements=tuple(placement(node) for node in placeholders["parameter"]),
        buffers=tuple(attributes[node] for node in buffers),
        outputs=len(output_values(nodes[-1])),
        functions=functions,
        source="\n".join(lines),
        keeps_whole=keeping,
    )


_KINDS = ("input", "parameter", "buffer", "constant")


def placement(node: fx.Node) -> str:
    """How a parameter placeholder lies: ``R``, ``S(0:64+64)``, ``S(0)@ep S(1)``."""
    return str(node.meta.get("state", "R"))


def output_values(output: fx.Node) -> tuple[fx.Node, ...]:
    """The nodes a graph returns, in order."""
    value: Any = output.args[0]
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def attribute_name(placeholder: str) -> str:
    """``p_attention_q_weight -> attention_q_weight``, clear of what ``nn.Module`` itself defines."""
    name = re.sub(r"^(p|b|c)_", "", placeholder)
    name = name if name.isidentifier() else f"t_{name}"
    return f"{name}_" if keyword.iskeyword(name) or hasattr(nn.Module, name) or name == "training" else name


def describe(value: Any) -> str:
    """``[2, 16, 64] float32``: what a person wants to know of a tensor."""
    if isinstance(value, torch.Tensor):
        return f"{list(value.shape)} {dtype_text(value.dtype).removeprefix('torch.')}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(describe(item) for item in value)})"
    return str(value)


def dtype_text(dtype: torch.dtype) -> str:
    return str(dtype)


def _name_values(names: dict[fx.Node, str], nodes: Iterable[fx.Node], taken: set[str]) -> None:
    """Give every value a name of its own: after the weight it is made with, else after its op."""
    fixed = frozenset(taken)
    for node in nodes:
        name = _wanted_name(node, names)
        names[node] = free_name(name, taken, f"{name}_out") if name in fixed else free_name(name, taken)
        taken.add(names[node])


def _wanted_name(node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    weights = [n for n in _made_with(node) if n.meta.get("kind") == "parameter"]
    if node.op == "call_function" and weights and not _is_sent(node):
        owner = re.sub(r"_?(weight|bias)_?$", "", names[weights[0]].removeprefix("self."))
        if owner:
            return owner
    return node.name


def _is_sent(node: fx.Node) -> bool:
    """Whether the node brings its weight to other ranks, and is no product of it."""
    home = getattr(node.target, "__module__", "")
    return is_prelude_function(node.target) and home != deferred.__name__


def _made_with(node: fx.Node) -> Sequence[fx.Node]:
    """What a value is made with; of one of several products, its own weight."""
    source: Any = node.args[0] if node.target is operator.getitem else None
    return (
        [source.args[1][node.args[1]]]
        if source is not None and source.target in KEEPING
        else (node.all_input_nodes)
    )


def _attributes(nodes: Iterable[fx.Node]) -> dict[fx.Node, str]:
    attributes: dict[fx.Node, str] = {}
    for node in nodes:
        name = attribute_name(node.name)
        attributes[node] = name if name not in attributes.values() else node.name
    return attributes


def _constructor(
    parameters: list[fx.Node], buffers: list[fx.Node], names: Mapping[fx.Node, str], frozen: frozenset[str]
) -> Iterable[str]:
    if not parameters and not buffers:
        return
    yield f"{INDENT}def __init__(self):"
    yield f"{INDENT * 2}super().__init__()"
    for node in parameters:
        fixed = ", requires_grad=False" if str(node.meta["source"]) in frozen else ""
        state = placement(node)
        whole = "" if state == "R" else f"  # {state} of {list(node.meta['global_shape'])}"
        yield f"{INDENT * 2}self.{names[node]} = nn.Parameter({_empty(node.meta['val'])}{fixed}){whole}"
    for node in buffers:
        empty = _empty(node.meta["val"])
        yield f'{INDENT * 2}self.register_buffer("{names[node]}", {empty}, persistent=False)'
    yield ""


def _empty(value: torch.Tensor) -> str:
    sizes = ", ".join(str(size) for size in value.shape)
    return f"torch.empty({sizes or '()'}, dtype={dtype_text(value.dtype)})"


def _body(calls: list[fx.Node], output: fx.Node, names: Mapping[fx.Node, str]) -> Iterable[str]:
    returned = output_values(output)
    last_use = _last_uses(calls, set(returned))
    for node in calls:
        done = [names[value] for value in last_use.get(node, ())]
        done += [names[node]] if not node.users and node not in returned else []
        freed = f"; del {', '.join(done)}" if done else ""
        yield f"{INDENT * 2}{names[node]} = {render(node, names)}{freed}  # {describe(node.meta['val'])}"
    yield f"{INDENT * 2}return {', '.join(names[value] for value in returned)}"


def _last_uses(calls: list[fx.Node], kept: set[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """For each op the values it is the last to use (values returned and module attributes are kept)."""
    last: dict[fx.Node, fx.Node] = {}
    for node in calls:
        for value in node.all_input_nodes:
            if value not in kept and value.meta.get("kind") not in ("parameter", "buffer", "constant"):
                last[value] = node
    by_user: dict[fx.Node, list[fx.Node]] = {}
    for value, user in last.items():
        by_user.setdefault(user, []).append(value)
    return by_user
