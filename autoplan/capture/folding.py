"""Equal blocks of a deep model come in; while folded, all but two of each kind are traced as one node each.

A copy node is unfolded afterwards into the nodes of the block that was traced. That is exact, or not done:
the blocks must be equal in classes, parameters and settings (a setting that differs, like a layer number,
must not be read by forward), be called alike, write to nothing that they were given, and read nothing but
their arguments, parameters and buffers; and two of them are traced and must come out the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from autoplan.capture.values import is_getitem

NAMESPACE = "autoplan_fold"
PLAIN = (int, float, str, bool, type(None), torch.dtype)
# blocks of one kind that are traced; the rest are copies of the first
TRACED = 2
# where the arguments of a mark have the number of its kind
KIND = 2


# shape, strides, dtype, whether it wants a gradient
Output = tuple[torch.Size, tuple[int, ...], torch.dtype, bool]


@dataclass
class Kind:
    """Blocks called alike: metadata of their outputs, and how many have been traced."""

    number: int
    traced: int = 0
    structure: Any = None
    outputs: list[Output] = field(default_factory=list)
    unfit: bool = False


@dataclass
class Group:
    """Equal blocks; ``varying`` are the settings that differ, by path inside the block."""

    members: list[nn.Module]
    varying: dict[str, set[str]]
    read: set[str] = field(default_factory=set[str])
    kinds: dict[Any, Kind] = field(default_factory=dict[Any, Kind])
    # the tensors of blocks that were taken away while the model is exported, by the block's id
    absent: dict[int, list[torch.Tensor]] = field(default_factory=dict[int, list[torch.Tensor]])


class TensorsNeeded(Exception):
    """The model reads tensors of a block that were taken away: it must be traced with all of them."""


class Folding:
    """What was folded in one trace; ``state`` is asked for what a block's result may depend on."""

    def __init__(self, state: Callable[[], Any]) -> None:
        self.state = state
        self.kinds: list[Kind] = []

    def call(self, group: Group, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Trace the block, or put a copy node in its place."""
        leaves, structure = pytree.tree_flatten((args, kwargs))
        key = _call_key(leaves, structure, self.state())
        kind = None if key is None or group.read else self._kind(group, key)
        inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if kind is not None and not kind.unfit and kind.traced >= TRACED:
            _OUTPUTS[kind.number] = kind.outputs
            absent = id(module) in group.absent
            held = [] if absent else _tensors(module)
            flat = _copy(inputs, held, kind.number, id(module) if absent else 0)
            return pytree.tree_unflatten(list(flat), kind.structure)
        if id(module) in group.absent:
            raise TensorsNeeded
        if kind is None or kind.unfit:
            return type(module).forward(module, *args, **kwargs)
        return self._trace(group, kind, module, (args, kwargs), inputs, _tensors(module))

    def _kind(self, group: Group, key: Any) -> Kind:
        if key not in group.kinds:
            group.kinds[key] = Kind(len(self.kinds))
            self.kinds.append(group.kinds[key])
        return group.kinds[key]

    def _trace(
        self, group: Group, kind: Kind, module: nn.Module, call: Any, inputs: list[Any], held: list[Any]
    ) -> Any:
        """Run the block as it is and mark where it begins and ends."""
        args, kwargs = call
        versions = [t._version for t in (*inputs, *held)]
        with _reads_noted(module, group):
            result = type(module).forward(module, *args, **kwargs)
        flat, structure = pytree.tree_flatten(result)
        tensors = all(isinstance(t, torch.Tensor) for t in flat)
        written = versions != [t._version for t in (*inputs, *held)]
        if not flat or not tensors or written or group.read:
            kind.unfit = True
            return result
        kind.traced += 1
        kind.structure = structure
        kind.outputs = [(t.shape, t.stride(), t.dtype, t.requires_grad) for t in flat]
        _OUTPUTS[kind.number] = kind.outputs
        return pytree.tree_unflatten(list(_template(inputs, held, kind.number, flat)), structure)


_OUTPUTS: dict[int, list[Output]] = {}


def _tensors(block: nn.Module) -> list[torch.Tensor]:
    return [*block.parameters(), *block.buffers()]


class _Absent(dict[str, Any]):
    """In the place of a module's tensors while they are away: empty; reading it is noted."""

    def __init__(self, taken: Mapping[str, Any], asked: list[str]) -> None:
        super().__init__()
        self._taken = taken
        self._asked = asked

    def __contains__(self, name: object) -> bool:
        if name in self._taken:
            self._asked.append(str(name))
        return False

    def items(self) -> Any:
        self._asked.extend(self._taken)
        return super().items()

    def values(self) -> Any:
        self._asked.extend(self._taken)
        return super().values()


@contextlib.contextmanager
def without_copies(groups: Sequence[Group]) -> Generator[list[str]]:
    """While this lasts, blocks that are likely copies have no tensors: the exporter's time is in tensors.

    Gives the list to which names are added that somebody asks of them; clear it before the forward.
    """
    asked: list[str] = []
    taken: list[tuple[nn.Module, Any, Any]] = []
    try:
        for group in groups:
            for block in group.members[TRACED:]:
                group.absent[id(block)] = _tensors(block)
            for module in (m for block in group.members[TRACED:] for m in block.modules()):
                own = vars(module)
                taken.append((module, own["_parameters"], own["_buffers"]))
                own["_parameters"] = _Absent(own["_parameters"], asked)
                own["_buffers"] = _Absent(own["_buffers"], asked)
        yield asked
    finally:
        for module, parameters, buffers in reversed(taken):
            vars(module).update(_parameters=parameters, _buffers=buffers)


def _fresh_of_last(*args: Any) -> list[torch.Tensor]:
    outputs = _OUTPUTS[args[KIND]]
    return [torch.empty_strided(shape, stride, dtype=dtype) for shape, stride, dtype, _ in outputs]


def _mark_gradients(ctx: Any, inputs: Any, output: Any) -> None:
    """An output wants a gradient where the traced block's did (attention picks its kernel by that)."""
    wanted = [wants for *_, wants in _OUTPUTS[inputs[KIND]]]
    ctx.mark_non_differentiable(*(t for t, wants in zip(output, wanted) if not wants))


def _never(*_: Any) -> Any:
    raise AssertionError("a folded block is unfolded before anything runs")


def _define(name: str, schema: str) -> Callable[..., Any]:
    op = torch.library.custom_op(f"{NAMESPACE}::{name}", _never, mutates_args=(), schema=schema)
    op.register_fake(_fresh_of_last)
    op.register_autograd(_never, setup_context=_mark_gradients)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


_template: Any = _define(
    "template", "(Tensor[] inputs, Tensor[] held, int kind, Tensor[] outputs) -> Tensor[]"
)
# ``block`` is the id of a block whose tensors are away (0: they are in ``held``)
_copy: Any = _define("copy", "(Tensor[] inputs, Tensor[] held, int kind, int block) -> Tensor[]")


def _call_key(leaves: Sequence[Any], structure: Any, state: Any) -> Any:
    """What a block's graph may depend on besides the block; None for arguments that cannot be compared."""
    words: list[Any] = [str(structure), state]
    seen: dict[int, int] = {}
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            alias = seen.setdefault(id(leaf), len(seen))
            words.append((leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad, alias))
        elif isinstance(leaf, PLAIN):
            words.append((type(leaf), leaf))
        else:
            return None
    return tuple(words)


@contextlib.contextmanager
def folded(groups: Sequence[Group], state: Callable[[], Any]) -> Generator[Folding]:
    """While this lasts, the blocks of each group are folded."""
    folding = Folding(state)
    try:
        for group in groups:
            for module in group.members:
                module.__dict__["forward"] = _folded_forward(folding, group, module)
        yield folding
    finally:
        for group in groups:
            for module in group.members:
                module.__dict__.pop("forward", None)


def _folded_forward(folding: Folding, group: Group, module: nn.Module) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return folding.call(group, module, args, kwargs)

    return forward


def equal_blocks(model: nn.Module) -> list[Group]:
    """Children of ModuleLists with modules of their own that are equal, three of a kind, outermost first."""
    groups: list[Group] = []
    opaque = [m for m in model.modules() if "forward" in vars(m)]
    inside = {id(part) for module in opaque for part in module.modules()}
    for module in model.modules():
        if not isinstance(module, nn.ModuleList) or id(module) in inside:
            continue
        alike: dict[Any, list[nn.Module]] = {}
        for child in {id(c): c for c in module}.values():
            if _is_plain(child) and any(child.children()):
                alike.setdefault(_structure_key(child), []).append(child)
        for members in alike.values():
            if len(members) > TRACED:
                groups.append(Group(members, _varying(members)))
                inside.update(id(m) for member in members for m in member.modules())
    return groups


def _is_plain(block: nn.Module) -> bool:
    """No hooks and no forward of its own on any module inside (an opaque module has one)."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return not any("forward" in vars(m) or any(vars(m).get(h) for h in hooks) for m in block.modules())


def _structure_key(block: nn.Module) -> Any:
    """Classes, parameters and buffers of everything inside a block."""
    classes = tuple((path, type(m)) for path, m in block.named_modules(remove_duplicate=False))
    tensors = tuple(
        (name, t.shape, t.stride(), t.dtype, t.requires_grad)
        for named in (block.named_parameters(), block.named_buffers())
        for name, t in named
    )
    return classes, tensors


def _varying(members: Sequence[nn.Module]) -> dict[str, set[str]]:
    """The attributes that are not the same in all members, by path."""
    first = dict(members[0].named_modules())
    varying: dict[str, set[str]] = {}
    for other in members[1:]:
        for path, module in other.named_modules():
            mine, theirs = _settings(first[path]), _settings(module)
            names = {n for n in mine.keys() | theirs.keys() if not _same(mine.get(n), theirs.get(n))}
            if names:
                varying.setdefault(path, set()).update(names)
    return varying


def _settings(module: nn.Module) -> dict[str, Any]:
    own = ("_parameters", "_buffers", "_modules")
    return {name: value for name, value in vars(module).items() if name not in own}


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(_same(a, b) for a, b in zip(one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[k], other[k]) for k in one)
    if isinstance(one, set | frozenset | torch.Size | torch.device):
        return one == other
    return isinstance(one, PLAIN) and one == other


@contextlib.contextmanager
def _reads_noted(block: nn.Module, group: Group) -> Generator[None]:
    """While this lasts, reading a varying attribute of the block is noted in ``group.read``."""
    changed: list[tuple[nn.Module, type]] = []
    try:
        for path, names in group.varying.items():
            module = block.get_submodule(path)
            changed.append((module, type(module)))
            module.__class__ = _watching(type(module), names, group.read)
        yield
    finally:
        for module, cls in changed:
            module.__class__ = cls


def _watching(cls: type, names: set[str], read: set[str]) -> Any:
    """A subclass that looks like ``cls`` and notes reads of ``names``."""

    def __getattribute__(self: Any, name: str) -> Any:
        if name in names:
            read.add(name)
        return plain(self, name)

    plain: Any = cls.__getattribute__
    same = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (cls,), {"__getattribute__": __getattribute__, **same})


class CannotUnfold(Exception):
    """Two traced blocks differ, or a block reads what it was not given."""


@dataclass(frozen=True)
class _Body:
    """The nodes of one traced block between its inputs and its outputs."""

    inputs: tuple[fx.Node, ...]
    held: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    depth: int


def unfold(graph: fx.Graph, absent: Callable[[int], Sequence[fx.Node]]) -> None:
    """Replace copy nodes by the nodes of their block and drop the marks, in place.

    ``absent`` gives the nodes of the tensors of a block that had none while it was exported, by the
    block's id. Raises :class:`CannotUnfold` when that would not be what tracing every block gives.
    """
    bodies: dict[int, _Body] = {}
    forms: dict[int, str] = {}
    for node in list(graph.nodes):
        if node.target is _template:
            kind: Any = node.args[KIND]
            body = _body(node)
            if forms.setdefault(kind, _form(body)) != _form(body):
                raise CannotUnfold
            bodies.setdefault(kind, body)
            _replace_outputs(graph, node, body.outputs)
        elif node.target is _copy:
            body, block = bodies[node.args[KIND]], node.args[3]
            _write_out(graph, node, body, absent(block) if block else node.args[1])


def _body(mark: fx.Node) -> _Body:
    inputs, held, outputs = (tuple(mark.args[i]) for i in (0, 1, 3))  # pyright: ignore[reportArgumentType]: lists by schema
    given = {*inputs, *held}
    found: set[fx.Node] = set()
    stack: list[fx.Node] = [node for node in outputs if node not in given]
    while stack:
        node = stack.pop()
        if node.op != "call_function":
            raise CannotUnfold
        if node not in found:
            found.add(node)
            stack.extend(n for n in node.all_input_nodes if n not in given)
    depth = len(mark.meta.get("nn_module_stack") or ())
    return _Body(inputs, held, tuple(sorted(found)), outputs, depth)


def _form(body: _Body) -> str:
    """The body as text, its nodes numbered."""
    words: dict[fx.Node, str] = {}
    for letter, nodes in (("x", body.inputs), ("p", body.held)):
        for index, node in enumerate(nodes):
            words.setdefault(node, f"{letter}{index}")
    lines: list[str] = []
    for index, node in enumerate(body.nodes):
        leaves, structure = pytree.tree_flatten((tuple(node.args), dict(node.kwargs)))
        given = [words[x] if isinstance(x, fx.Node) else repr(x) for x in leaves]
        values = [(t.shape, t.stride(), t.dtype) for t in pytree.tree_leaves(node.meta["val"])]
        lines.append(f"{node.target} {given} {structure.num_nodes} {values}")
        words[node] = f"n{index}"
    return "\n".join([*lines, *(words[node] for node in body.outputs)])


def _write_out(graph: fx.Graph, copy: fx.Node, body: _Body, held: Any) -> None:
    """Put the body's nodes before ``copy``, on the copy's inputs and its tensors ``held``."""
    inputs: Any = copy.args[0]
    env = dict(zip((*body.inputs, *body.held), (*inputs, *held), strict=True))
    stack = dict(copy.meta.get("nn_module_stack") or {})
    with graph.inserting_before(copy):
        for node in body.nodes:
            args, kwargs = map_arg((node.args, node.kwargs), env.__getitem__)
            new = graph.create_node("call_function", node.target, args, kwargs, name=node.name)
            new.meta = {**node.meta, "nn_module_stack": _moved(node, body.depth, stack)}
            env[node] = new
    _replace_outputs(graph, copy, tuple(env[node] for node in body.outputs))


def _moved(node: fx.Node, depth: int, stack: Mapping[str, Any]) -> dict[str, Any]:
    """The module stack of a copied node: the copy's, then what lies inside the block."""
    entries = list((node.meta.get("nn_module_stack") or {}).items())
    if not stack or len(entries) < depth:
        return dict(stack)
    before, after = entries[depth - 1][1][0], list(stack.values())[-1][0]
    inner = {
        key.replace(before, after, 1): (path.replace(before, after, 1), cls)
        for key, (path, cls) in entries[depth:]
    }
    return {**stack, **inner}


def _replace_outputs(graph: fx.Graph, node: fx.Node, outputs: Sequence[fx.Node]) -> None:
    for user in list(node.users):
        if not is_getitem(user):
            raise CannotUnfold
        user.replace_all_uses_with(outputs[int(user.args[1])])  # pyright: ignore[reportArgumentType]: an index
        graph.erase_node(user)
    graph.erase_node(node)
