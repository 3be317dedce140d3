"""Pieces that the report's charts share: numbers in, SVG and HTML markup out.

Colours are classes (``cause-tp``): the style sheet alone decides them on screen, in the dark and on paper.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from autoplan.report.markup import Child, Markup, join, tag
from autoplan.units import bytes_text, seconds_text

# What a second of the step goes to: words for people, in the order of legends and tables.
CAUSES: Mapping[str, str] = {
    "forward": "forward",
    "backward": "backward",
    "weight": "weight gradients",
    "backward_input": "backward of the inputs",
    "backward_weight": "weight gradients",
    "recompute": "recompute",
    "tp": "tensor-parallel communication",
    "cp": "context-parallel communication",
    "ep": "expert-parallel communication",
    "zero": "ZeRO traffic that shows",
    "weight_gather": "new weights gathered",
    "gradient_sync": "gradient sync",
    "tied_sync": "shared parameters' gradients",
    "optimizer": "optimizer",
    "bubble": "waiting (bubble)",
}


def words(name: str) -> str:
    """A cause, an axis or an entry of a breakdown as a person says it."""
    return CAUSES.get(name, name.replace("_", " "))


def ticks(most: float, about: int = 7) -> list[float]:
    """Round numbers from 0 to at most ``most``, about so many."""
    if most <= 0:
        return [0.0]
    rough = most / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.75)
    return [step * i for i in range(math.floor(most / step * (1 + 1e-9)) + 1)]


def byte_ticks(most: float, about: int = 4) -> list[float]:
    """Powers and small multiples of two, so that labels are round in GiB."""
    if most <= 0:
        return [0.0]
    step = 2.0 ** math.ceil(math.log2(most / about))
    return [step * i for i in range(math.floor(most / step * (1 + 1e-9)) + 1)]


def time_axis(step_s: float, left: float, width: float, y: float) -> Markup:
    """Ticks below a chart whose x runs from 0 to ``step_s``."""
    marks: list[Markup] = []
    for value in ticks(step_s):
        x = left + width * value / step_s
        marks.append(tag("line", x1=x, x2=x, y1=y, y2=y + 5))
        label = seconds_text(value)
        marks.append(tag("text", label, x=x, y=y + 17, text_anchor="middle"))
    line = tag("line", x1=left, x2=left + width, y1=y, y2=y)
    return tag("g", line, marks, class_="axis")


def rect_path(boxes: Iterable[tuple[float, float]], y: float, height: float) -> str:
    """One path of boxes (x, width) on one line."""
    back = f"v{_short(height)}h"
    return "".join(f"M{_short(x)} {_short(y)}h{_short(w)}{back}-{_short(w)}z" for x, w in boxes)


def _short(value: float) -> str:
    """At most three decimals, no trailing zeros."""
    text = f"{value:.3f}".rstrip("0").rstrip(".")
    return text or "0"


def bar(share: float, label: str, class_: str = "") -> Markup:
    """A bar of ``share`` of its cell, for tables; the number stands beside it as text."""
    filled = f"width:{min(max(share, 0.0), 1.0):.2%}"
    return tag("span", tag("span", class_=f"fill {class_}".strip(), style=filled), class_="bar", title=label)


def legend(causes: Iterable[str]) -> Markup:
    """Colour chips with words."""
    chips = {cause: tag("span", class_=f"chip cause-{cause}", aria_hidden="true") for cause in causes}
    return tag("ul", (tag("li", chip, words(cause)) for cause, chip in chips.items()), class_="legend")


def table(
    caption: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[Child]],
    *,
    numbers_from: int = 1,
    total: Sequence[Child] | None = None,
) -> Markup:
    """A data table: the first cell of a row is its header, cells from ``numbers_from`` on are numbers."""
    head = tag("tr", (_head(title, _number(i, numbers_from)) for i, title in enumerate(heads)))
    body = (_row(row, numbers_from) for row in rows)
    foot = tag("tfoot", _row(total, numbers_from)) if total else None
    inside = (tag("caption", caption), tag("thead", head), tag("tbody", body), foot)
    scroll = {"class_": "scroll", "tabindex": "0", "role": "region", "aria_label": caption}
    return tag("div", tag("table", inside), **scroll)


def _head(title: str, class_: str | None) -> Markup:
    """A column of bars has no title of its own."""
    return tag("th", title, scope="col", class_=class_) if title else tag("td", class_=class_)


def _row(cells: Sequence[Child], numbers_from: int) -> Markup:
    first, *rest = cells
    others = (tag("td", cell, class_=_number(i, numbers_from)) for i, cell in enumerate(rest, 1))
    return tag("tr", tag("th", first, scope="row"), others)


def _number(index: int, numbers_from: int) -> str | None:
    return "n" if index >= numbers_from else None


def section(name: str, title: str, *children: Child) -> Markup:
    """A section that the page's list of contents can link to."""
    heading = tag("h2", title, id=f"{name}-title")
    return tag("section", heading, children, id=name, aria_labelledby=f"{name}-title")


def picture(
    name: str, title: str, text: str, width: float, height: float, *drawn: Child, links: bool = False
) -> Markup:
    """An SVG with its name and its description for those who do not see it; ``links``: it holds some.

    A narrow one is not blown up to the width of the page.
    """
    inside = (tag("title", title, id=f"{name}-name"), tag("desc", text, id=f"{name}-text"), drawn)
    drawing = tag(
        "svg", inside, viewBox=f"0 0 {width:g} {height:g}", role="group" if links else "img", class_="chart",
        aria_labelledby=f"{name}-name", aria_describedby=f"{name}-text", id=f"{name}-picture",
        style=f"max-width: {1.15 * width:.0f}px",
    )  # fmt: skip
    return tag("div", drawing, class_="frame")


def seconds(value: float, mark: str = "") -> str:
    """A predicted time; ``0`` where there is none."""
    return f"{mark}{seconds_text(value)}" if value else "0"


def amount(value: float) -> str:
    """Bytes; a dash where there are none."""
    return bytes_text(value) if value else "-"


def paragraphs(*texts: str) -> Markup:
    """Each text as a paragraph."""
    return join([tag("p", text) for text in texts if text])
