"""The parameters of a model's ``forward``: a script's tree in, names out, read from the files beside it.

Nothing is imported or run: the class is looked for in the script, or in the file of that folder which the
script imports it from.
"""

from __future__ import annotations

import ast
from pathlib import Path

from autoplan_codegen.script_loop import TrainingLoop
from autoplan_codegen.script_names import Function, dotted, parameters

_DEPTH = 4


def forward_parameters(loop: TrainingLoop, folder: Path | None) -> list[str] | None:
    """Names of the parameters of the model's ``forward`` after ``self``; None where they cannot be read."""
    for statement in loop.names.bindings(loop.owner, loop.model):
        value = getattr(statement, "value", None)
        found = _of_value(value, loop.names.tree, folder, _DEPTH)
        if found is not None:
            return found
    return None


def _of_value(value: ast.AST | None, tree: ast.Module, folder: Path | None, depth: int) -> list[str] | None:
    """Of what ``GPT(...)``, ``GPT(...).to(device)`` or ``build_model()`` makes."""
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        if isinstance(value.func.value, ast.Call):
            value = value.func.value
            continue
        break
    if not isinstance(value, ast.Call) or depth == 0:
        return None
    return _of_name(dotted(value.func), tree, folder, depth)


def _of_name(name: str, tree: ast.Module, folder: Path | None, depth: int) -> list[str] | None:
    module_name, _, last = name.rpartition(".")
    for node in tree.body:
        if not module_name and isinstance(node, ast.ClassDef) and node.name == last:
            return _of_class(node, tree, folder, depth)
        if not module_name and isinstance(node, Function) and node.name == last:
            return _of_function(node, tree, folder, depth)
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                if not module_name and (alias.asname or alias.name) == last:
                    return _in_file(node.module, alias.name, folder, depth)
        if isinstance(node, ast.Import):
            for alias in node.names:
                if module_name and (alias.asname or alias.name) == module_name:
                    return _in_file(alias.name, last, folder, depth)
    return None


def _in_file(module: str, name: str, folder: Path | None, depth: int) -> list[str] | None:
    path = folder / (module.replace(".", "/") + ".py") if folder else None
    if path is None or not path.is_file():
        return None
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return None
    return _of_name(name, tree, folder, depth - 1)


def _of_class(node: ast.ClassDef, tree: ast.Module, folder: Path | None, depth: int) -> list[str] | None:
    for member in node.body:
        if isinstance(member, Function) and member.name == "forward":
            return parameters(member)[1:]
    for base in node.bases:
        found = _of_name(dotted(base), tree, folder, depth - 1) if depth else None
        if found is not None:
            return found
    return None


def _of_function(node: Function, tree: ast.Module, folder: Path | None, depth: int) -> list[str] | None:
    """Of what the function returns, itself or by a variable it set."""
    values = {
        target.id: statement.value
        for statement in ast.walk(node)
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }
    for statement in ast.walk(node):
        if isinstance(statement, ast.Return) and statement.value is not None:
            value = values.get(dotted(statement.value), statement.value)
            return _of_value(value, tree, folder, depth - 1)
    return None
