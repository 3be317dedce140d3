"""A comparison of two plans for a person at a terminal: records in, one sentence and tables out."""

from __future__ import annotations

from typing import IO

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoplan.report.compare import Comparison, Cost
from autoplan.report.terminal import console_for
from autoplan.units import bytes_text, count_text, seconds_text

_NOTICED = 1e-3  # of the step: causes that move less are not named in the sentence
_OTHER_WORK = ("model", "global batch", "tokens per sample")  # steps of such plans do not do the same


def print_comparison(found: Comparison, before: str, after: str, file: IO[str]) -> None:
    """Print the sentence, what changed and what it costs, fitted to the terminal."""
    console = console_for(file)
    console.print(_report(found, before, after, console.width))


def sentence(found: Comparison, before: str, after: str) -> str:
    """``b.yaml is 6.1% slower than a.yaml: +1.2 s pipeline bubble, -400 ms recompute``."""
    step = next((cost for cost in found.costs if cost.what == "step"), None)
    if step is None:
        return "One of the plans carries no forecast, so what the changes cost is not known."
    if found.same:
        return f"{before} and {after} decide and predict the same."
    moved = sorted(found.causes, key=lambda cause: -abs(cause.after - cause.before))
    told = [
        f"{_signed(cause.after - cause.before)} {cause.what.replace('_', ' ')}"
        for cause in moved
        if abs(cause.after - cause.before) > _NOTICED * step.before
    ]
    why = f": {', '.join(told[:4])}" if told else ""
    faster = step.after < step.before
    share = abs(step.after / step.before - 1)
    other = [change.what for change in found.changes if change.what in _OTHER_WORK]
    if other:
        length = f"{share:.1%} {'shorter' if faster else 'longer'}"
        return f"A step of {after} is {length} than one of {before}, but of another {', '.join(other)}{why}."
    how = f"{share:.1%} {'faster' if faster else 'slower'} than" if share >= 0.0005 else "as fast as"
    return f"{after} is {how} {before}{why}."


def _report(found: Comparison, before: str, after: str, width: int) -> RenderableType:
    blocks: list[RenderableType] = [Text(sentence(found, before, after), style="bold"), Text()]
    if found.changes:
        table = _table("decided differently", before, after)
        for change in found.changes:
            table.add_row(change.what, change.before, change.after)
        blocks += [table, Text()]
    costs = [cost for cost in (*found.costs, *found.causes) if cost.before or cost.after]
    if costs:
        table = _table("predicted", before, after, "change")
        for cost in costs:
            numbers = (_shown(cost, *one) for one in zip((cost.before, cost.after), found.marks))
            table.add_row(cost.what.replace("_", " "), *numbers, _change(cost))
        blocks.append(table)
    return Group(*blocks)


def _table(title: str, *heads: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(title, overflow="fold")
    for head in heads:
        table.add_column(head, overflow="fold", justify="left" if title.startswith("decided") else "right")
    return table


def _change(cost: Cost) -> Text:
    """The difference, green where it is for the better, red where it is for the worse."""
    if cost.before == cost.after:
        return Text("-", style="dim")
    better = (cost.after > cost.before) == (cost.unit in ("tokens/s", "share"))
    share = f"{cost.relative:+.1%}" if cost.relative is not None else "new"
    return Text(share, style="green" if better else "red")


def _shown(cost: Cost, value: float, mark: str) -> str:
    if cost.unit == "bytes":
        return bytes_text(value)
    mark = mark if value else ""
    if cost.unit == "s":
        return f"{mark}{seconds_text(value)}"
    return f"{mark}{value:.1%}" if cost.unit == "share" else f"{mark}{count_text(value)}/s"


def _signed(duration_s: float) -> str:
    return f"{'+' if duration_s > 0 else '-'}{seconds_text(abs(duration_s))}"
