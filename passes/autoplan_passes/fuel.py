"""How many rewrites the sharding pass may still make: ``AUTOPLAN_FUEL=n`` in, one answer a rewrite out.

The rewrites of a program have one order: regions as the stages run them, axes in theirs, ops in the graph's.
After the n-th, ops stay as in the unsplit graph: every rank runs them whole, slower and just as right. So a
wrong result is led back to the first rewrite that makes it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace

from torch import fx

from autoplan.errors import BadInputError
from autoplan.plan import AxisLayout
from autoplan_passes.calls import op_name

VARIABLE = "AUTOPLAN_FUEL"


@dataclass(frozen=True)
class Rewrite:
    """One op that is cut, or on ``ep`` all that goes to experts: its region, the axis and its rule."""

    region: str
    axis: str
    op: str
    rule: str

    def __str__(self) -> str:
        return f"{self.op} in {self.region} on {self.axis}: {self.rule}"


@dataclass
class Fuel:
    """``amount`` rewrites (None: as many as there are); ``asked`` lists them all, made or not."""

    amount: int | None = None
    asked: list[Rewrite] = field(default_factory=list[Rewrite])

    def burn(self, rewrite: Rewrite) -> bool:
        """Whether this rewrite may be made."""
        self.asked.append(rewrite)
        return self.amount is None or len(self.asked) <= self.amount

    @property
    def made(self) -> list[Rewrite]:
        return self.asked if self.amount is None else self.asked[: self.amount]

    def __str__(self) -> str:
        last = f", the last is {self.made[-1]}" if self.made else ""
        return f"{len(self.made)} of {len(self.asked)} rewrites{last}"


def fuel_from_environment() -> Fuel:
    """The fuel that ``AUTOPLAN_FUEL`` gives. Raises BadInputError where it is no whole number."""
    text = os.environ.get(VARIABLE, "")
    if text and not text.isdigit():
        raise BadInputError(f"{VARIABLE}={text}: expected how many rewrites to make, such as {VARIABLE}=12.")
    return Fuel(int(text) if text else None)


def limited(layout: AxisLayout, graph: fx.Graph, region: str, axis: str, fuel: Fuel) -> AxisLayout:
    """The layout with as many of its rules as there is fuel for; ops without a rule run whole.

    Parameters stay stored as they are, and are gathered for an op that wants them whole. Two things stay
    together: a list and what is taken of it, and all that goes to the experts.
    """
    rules = {n: layout.rules[n.name] for n in graph.nodes if n.name in layout.rules}
    cut = {node: rule for node, rule in rules.items() if not _is_whole(rule)}
    if axis == "ep":
        names = " ".join(node.name for node in cut)
        made = not cut or fuel.burn(Rewrite(region, axis, names, f"{len(cut)} ops to their experts"))
        return layout if made else AxisLayout(layout.size, inputs=layout.inputs, outputs=layout.outputs)
    allowed: dict[str, str] = {}
    for node, rule in cut.items():
        with_list = op_name(node) == "getitem"
        source = node.all_input_nodes[0].name
        made = source in allowed if with_list else fuel.burn(Rewrite(region, axis, node.name, rule))
        allowed |= {node.name: rule} if made else {}
    return layout if len(allowed) == len(cut) else replace(layout, rules=allowed)


def _is_whole(rule: str) -> bool:
    """``R,R->R``, by the op itself."""
    return set(rule.replace("->", ",").split(",")) <= {"R", ""}
