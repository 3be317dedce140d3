"""HTML and SVG as text that is well-formed by construction: names, attributes and children in, markup out.

Everything is escaped once, where it becomes markup; what comes out is HTML5 and XML at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape


class Markup(str):
    """Text that is markup already; anything else is escaped when it becomes a child."""

    __slots__ = ()


Child = str | float | None | Iterable["Child"]
Attribute = str | float | bool | None
EMPTY = Markup("")
_VOID = frozenset({"br", "hr", "img", "input", "link", "meta", "col"})


def tag(name: str, /, *children: Child, **attributes: Attribute) -> Markup:
    """One element: ``tag("a", "b < c", href="#x", class_="y") -> <a href="#x" class="y">b &lt; c</a>``.

    In attribute names a trailing ``_`` is dropped and others become ``-`` (``aria_label``); None and False
    leave an attribute out. Numbers are written with at most two decimals.
    """
    head = name + "".join(_attribute(key, value) for key, value in attributes.items())
    inside = join(children)
    if name in _VOID:
        return Markup(f"<{head}/>")
    return Markup(f"<{head}>{inside}</{name}>")


def join(children: Child) -> Markup:
    """Children one after the other."""
    if children is None:
        return EMPTY
    if isinstance(children, Markup):
        return children
    if isinstance(children, str):
        return Markup(escape(children, quote=False))
    if isinstance(children, (int, float)):
        return Markup(number(children))
    return Markup("".join(join(child) for child in children))


def raw(name: str, text: str, /, **attributes: Attribute) -> Markup:
    """An element whose text a browser does not parse as markup: ``script`` and ``style``.

    A closing tag inside the text would end it early, so ``</`` is refused.
    """
    if "</" in text:
        raise ValueError(f"a {name} that closes itself")
    head = name + "".join(_attribute(key, value) for key, value in attributes.items())
    return Markup(f"<{head}>{text}</{name}>")


def number(value: float) -> str:
    """``12.0 -> "12"``, ``0.12345 -> "0.12"``."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def _attribute(key: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    text = "" if value is True else value if isinstance(value, str) else number(value)
    return f' {key.rstrip("_").replace("_", "-")}="{escape(text, quote=True)}"'
