"""A fake model and example inputs come in; one flat functional graph that ends in the loss goes out.

Steps, in order: export, make functional, erase checks, rename placeholders to the model's own names,
keep only what the loss needs.
"""

from __future__ import annotations

import contextlib
import gc
import io
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    TensorArgument,
)

from autoplan.capture.build import FakeModel, named_tensors
from autoplan.capture.folding import (
    CannotUnfold,
    Group,
    TensorsNeeded,
    equal_blocks,
    folded,
    unfold,
    without_copies,
)
from autoplan.capture.functional import Functional, functional
from autoplan.capture.internals import constants_up_to
from autoplan.capture.source import Inputs
from autoplan.capture.tracing_mode import watched

PREFIX = "model"
# elements of the largest integer input whose values may become constants of the trace
FIXED_NUMEL_LIMIT = 64
# kinds of placeholders, in the order of a graph's
KINDS = ("parameter", "buffer", "constant", "input")
Run = Callable[[nn.Module, Inputs], torch.Tensor]


class Program(nn.Module):
    """Forward and loss as one module; its inputs are the tensors among the example inputs, in order.

    Inputs named in ``fixed`` are no inputs: their values are constants of the trace.
    """

    def __init__(
        self, model: nn.Module, run: Run, inputs: Inputs, fixed: frozenset[str], groups: Sequence[Group]
    ) -> None:
        super().__init__()
        self.model = model
        self._run = run
        self._groups = groups
        self.asked: list[str] = []
        values = dict(named_inputs(inputs))
        self._leaves = [value.tolist() if key in fixed else value for key, value in values.items()]
        self._fixed = [value.dtype if key in fixed else None for key, value in values.items()]
        self._keys = tuple(values) if isinstance(inputs, Mapping) else ()
        self.checkpoints: set[str] = set()

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensor inputs, each an object of its own (the exporter merges inputs that are one object)."""
        return tuple(_own_copy(leaf) for leaf in self._leaves if isinstance(leaf, torch.Tensor))

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        queue = list(tensors)
        leaves: list[Any] = []
        for leaf, dtype in zip(self._leaves, self._fixed, strict=True):
            value = queue.pop(0) if isinstance(leaf, torch.Tensor) else leaf
            leaves.append(value if dtype is None else torch.tensor(value, dtype=dtype))
        with contextlib.ExitStack() as stack:
            mode = stack.enter_context(watched())
            stack.enter_context(mode)
            stack.enter_context(folded(self._groups, mode.state))
            self.asked.clear()
            try:
                loss = self._run(self.model, dict(zip(self._keys, leaves)) if self._keys else tuple(leaves))
            except TensorsNeeded:
                self.asked.append("a block")
                raise
            if self.asked:
                raise TensorsNeeded
        self.checkpoints.update(mode.checkpoints)
        return loss


def _own_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides: where an input is not contiguous, a flattening of it must copy."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return copy.copy_(tensor.detach())


@contextlib.contextmanager
def without_collection() -> Generator[None]:
    """No garbage collection in here: tracing makes millions of objects that live on (a fifth of its time)."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass
class Traced:
    """The graph, the real values of its constants, the names of its inputs and what was lost on the way."""

    graph: fx.Graph
    constants: dict[str, torch.Tensor]
    input_names: tuple[str, ...]
    canonical: Mapping[str, str]
    checkpoints: tuple[str, ...] = ()
    updated: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()


def named_inputs(inputs: Inputs) -> list[tuple[str, Any]]:
    """Each input with the keyword or position by which it is fed."""
    items = inputs.items() if isinstance(inputs, Mapping) else enumerate(inputs)
    return [(str(key), value) for key, value in items]


# how much of a deep model is traced: two of each kind of equal blocks, first with the tensors of the others
# taken away, then with all of them where the model asks for those; or every block
FOLDS = ("bare", "full", "none")


def trace(
    fake: FakeModel, run: Run, inputs: Inputs, fixed: frozenset[str] = frozenset(), fold: str = FOLDS[0]
) -> Traced:
    """Export ``run(model, inputs)``; the errors of the exporter come out as they are.

    The values of the inputs named in ``fixed`` are constants of the trace. ``fold`` is one of ``FOLDS``:
    equal blocks are traced once where that is provably the same, else the next one is taken.
    """
    groups = [] if fold == "none" else equal_blocks(fake.model)
    program = Program(fake.model, run, inputs, fixed, groups)
    try:
        program_graph = _exported(fake, program, groups if fold == "bare" else [], len(fixed))
    except Exception:
        if fold == "bare" and program.asked:
            return trace(fake, run, inputs, fixed, "full")
        raise
    canonical = canonical_names(fake.model)
    given = _Given(program_graph, {n: t for n, t, _ in named_tensors(fake.model)}, canonical, groups)
    try:
        unfold(program_graph.graph, given.nodes_of)
    except CannotUnfold:
        return trace(fake, run, inputs, fixed, "none")
    names = tuple(k for k, v in named_inputs(inputs) if isinstance(v, torch.Tensor) and k not in fixed)
    traced = Traced(fx.Graph(), {}, names, canonical, tuple(sorted(program.checkpoints)))
    traced.updated = tuple(name.removeprefix(PREFIX + ".") for name in program_graph.updated)
    _copy_needed(program_graph, traced, given.specs)
    return traced


def _exported(fake: FakeModel, program: Program, bare: Sequence[Group], fixed: int) -> Functional:
    """The functional graph of the program, copies among the blocks of ``bare`` without their tensors."""
    # the exporter prints the graph when it fails
    quiet = contextlib.redirect_stderr(io.StringIO())
    with fake.mode, quiet, without_collection(), constants_up_to(FIXED_NUMEL_LIMIT if fixed else 1):
        with without_copies(bare) as program.asked:
            exported = torch.export.export(program, program.tensors(), strict=False)
        return functional(exported)


class _Given:
    """Placeholders of an exported program, and those added for tensors that were away."""

    def __init__(
        self,
        program: Functional,
        tensors: Mapping[str, torch.Tensor],
        canonical: Mapping[str, str],
        groups: Sequence[Group],
    ) -> None:
        self.specs = {spec.arg.name: spec for spec in program.signature.input_specs}
        self._graph = program.graph
        self._tensors = tensors
        self._names = {id(tensors[name]): name for name in canonical.values()}
        self._away = {block: away for group in groups for block, away in group.absent.items()}
        self._first = next(iter(program.graph.nodes))
        self._nodes: dict[str, fx.Node] = {}

    def nodes_of(self, block: int) -> list[fx.Node]:
        """The placeholders of the block's tensors, made where they are not there yet."""
        return [self._node(self._names[id(tensor)]) for tensor in self._away[block]]

    def _node(self, name: str) -> fx.Node:
        if name not in self._nodes:
            with self._graph.inserting_before(self._first):
                node = self._nodes[name] = self._graph.placeholder("away")
            tensor = self._tensors[name]
            kind = InputKind.PARAMETER if isinstance(tensor, nn.Parameter) else InputKind.BUFFER
            node.meta["val"] = tensor.detach()
            self.specs[node.name] = InputSpec(kind, TensorArgument(node.name), f"{PREFIX}.{name}", True)
        return self._nodes[name]


def canonical_names(model: nn.Module) -> dict[str, str]:
    """Every qualified tensor name -> the first name of the same tensor (tied parameters)."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor, _ in named_tensors(model)}


def _copy_needed(program: Functional, traced: Traced, specs: Mapping[str, InputSpec]) -> None:
    """Copy what the loss depends on into ``traced.graph``, placeholders first and named by the model."""
    source, signature = program.graph, program.signature
    loss = _loss_node(source, signature)
    needed = ancestors([loss])
    users = [n for n in source.nodes if n.op == "placeholder" and specs[n.name].kind is InputKind.USER_INPUT]
    feeds = dict(zip(users, traced.input_names, strict=True))
    env: dict[fx.Node, fx.Node] = {}
    made: dict[tuple[str, str], fx.Node] = {}
    placeholders = [n for n in source.find_nodes(op="placeholder") if n in needed or n in feeds]
    origins = {node: _origin(node, specs[node.name], feeds, traced) for node in placeholders}
    order = {name: index for index, name in enumerate(traced.canonical)}
    for node in sorted(placeholders, key=lambda n: (KINDS.index(origins[n][0]), order.get(origins[n][1], 0))):
        kind, origin = origins[node]
        if (kind, origin) not in made:
            made[kind, origin] = _placeholder(traced.graph, node, kind, origin)
            if kind == "constant":
                traced.constants[origin] = program.constants[str(specs[node.name].target)]
        env[node] = made[kind, origin]
    for node in source.nodes:
        if node.op == "call_function" and node in needed:
            env[node] = traced.graph.node_copy(node, env.__getitem__)
            env[node].meta = _clean_meta(node)
    traced.graph.output(env[loss])


def _loss_node(graph: fx.Graph, signature: ExportGraphSignature) -> fx.Node:
    index = next(i for i, spec in enumerate(signature.output_specs) if spec.kind is OutputKind.USER_OUTPUT)
    outputs: Any = graph.output_node().args[0]
    return outputs[index]


def ancestors(roots: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes that ``roots`` depend on, themselves included."""
    found: set[fx.Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


def _origin(node: fx.Node, spec: Any, feeds: Mapping[fx.Node, str], traced: Traced) -> tuple[str, str]:
    if node in feeds:
        return "input", feeds[node]
    target = str(spec.target).removeprefix(PREFIX + ".")
    if spec.kind is InputKind.PARAMETER:
        return "parameter", traced.canonical.get(target, target)
    if spec.kind is InputKind.BUFFER:
        return "buffer", traced.canonical.get(target, target)
    return "constant", target


def _placeholder(graph: fx.Graph, node: fx.Node, kind: str, origin: str) -> fx.Node:
    letter = {"parameter": "p_", "buffer": "b_", "constant": "c_", "input": ""}[kind]
    new = graph.placeholder(
        letter + re.sub(r"\W", "_", origin if kind != "input" or origin[0].isalpha() else f"x_{origin}")
    )
    new.meta = {"val": node.meta["val"], "kind": kind, "source": origin}
    return new


def _clean_meta(node: fx.Node) -> dict[str, Any]:
    """The metadata that later passes read, module paths without the wrapper's name."""
    meta: dict[str, Any] = {"val": node.meta.get("val")}
    if node.meta.get("stack_trace"):
        meta["stack_trace"] = node.meta["stack_trace"]
    stack: dict[str, tuple[str, str]] = {}
    for key, (path, cls) in (node.meta.get("nn_module_stack") or {}).items():
        if path == PREFIX or path.startswith(PREFIX + "."):
            call = key.rpartition("@")[2] if "@" in key else ""
            local = path.removeprefix(PREFIX).removeprefix(".")
            name = cls if isinstance(cls, str) else f"{cls.__module__}.{cls.__qualname__}"
            stack[local + (f"@{call}" if call else "")] = (local, name)
    meta["nn_module_stack"] = stack
    return meta
