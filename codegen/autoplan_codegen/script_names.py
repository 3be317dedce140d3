"""Who is who in a training script: its syntax tree in; scopes, bindings, names through calls out."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator

Function = ast.FunctionDef | ast.AsyncFunctionDef
Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef
_BLOCKS = ("body", "orelse", "finalbody")


class NotUnderstood(Exception):
    """A statement that the rewrite does not know how to keep: where (None: the whole file) and why."""

    def __init__(self, node: ast.AST | None, reason: str) -> None:
        super().__init__(reason)
        self.node, self.reason = node, reason


class Names:
    """Parents, scopes and bindings of one tree; a name is looked up as Python would."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.parent = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        self._inner = _comprehension_variables(tree)
        self.functions = {node.name: node for node in ast.walk(tree) if isinstance(node, Function)}

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """The node's parent, its parent's parent... up to the module."""
        while node in self.parent:
            node = self.parent[node]
            yield node

    def scope(self, node: ast.AST) -> Scope:
        """The function the node stands in, else the module."""
        return next(a for a in self.ancestors(node) if isinstance(a, Scope))

    def statement(self, node: ast.AST) -> ast.stmt:
        """The innermost statement the node is part of."""
        return next(a for a in (node, *self.ancestors(node)) if isinstance(a, ast.stmt))

    def block(self, statement: ast.stmt) -> list[ast.stmt]:
        """The list of statements that holds this one."""
        parent = self.parent[statement]
        lists = (getattr(parent, name, None) for name in _BLOCKS)
        return next(block for block in lists if isinstance(block, list) and statement in block)

    def loop(self, node: ast.AST) -> ast.AST:
        """The outermost loop round the node within its scope, else its scope."""
        outermost: ast.AST = self.scope(node)
        for ancestor in self.ancestors(node):
            if isinstance(ancestor, Scope):
                break
            if isinstance(ancestor, ast.For | ast.While | ast.AsyncFor):
                outermost = ancestor
        return outermost

    def bindings(self, scope: Scope, name: str) -> list[ast.stmt]:
        """The statements that give ``name`` a value in ``scope``, in the order of the text."""
        found = {
            self.statement(node): None
            for node in ast.walk(scope)
            if node is not scope
            and name in _bound_by(node)
            and node not in self._inner
            and self.scope(node) is scope
        }
        return sorted(found, key=lambda statement: statement.lineno)

    def owner(self, scope: Scope, name: str) -> Scope:
        """The scope whose variable ``name`` is when it is read in ``scope``."""
        if isinstance(scope, ast.Module) or name in parameters(scope) or self.bindings(scope, name):
            return scope
        return self.owner(self.scope(scope), name)

    def origin(self, scope: Scope, name: str) -> tuple[Scope, str]:
        """Follow a parameter to the variable passed for it, as far as the script shows it."""
        owner = self.owner(scope, name)
        if isinstance(owner, ast.Module) or name not in parameters(owner) or self.bindings(owner, name):
            return owner, name
        calls = self.calls(owner)
        if len(calls) != 1:
            raise NotUnderstood(owner, f"`{owner.name}` is called in {len(calls)} places, expected one")
        passed = argument(calls[0], owner, name)
        if not isinstance(passed, ast.Name):
            raise NotUnderstood(calls[0], f"what is passed as `{name}` is not a plain variable")
        return self.origin(self.scope(calls[0]), passed.id)

    def known_origin(self, scope: Scope, name: str) -> tuple[Scope, str] | None:
        """:meth:`origin`, or None where the script does not show it."""
        try:
            return self.origin(scope, name)
        except NotUnderstood:
            return None

    def calls(self, function: Function) -> list[ast.Call]:
        """Where the script calls this function by its name."""
        return [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == function.name
        ]

    def loads(self, owner: Scope, name: str) -> Iterator[ast.Name]:
        """Every reading of the variable ``name`` of ``owner``, functions inside included."""
        for node in ast.walk(owner):
            if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load):
                scope = self.scope(node)
                if scope is owner or self.owner(scope, name) is owner:
                    yield node


def _bound_by(node: ast.AST) -> tuple[str, ...]:
    """Names that this very node binds."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
        return (node.id,)
    if isinstance(node, Function | ast.ClassDef):
        return (node.name,)
    if isinstance(node, ast.Import | ast.ImportFrom):
        return tuple((alias.asname or alias.name).partition(".")[0] for alias in node.names)
    return ()


def parameters(function: ast.AST) -> list[str]:
    """The names of a function's parameters, in order; none of a module."""
    if not isinstance(function, Function):
        return []
    spec = function.args
    return [argument.arg for argument in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)]


def argument(call: ast.Call, function: Function, name: str) -> ast.expr | None:
    """What ``call`` passes for the parameter ``name``."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    position = parameters(function).index(name)
    return call.args[position] if position < len(call.args) else None


def read_names(node: ast.AST) -> set[str]:
    """Names that the node reads."""
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def bound_names(node: ast.AST) -> set[str]:
    """Names that the node, or anything inside it, binds; a comprehension's own variables stay inside it."""
    inner = _comprehension_variables(node)
    return {name for n in ast.walk(node) if n not in inner for name in _bound_by(n)}


def _comprehension_variables(tree: ast.AST) -> set[ast.AST]:
    return {n for c in ast.walk(tree) if isinstance(c, ast.comprehension) for n in ast.walk(c.target)}


def dotted(node: ast.AST) -> str:
    """``torch.nn.utils.clip_grad_norm_`` of such an expression; empty for any other."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def is_builtin(name: str) -> bool:
    return hasattr(builtins, name)


def moves_to_device(call: ast.Call) -> bool:
    """``x.to(device)``, ``x.cuda()`` and the like, but not ``x.to(torch.bfloat16)``."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in ("to", "cuda", "cpu"):
        return False
    if call.func.attr != "to":
        return True
    (given, *more) = [*call.args, *(k.value for k in call.keywords)] or [None]
    if given is None or more:
        return False
    return isinstance(given, ast.Constant) or "device" in ast.dump(given).lower()
