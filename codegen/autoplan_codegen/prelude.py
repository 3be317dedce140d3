"""The collectives a stage uses in, the piece of source that defines them out.

The source is that of ``autoplan_passes.collectives``: the top-level definitions asked for and whatever they
use in turn, in their order there, so that a generated file stands by itself.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable
from types import ModuleType

_REMARKS = re.compile(r"  # (pyright: ignore|noqa).*")  # for the tools of this project, not for the reader


def prelude_source(module: ModuleType, names: Iterable[str]) -> tuple[tuple[str, ...], str]:
    """The import lines needed and the definitions of ``names`` with all they use."""
    source = inspect.getsource(module)
    tree = ast.parse(source)
    definitions = {name: node for node in tree.body for name in _defined(node)}
    needed = _closure(definitions, names)
    body = [node for node in tree.body if any(name in needed for name in _defined(node))]
    pieces = [_text(source, node) for node in body]
    used = {name for node in body for name in _used(node)}
    imports = tuple(line for node in tree.body for line in _import_lines(node, used))
    return imports, "\n\n\n".join(pieces)


def _defined(node: ast.stmt) -> tuple[str, ...]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return (node.name,)
    if isinstance(node, ast.Assign):
        return tuple(target.id for target in node.targets if isinstance(target, ast.Name))
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return (node.target.id,)
    return ()


def _used(node: ast.stmt) -> set[str]:
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}


def _closure(definitions: dict[str, ast.stmt], names: Iterable[str]) -> set[str]:
    needed: set[str] = set()
    pending = list(names)
    while pending:
        name = pending.pop()
        if name in needed or name not in definitions:
            continue
        needed.add(name)
        pending.extend(_used(definitions[name]))
    return needed


def _text(source: str, node: ast.stmt) -> str:
    lines = source.splitlines()
    decorators = node.decorator_list if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else []
    first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    return _REMARKS.sub("", "\n".join(lines[first - 1 : node.end_lineno]))


def _import_lines(node: ast.stmt, used: set[str]) -> Iterable[str]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            if (alias.asname or alias.name.split(".")[0]) in used:
                yield f"import {alias.name}" + (f" as {alias.asname}" if alias.asname else "")
    elif isinstance(node, ast.ImportFrom) and node.module != "__future__":
        kept = [alias for alias in node.names if (alias.asname or alias.name) in used]
        if kept:
            parts = [alias.name + (f" as {alias.asname}" if alias.asname else "") for alias in kept]
            yield f"from {node.module} import {', '.join(parts)}"
