"""A launch script in, the words of its training command out, with variables filled in. Nothing is run.

Assignments (``A=1``, ``export A=1``, ``ARGS=(...)``, ``ARGS+=(...)``), parameters with defaults
(``${A:-1}``), arrays (``${ARGS[@]}``) and whole-number arithmetic (``$((A*8))``) are resolved; what a
command would print, and what only the environment knows, stays as text and is listed.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_ASSIGNMENT = re.compile(rf"^(?:(?:export|local|readonly|declare)\s+)?({_NAME})(\+?)=(.*)$", re.DOTALL)
_PARAMETER = re.compile(
    rf"\$\{{({_NAME})(?:\[[@*]\])?(?::?[-=]([^{{}}]*))?\}}|\$({_NAME})|\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)"
)
_QUOTED_ARRAY = re.compile(rf'"(\$\{{{_NAME}\[[@*]\]\}})"')
_OPERATORS: Mapping[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_DEEPEST = 20


@dataclass
class Script:
    """``words`` of every command after assignments; ``variables`` as they stand at the end; ``unknown`` what
    the script takes from elsewhere."""

    variables: dict[str, str] = field(default_factory=dict[str, str])
    words: list[str] = field(default_factory=list[str])
    unknown: set[str] = field(default_factory=set[str])


def read_script(text: str, given: Mapping[str, str] | None = None) -> Script:
    """Read a shell script; ``given`` are variables that the user sets by hand and that win.

    Of the branches of an ``if`` the first assignment of a variable stands: that is the default path.
    """
    script = Script()
    fixed = dict(given or {})
    script.variables |= fixed
    branch = 0
    branched: set[str] = set()
    for line in _logical_lines(text):
        opener = line.split(maxsplit=1)[0] if line.split() else ""
        branch += (opener in ("if", "case")) - (opener in ("fi", "esac"))
        found = _ASSIGNMENT.match(line)
        if found is None or (not found[3].lstrip().startswith("(") and _has_command_after(found[3])):
            script.words += _words(line, script)
            continue
        name, more, value = found[1], found[2], found[3].strip()
        again = branch > 0 and name in branched
        if name in fixed or again:
            continue
        branched |= {name} if branch > 0 else set()
        resolved = " ".join(shlex.quote(word) for word in _words(_inside(value), script))
        if not value.startswith("("):
            resolved = " ".join(_words(value, script))
        script.variables[name] = f"{script.variables.get(name, '')} {resolved}".strip() if more else resolved
    return script


def _inside(value: str) -> str:
    return value[1 : value.rfind(")")] if value.startswith("(") and ")" in value else value


def _has_command_after(value: str) -> bool:
    """``A=1 python train.py`` sets A for one command; ``A=1`` sets it for good."""
    try:
        return len(shlex.split(value, comments=True)) > 1 and not value.startswith(('"', "'", "$("))
    except ValueError:
        return False


def _logical_lines(text: str) -> list[str]:
    """Lines without comments, continued ones joined, and arrays over several lines made one."""
    joined = re.sub(r"\\[ \t]*\r?\n", " ", text)
    lines: list[str] = []
    open_array = ""
    for raw in joined.splitlines():
        line = _without_comment(raw).strip()
        if open_array:
            open_array += " " + line
            if line.endswith(")"):
                lines.append(open_array)
                open_array = ""
        elif re.match(rf"^(?:(?:export|local|declare)\s+(?:-a\s+)?)?{_NAME}\+?=\($", line) or (
            re.match(rf"^{_NAME}\+?=\(", line) and not line.endswith(")")
        ):
            open_array = line
        elif line:
            lines += [part.strip() for part in _statements(line)]
    return [*lines, *([open_array] if open_array else [])]


def _statements(line: str) -> list[str]:
    """Statements between semicolons that are outside quotes."""
    parts: list[str] = [""]
    quote = ""
    for char in line:
        quote = "" if char == quote else (char if char in "\"'" and not quote else quote)
        if char == ";" and not quote:
            parts.append("")
        else:
            parts[-1] += char
    return [part for part in parts if part.strip()]


def _without_comment(line: str) -> str:
    quote = ""
    for i, char in enumerate(line):
        if char == quote:
            quote = ""
        elif char in "\"'" and not quote:
            quote = char
        elif char == "#" and not quote and (i == 0 or line[i - 1].isspace()):
            return line[:i]
    return line


def _words(text: str, script: Script) -> list[str]:
    resolved = _resolve(_QUOTED_ARRAY.sub(r"\1", text), script, 0)
    try:
        return shlex.split(resolved)
    except ValueError:  # an unclosed quote: a here-document or a command of several lines
        return resolved.split()


def _resolve(text: str, script: Script, depth: int) -> str:
    """Parameters and arithmetic replaced by their values."""
    if depth > _DEEPEST:
        return text

    def value_of(match: re.Match[str]) -> str:
        if match[4] is not None:
            return _arithmetic(_resolve(match[4], script, depth + 1), script)
        name = match[1] or match[3]
        if name in script.variables:
            return script.variables[name]
        if match[2] is not None:
            return _resolve(match[2], script, depth + 1).strip("\"'")
        script.unknown.add(name)
        return f"${name}"

    return _PARAMETER.sub(value_of, text)


def _arithmetic(text: str, script: Script) -> str:
    """``4 * 8`` as 32; names are looked up; anything else stays as it is."""
    try:
        return str(_number(ast.parse(text.strip(), mode="eval").body, script))
    except (SyntaxError, ValueError, ZeroDivisionError):
        return text


def _number(node: ast.expr, script: Script) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        return int(script.variables[node.id]) if node.id in script.variables else _unknown(node.id, script)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_number(node.left, script), _number(node.right, script))
    raise ValueError(ast.dump(node))


def _unknown(name: str, script: Script) -> int:
    script.unknown.add(name)
    raise ValueError(name)
