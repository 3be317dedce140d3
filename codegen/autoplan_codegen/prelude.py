"""The functions of ours that a stage uses in, the piece of source that defines them out.

The source is that of ``autoplan_passes.collectives`` and of the modules built on it: the top-level
definitions asked for and whatever they use in turn, in their order there, so that a generated file stands
by itself.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Sequence
from types import ModuleType

from autoplan_passes import collectives, deferred, dispatch, fused_loss, fused_ops, grouped, ring

# A module uses those before it.
PRELUDE_MODULES: tuple[ModuleType, ...] = (
    collectives,
    ring,
    dispatch,
    grouped,
    deferred,
    fused_ops,
    fused_loss,
)
# What whoever runs a stage calls, by the modules whose functions need it.
COMPANIONS = {("bind",): (collectives, ring, dispatch), ("take_deferred", "run_deferred"): (deferred,)}

OWN_IMPORTS = ("__future__", *(module.__name__ for module in PRELUDE_MODULES))
_REMARKS = re.compile(r"  # (pyright: ignore|noqa).*")  # for the tools of this project, not for the reader


def prelude_source(
    names: Iterable[str], modules: Sequence[ModuleType] = PRELUDE_MODULES
) -> tuple[tuple[str, ...], str]:
    """The import lines needed and the definitions of ``names`` with all they use."""
    sources = [inspect.getsource(module) for module in modules]
    statements = [(source, node) for source in sources for node in ast.parse(source).body]
    definitions = {name: node for _, node in statements for name in _defined(node)}
    needed = _closure(definitions, names)
    kept = [(source, node) for source, node in statements if any(name in needed for name in _defined(node))]
    used = {name for _, node in kept for name in _used(node)}
    imports = _import_lines([node for _, node in statements], used)
    return imports, "\n\n\n".join(_text(source, node) for source, node in kept)


def companions(names: Iterable[str]) -> list[str]:
    """What a file that uses ``names`` defines besides, for whoever runs it."""
    homes = {
        vars(module)[name].__module__ for name in names for module in PRELUDE_MODULES if name in vars(module)
    }
    return [
        companion
        for group, modules in COMPANIONS.items()
        for companion in group
        if homes & {module.__name__ for module in modules}
    ]


def is_prelude_function(target: object) -> bool:
    """Whether a graph's call is to a function that generated files carry a copy of."""
    return getattr(target, "__module__", "") in {module.__name__ for module in PRELUDE_MODULES}


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


def _import_lines(statements: Sequence[ast.stmt], used: set[str]) -> tuple[str, ...]:
    """What of the modules' imports is used, a line a module."""
    plain: dict[str, None] = {}
    taken: dict[str, set[str]] = {}
    for node in statements:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if (alias.asname or alias.name.split(".")[0]) in used:
                    plain[f"import {_alias_text(alias)}"] = None
        elif isinstance(node, ast.ImportFrom) and node.module not in OWN_IMPORTS:
            names = {_alias_text(alias) for alias in node.names if (alias.asname or alias.name) in used}
            taken.setdefault(str(node.module), set()).update(names)
    lines = [f"from {module} import {', '.join(sorted(names))}" for module, names in taken.items() if names]
    return (*plain, *lines)


def _alias_text(alias: ast.alias) -> str:
    return alias.name + (f" as {alias.asname}" if alias.asname else "")
