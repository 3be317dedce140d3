"""One step of a training loop: what stands from forward to backward in, batch and loss function out."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from autoplan_codegen.script_loop import TrainingLoop, names_after
from autoplan_codegen.script_names import (
    NotUnderstood,
    bound_names,
    dotted,
    is_builtin,
    moves_to_device,
    read_names,
)
from autoplan_codegen.script_text import ScriptText


@dataclass(frozen=True)
class StepRewrite:
    """What takes the place of forward and backward.

    ``batch`` is the argument of ``step``; ``loss_name`` the variable it is assigned to; ``loss_function``
    the lines of ``def loss_fn`` (empty where the model returns its loss); ``removed`` the statements that
    go; ``at`` the statement whose place the call of ``step`` takes; ``same_as_loss`` further expressions
    (``outputs.loss``) that now read ``loss_name``; ``closure`` what the loss function reads from outside.
    """

    batch: str
    loss_name: str
    loss_function: tuple[str, ...]
    removed: tuple[ast.stmt, ...]
    at: ast.stmt
    same_as_loss: tuple[ast.expr, ...]
    closure: frozenset[str]


def rewrite_step(
    loop: TrainingLoop, text: ScriptText, forward_names: Callable[[], list[str] | None]
) -> StepRewrite:
    """Split what stands between forward and backward into the step and what stays.

    ``forward_names`` gives the parameters of the model's ``forward`` where they can be known.
    """
    path, stay = _split(loop)
    name, same = _loss_name(loop, path)
    batch = _Batch(loop, text, forward_names)
    lines: tuple[str, ...] = ()
    closure: frozenset[str] = frozenset()
    if not _returns_loss(loop, path):
        lines, closure = _loss_function(loop, text, path, batch)
    at = _place(loop, path, stay, name)
    _refuse_lost_names(loop, path, name, same)
    removed = tuple(dict.fromkeys((*path, loop.backward)))
    return StepRewrite(batch.text(), name, lines, removed, at, same, closure)


# ---- which statements go ----------------------------------------------------------------------------


def _between(loop: TrainingLoop) -> list[ast.stmt]:
    block = loop.names.block(loop.backward)
    return block[block.index(loop.forward) + 1 : block.index(loop.backward)] if loop.forward in block else []


def _split(loop: TrainingLoop) -> tuple[list[ast.stmt], list[ast.stmt]]:
    """(statements on the way from the model's outputs to the loss, statements that stay), in order."""
    if loop.forward is loop.backward:
        return [], []
    tainted = bound_names(loop.forward)
    depending: list[ast.stmt] = []
    for statement in _between(loop):
        if read_names(statement) & tainted or _augments(statement) & tainted:
            depending.append(statement)
            if isinstance(statement, ast.Assign | ast.AnnAssign):
                tainted |= bound_names(statement)
    wanted = read_names(loop.loss)
    path: list[ast.stmt] = []
    for statement in reversed(depending):
        if bound_names(statement) & wanted:
            if not isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
                raise NotUnderstood(statement, "the loss is changed inside another statement")
            path.insert(0, statement)
            wanted |= read_names(statement)
    if not bound_names(loop.forward) & wanted:
        raise NotUnderstood(loop.backward, f"its loss does not come from `{loop.local_model}`")
    return [loop.forward, *path], [s for s in _between(loop) if s not in path]


def _augments(statement: ast.stmt) -> set[str]:
    return {dotted(statement.target)} if isinstance(statement, ast.AugAssign) else set()


def _loss_name(loop: TrainingLoop, path: list[ast.stmt]) -> tuple[str, tuple[ast.expr, ...]]:
    """The variable for the loss, and other expressions in the loop that mean it (``outputs.loss``)."""
    if isinstance(loop.loss, ast.Name):
        name, last = loop.loss.id, path[-1]
        value = getattr(last, "value", None)
        twin = value if len(path) > 1 and isinstance(value, ast.Attribute | ast.Subscript) else None
    else:
        name = "loss" if "loss" not in names_after(loop) else "step_loss"
        twin = loop.loss if path else None
    if twin is None:
        return name, ()
    shape = ast.dump(twin)
    inside = {node for statement in (*path, loop.backward) for node in ast.walk(statement)}
    region = loop.names.loop(loop.backward)
    same = [
        n for n in ast.walk(region) if isinstance(n, ast.expr) and n not in inside and ast.dump(n) == shape
    ]
    return name, tuple(same)


def _place(loop: TrainingLoop, path: list[ast.stmt], stay: list[ast.stmt], loss: str) -> ast.stmt:
    """Where step goes: at the loss's last statement, or at backward where gradients are zeroed in between."""
    last = path[-1] if path else loop.backward
    later = [s for s in stay if s.lineno > last.lineno]
    zeroing = [
        s for s in later if any(isinstance(n, ast.Attribute) and n.attr == "zero_grad" for n in ast.walk(s))
    ]
    early = [s for s in stay if s.lineno < last.lineno and loss in read_names(s)]
    if early:
        raise NotUnderstood(early[0], f"`{loss}` is used before it is complete")
    if not zeroing:
        return last
    reading = [s for s in later if loss in read_names(s)]
    if reading:
        raise NotUnderstood(reading[0], f"`{loss}` is used between the forward pass and `zero_grad()`")
    return loop.backward


def _refuse_lost_names(
    loop: TrainingLoop, path: list[ast.stmt], loss: str, same: tuple[ast.expr, ...]
) -> None:
    """Outputs other than the loss exist inside the parallel step only."""
    lost = {name for statement in path for name in bound_names(statement)} - {loss}
    gone = {n for s in (*path, loop.backward) for n in ast.walk(s)} | {n for e in same for n in ast.walk(e)}
    region = loop.names.scope(loop.backward)
    bound_again = {n for n in lost if len(loop.names.bindings(region, n)) > _times_bound(path, n)}
    for node in ast.walk(region):
        if not isinstance(node, ast.Name) or not isinstance(node.ctx, ast.Load) or node in gone:
            continue
        if node.id in lost - bound_again and node.lineno > loop.forward.lineno:
            what = f"reads `{node.id}`, which exists inside the parallel step only"
            raise NotUnderstood(loop.names.statement(node), what)


def _times_bound(path: list[ast.stmt], name: str) -> int:
    return sum(name in bound_names(statement) for statement in path)


# ---- the loss function ------------------------------------------------------------------------------


def _is_loss_of(node: ast.expr, base: Callable[[ast.expr], bool]) -> bool:
    """``B``, ``B.loss``, ``B["loss"]`` or ``B[0]``: what autoplan finds in a model's outputs by itself."""
    if base(node):
        return True
    if isinstance(node, ast.Attribute):
        return node.attr == "loss" and base(node.value)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return node.slice.value in ("loss", 0) and node.slice.value is not False and base(node.value)
    return False


def _returns_loss(loop: TrainingLoop, path: list[ast.stmt]) -> bool:
    """Whether the loss is what the model returns, or its ``loss``, with nothing done to it."""
    if not path:
        return _is_loss_of(loop.loss, lambda node: node is loop.call)
    value, target = _value(path[0]), _only_target(path[0])
    whole = value is loop.call
    is_loss = _is_loss_of(value, lambda node: node is loop.call)
    if len(path) == 1 and isinstance(loop.loss, ast.Name):
        if isinstance(target, ast.Name):
            return is_loss
        first = target.elts[0] if whole and isinstance(target, ast.Tuple) and target.elts else None
        return isinstance(first, ast.Name) and first.id == loop.loss.id
    if not whole or not isinstance(target, ast.Name):
        return False
    outputs = target.id
    last = loop.loss if len(path) == 1 else _value(path[1])
    simple = len(path) == 1 or (len(path) == 2 and isinstance(path[1], ast.Assign | ast.AnnAssign))
    plain = len(path) == 1 or isinstance(loop.loss, ast.Name)
    if not simple or not plain:
        return False
    return _is_loss_of(last, lambda node: isinstance(node, ast.Name) and node.id == outputs)


def _only_target(statement: ast.stmt) -> ast.expr:
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        return statement.targets[0]
    if isinstance(statement, ast.AnnAssign | ast.AugAssign):
        return statement.target
    raise NotUnderstood(statement, "expected one variable on the left of `=`")


def _loss_function(
    loop: TrainingLoop, text: ScriptText, path: list[ast.stmt], batch: _Batch
) -> tuple[tuple[str, ...], frozenset[str]]:
    """``def loss_fn(outputs, inputs):`` from the statements after the model's call."""
    own = {name for statement in path for name in bound_names(statement)}
    changing = names_after(loop) - own
    closure: set[str] = set()

    def written(node: ast.expr) -> str:
        replacements: list[tuple[ast.AST, str]] = []
        for leaf in _leaves(node, loop.call):
            if leaf is loop.call:
                replacements.append((leaf, "outputs"))
            elif _root(leaf) in changing:
                replacements.append((leaf, batch.reference(leaf)))
            elif _root(leaf) not in own and not is_builtin(_root(leaf)):
                closure.add(_root(leaf))
        return text.of(node, replacements)

    if not path:
        return ("def loss_fn(outputs, inputs):", f"    return {written(loop.loss)}"), frozenset(closure)
    first, *rest = path
    value = _value(first)
    target = _only_target(first)
    outputs = target.id if isinstance(target, ast.Name) and value is loop.call else "outputs"
    lines = [f"def loss_fn({outputs}, inputs):"]
    if outputs == "outputs" and not (
        isinstance(target, ast.Name) and target.id == "outputs" and value is loop.call
    ):
        lines.append(f"    {text.of(target)} = {written(value)}")
    for statement in rest:
        operator = _operator(text, statement)
        lines.append(f"    {text.of(_only_target(statement))} {operator} {written(_value(statement))}")
    result = written(loop.loss)
    head, _, tail = lines[-1].strip().partition(" = ")
    if len(lines) > 1 and head == result and tail:
        lines[-1] = f"    return {tail}"
    else:
        lines.append(f"    return {result}")
    return tuple(line for whole in lines for line in whole.splitlines()), frozenset(closure)


def _value(statement: ast.stmt) -> ast.expr:
    """What is assigned; statements on the way to the loss are assignments of a value."""
    value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign) else None
    assert value is not None
    return value


def _operator(text: ScriptText, statement: ast.stmt) -> str:
    """``=``, or ``/=`` and its like as written."""
    if not isinstance(statement, ast.AugAssign):
        return "="
    between = text.of(statement)[len(text.of(statement.target)) :]
    return between[: between.index("=") + 1].strip()


def _leaves(node: ast.AST, call: ast.Call) -> Iterator[ast.expr]:
    """Variables as they are read, in order: ``x``, ``batch["y"]``, ``y.to(device)``, the model's call."""
    if isinstance(node, ast.expr) and (node is call or _is_leaf(node)):
        yield node
        return
    for child in ast.iter_child_nodes(node):
        yield from _leaves(child, call)


def _is_leaf(node: ast.expr) -> bool:
    node = _still(node)
    if isinstance(node, ast.Name):
        return isinstance(node.ctx, ast.Load)
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        return isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str | int)
    return False


def _root(leaf: ast.expr) -> str:
    leaf = _still(leaf)
    return dotted(leaf.value) if isinstance(leaf, ast.Subscript) else dotted(leaf)


# ---- the batch --------------------------------------------------------------------------------------


class _Batch:
    """The argument of ``step``: what the model is called with, and what the loss alone reads."""

    def __init__(
        self, loop: TrainingLoop, text: ScriptText, forward_names: Callable[[], list[str] | None]
    ) -> None:
        self._loop, self._text, self._forward_names = loop, text, forward_names
        call = loop.call
        if any(isinstance(one, ast.Starred) for one in call.args):
            raise NotUnderstood(loop.forward, "the model is called with `*arguments`: name them")
        self._spread = [k.value for k in call.keywords if k.arg is None]
        self._named = {k.arg: k.value for k in call.keywords if k.arg is not None}
        self._positional = list(call.args)
        self._extra: dict[str, ast.expr] = {}
        if self._positional and (self._named or self._spread):
            self._name_positions()

    def reference(self, leaf: ast.expr) -> str:
        """How the loss function reads a variable of the loop: ``inputs["labels"]``."""
        for index, value in enumerate(self._positional):
            if _same(value, leaf):
                return f"inputs[{index}]"
        for name, value in self._named.items():
            if _same(value, leaf):
                return f'inputs["{name}"]'
        for value in self._spread:
            entry = _still(leaf)
            if isinstance(entry, ast.Subscript) and _same(value, entry.value):
                return f"inputs[{self._text.of(entry.slice)}]"
        if self._positional:
            self._name_positions()
            return self.reference(leaf)
        name = next((n for n, value in self._extra.items() if _same(value, leaf)), None)
        if name is None:
            name = self._fresh_name(leaf)
            self._extra[name] = leaf
        return f'inputs["{name}"]'

    def _fresh_name(self, leaf: ast.expr) -> str:
        still = _still(leaf)
        constant = still.slice if isinstance(still, ast.Subscript) else None
        key = constant.value if isinstance(constant, ast.Constant) else _root(leaf)
        name = key if isinstance(key, str) and key.isidentifier() else f"{_root(leaf)}_{key}"
        while name in self._named or name in self._extra:
            name += "_"
        return name

    def _name_positions(self) -> None:
        """Turn ``model(x)`` into ``model(tokens=x)``, by the names of the model's ``forward``."""
        known = self._forward_names()
        if known is None or len(known) < len(self._positional):
            call = self._text.of(self._loop.call)
            raise NotUnderstood(self._loop.forward, f"pass the model's inputs by name in `{call}`")
        self._named = dict(zip(known, self._positional)) | self._named
        self._positional = []

    def text(self) -> str:
        """``batch``, ``(x, y)`` or ``{"tokens": x, "labels": y}``."""
        if self._positional or not (self._named or self._spread or self._extra):
            inner = ", ".join(map(self._text.of, self._positional))
            return f"({inner},)" if len(self._positional) == 1 else f"({inner})"
        if len(self._spread) == 1 and not self._named and not self._extra:
            return self._text.of(self._spread[0])
        spread = [f"**{self._text.of(value)}" for value in self._spread]
        named = [f'"{name}": {self._text.of(value)}' for name, value in (self._named | self._extra).items()]
        return "{" + ", ".join((*spread, *named)) + "}"


def _same(value: ast.expr, leaf: ast.expr) -> bool:
    """Equal as written, moves to a device aside."""
    return ast.dump(_still(value)) == ast.dump(_still(leaf))


def _still(node: ast.expr) -> ast.expr:
    """``x.to(device) -> x``."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and moves_to_device(node):
        node = node.func.value
    return node
