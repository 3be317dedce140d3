"""A Python file as text that is edited where its syntax tree says, everything else kept as it is.

Comes in: the source. Goes out: the source with statements replaced, removed and inserted; positions are
bytes of UTF-8, as :mod:`ast` counts columns.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

_STEP = "    "


@dataclass(frozen=True, order=True)
class Edit:
    """Replace the bytes ``start:end`` by ``text``; ``order`` decides between insertions at one place."""

    start: int
    end: int
    order: int
    text: str = field(compare=False)


class ScriptText:
    """The source of one script and the edits made to it so far."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.newline = "\r\n" if "\r\n" in source else "\n"
        self._bytes = source.encode()
        self._lines = [0, *(match.end() for match in re.finditer(rb"\n", self._bytes))]
        self._edits: list[Edit] = []

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Start and end of a node that has a position."""
        assert isinstance(node, ast.expr | ast.stmt) and node.end_lineno and node.end_col_offset is not None
        start = self._lines[node.lineno - 1] + node.col_offset
        return start, self._lines[node.end_lineno - 1] + node.end_col_offset

    def of(self, node: ast.AST, replacements: Sequence[tuple[ast.AST, str]] = ()) -> str:
        """The node as written, with some nodes inside it written otherwise."""
        start, end = self.span(node)
        inner = sorted((*self.span(one), text) for one, text in replacements)
        pieces: list[bytes] = []
        at = start
        for one_start, one_end, text in inner:
            pieces += [self._bytes[at:one_start], text.encode()]
            at = one_end
        return b"".join([*pieces, self._bytes[at:end]]).decode()

    def indent(self, statement: ast.stmt) -> str:
        """The white space the statement's line starts with."""
        line = self._bytes[self._lines[statement.lineno - 1] :]
        return line[: len(line) - len(line.lstrip(b" \t"))].decode()

    def starts_its_line(self, statement: ast.stmt) -> bool:
        start, _ = self.span(statement)
        return not self._bytes[self._lines[statement.lineno - 1] : start].strip()

    def replace(self, node: ast.AST, text: str) -> None:
        start, end = self.span(node)
        self._edits.append(Edit(start, end, 0, text))

    def insert_lines_before(self, statement: ast.stmt, lines: Sequence[str]) -> None:
        """Whole lines above the statement (and above its decorators), at its indentation."""
        decorators = [d.lineno for d in getattr(statement, "decorator_list", [])]
        at = self._lines[min([statement.lineno, *decorators]) - 1]
        self._insert(at, lines, self.indent(statement))

    def insert_lines_after(self, statement: ast.stmt, lines: Sequence[str]) -> None:
        """Whole lines below the statement's last line, at its indentation."""
        end_line = statement.end_lineno or statement.lineno
        at = self._lines[end_line] if end_line < len(self._lines) else len(self._bytes)
        if at == len(self._bytes) and not self._bytes.endswith(b"\n"):
            self._edits.append(Edit(at, at, len(self._edits), self.newline))
        self._insert(at, lines, self.indent(statement))

    def _insert(self, at: int, lines: Sequence[str], indent: str) -> None:
        text = "".join(f"{indent}{line}".rstrip() + self.newline for line in lines)
        self._edits.append(Edit(at, at, len(self._edits), text))

    def remove(self, statement: ast.stmt) -> None:
        """Take the statement out: its lines, or its piece of a line shared with others; comments stay."""
        start, end = self.span(statement)
        line_start = self._lines[statement.lineno - 1]
        newline = self._bytes.find(b"\n", end)
        line_end = len(self._bytes) if newline < 0 else newline + 1
        rest = self._bytes[end:line_end]
        alone = self.starts_its_line(statement)
        if alone and not rest.strip():
            self._edits.append(Edit(line_start, line_end, 0, ""))
        elif after := re.match(rb"\s*;[ \t]*(?=\S)", rest):
            self._edits.append(Edit(start, end + after.end(), 0, ""))
        elif before := re.search(rb";[ \t]*$", self._bytes[line_start:start]):
            self._edits.append(Edit(line_start + before.start(), end, 0, ""))
        elif alone:  # a comment follows
            self._edits.append(Edit(start, end + len(rest) - len(rest.lstrip(b" \t")), 0, ""))
        else:
            self._edits.append(Edit(start, end, 0, "pass"))

    def guard(self, statement: ast.stmt, condition: str) -> None:
        """Put the statement under ``if condition:``, one step further in."""
        indent = self.indent(statement)
        self._insert(self._lines[statement.lineno - 1], [f"if {condition}:"], indent)
        end_line = statement.end_lineno or statement.lineno
        whole = any(
            isinstance(n, ast.Constant | ast.JoinedStr) and _spans_lines(n) for n in ast.walk(statement)
        )
        for line in range(statement.lineno, statement.lineno + 1 if whole else end_line + 1):
            at = self._lines[line - 1]
            if self._bytes[at : at + 1] not in (b"\n", b"\r"):
                self._edits.append(Edit(at, at, len(self._edits) + 1, _STEP))

    def edited(self) -> str:
        """The source with all edits made."""
        pieces: list[bytes] = []
        at = 0
        for edit in sorted(self._edits):
            pieces += [self._bytes[at : max(edit.start, at)], edit.text.encode()]
            at = max(edit.end, at)
        return b"".join([*pieces, self._bytes[at:]]).decode()


def _spans_lines(node: ast.expr) -> bool:
    return node.end_lineno is not None and node.end_lineno > node.lineno
