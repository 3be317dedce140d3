"""YAML text in, entries that know their file, line and path out, so that every complaint can say where.

An :class:`Entry` is read by asking for what must be there (``text()``, ``number(...)``, ``fields(...)``);
what is not as asked raises the error class the file was opened with.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, cast

import yaml

from autoplan.errors import AutoplanError

# libyaml where it was built with PyYAML (ten times faster), else the same in Python.
_LOADER: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class Unit:
    """The unit a number is written in, its size in base units, and the range a real one lies in."""

    name: str
    factor: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"a number of {self.name} between {self.low:g} and {self.high:g}"


@dataclass(frozen=True)
class Entry:
    """One value of a YAML file and where it stands; ``path`` reads like ``memory.usable_gib.value``."""

    value: object
    node: yaml.Node
    path: str
    file: str
    error: type[AutoplanError]

    def fail(self, expected: str, came: str | None = None, advice: str = "") -> NoReturn:
        """Raise this file's error: where, what was expected, what came, what to do."""
        line = self.node.start_mark.line + 1
        shown = came if came is not None else _shown(self.value)
        tail = f" {advice}" if advice else ""
        raise self.error(
            f"{self.file}:{line}: {self.path or 'the file'}: expected {expected}, got {shown}.{tail}"
        )

    def mapping(self) -> dict[str, Entry]:
        """The fields of a mapping, in file order; duplicate or non-text keys are refused."""
        if not isinstance(self.node, yaml.MappingNode):
            self.fail("a mapping (`field: value` lines)")
        values = cast(Mapping[object, object], self.value)
        found: dict[str, Entry] = {}
        for key_node, value_node in self.node.value:
            key = str(key_node.value)
            path = f"{self.path}.{key}" if self.path else key
            entry = Entry(values.get(key, values.get(_plain(key))), value_node, path, self.file, self.error)
            if key in found:
                entry.fail("each field once", f"`{key}` twice")
            found[key] = entry
        return found

    def fields(self, required: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Entry]:
        """The fields of a mapping that must have all of ``required`` and nothing beyond ``optional``."""
        found = self.mapping()
        known = (*required, *optional)
        for name, entry in found.items():
            if name not in known:
                near = difflib.get_close_matches(name, known, 1, 0.5)
                advice = f"Did you mean `{near[0]}`?" if near else ""
                entry.fail(f"one of the fields {', '.join(known)}", f"the unknown field `{name}`", advice)
        for name in required:
            if name not in found:
                has = ", ".join(found) or "nothing"
                self.fail(f"the field `{name}`", f"only {has}", f"Add a line `{name}: ...`.")
        return found

    def items(self) -> tuple[Entry, ...]:
        """The entries of a list."""
        if not isinstance(self.node, yaml.SequenceNode):
            self.fail("a list (`[a, b]` or `- a` lines)")
        values = cast(Sequence[object], self.value)
        return tuple(
            Entry(value, node, f"{self.path}[{i}]", self.file, self.error)
            for i, (value, node) in enumerate(zip(values, self.node.value))
        )

    def text(self, choices: Sequence[str] = ()) -> str:
        """A non-empty text, one of ``choices`` where given."""
        if not isinstance(self.value, str) or not self.value.strip():
            self.fail("one of " + ", ".join(choices) if choices else "a text (put numbers in quotes)")
        if choices and self.value not in choices:
            near = difflib.get_close_matches(self.value, choices, 1, 0.5)
            advice = f"Did you mean `{near[0]}`?" if near else ""
            self.fail(f"one of {', '.join(choices)}", advice=advice)
        return self.value.strip()

    def texts(self, choices: Sequence[str] = ()) -> tuple[str, ...]:
        """A list of texts, each one of ``choices`` where given."""
        return tuple(item.text(choices) for item in self.items())

    def flag(self) -> bool:
        """``true`` or ``false``."""
        if not isinstance(self.value, bool):
            self.fail("true or false")
        return self.value

    def number(self, unit: Unit) -> float:
        """A number written in ``unit``, returned in base units (bytes, seconds, FLOP/s, bytes/s)."""
        if isinstance(self.value, bool) or not isinstance(self.value, (int, float)):
            advice = "YAML wants `1.0e+12`, not `1e12`." if _reads_as_number(self.value) else ""
            self.fail(str(unit), advice=advice)
        if not unit.low <= self.value <= unit.high:
            self.fail(str(unit), advice=f"The unit of this field is {unit.name}: convert the value to it.")
        return float(self.value) * unit.factor

    def numbers(self, unit: Unit) -> tuple[float, ...]:
        """A list of numbers written in ``unit``, returned in base units."""
        return tuple(item.number(unit) for item in self.items())

    def whole(self, low: int, high: int) -> int:
        """A whole number between ``low`` and ``high``."""
        if isinstance(self.value, bool) or not isinstance(self.value, int) or not low <= self.value <= high:
            self.fail(f"a whole number between {low} and {high}")
        return self.value


def read_yaml(path: Path, error: type[AutoplanError]) -> Entry:
    """The root entry of a YAML file (safe subset); an unreadable or malformed file raises ``error``."""
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as failure:
        reason = failure.strerror if isinstance(failure, OSError) else "not UTF-8 text"
        raise error(f"{path}: expected a readable YAML file, got: {reason}.") from None
    try:
        loader = _LOADER(source)
        node = loader.get_single_node()
        value: object = None if node is None else loader.construct_document(node)
    except (yaml.YAMLError, ValueError, RecursionError) as reason:
        raise error(f"{path}: {yaml_complaint(reason)}") from None
    if node is None:
        raise error(f"{path}: expected a YAML mapping, got an empty file.")
    return Entry(value, node, "", str(path), error)


def yaml_complaint(error: Exception) -> str:
    """What a YAML parser raised as one sentence with its line."""
    mark = getattr(error, "problem_mark", None)
    problem = " ".join(str(getattr(error, "problem", None) or error).split())
    return f"expected YAML, got: {problem}{f' in line {mark.line + 1}' if mark else ''}."


def _shown(value: object) -> str:
    text = repr(value) if not isinstance(value, (dict, list)) else f"a {type(value).__name__}: {value!r}"
    return text if len(text) <= 120 else text[:117] + "..."


def _plain(key: str) -> object:
    """The value a plain scalar key has in the constructed mapping (``8`` is the number 8)."""
    return yaml.safe_load(key)


def _reads_as_number(value: object) -> bool:
    try:
        float(cast(str, value))
    except (TypeError, ValueError):
        return False
    return True
