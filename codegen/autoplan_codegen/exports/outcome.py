"""What an exporter answers: files, settings with what they change, and what the target cannot express."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Files = Mapping[str, str]


@dataclass(frozen=True)
class Setting:
    """One setting of the target, and whether it changes execution only or convergence too."""

    name: str
    value: str
    changes: Literal["execution", "convergence"] = "execution"


@dataclass(frozen=True)
class Lost:
    """A field of the plan that the target cannot express, what was planned and what stands in for it."""

    field: str
    planned: str
    instead: str


@dataclass(frozen=True)
class Outcome:
    """``runs_as`` are pins that differ from the plan's own (None: none); ``region_pins`` those of single
    regions."""

    files: Files
    settings: tuple[Setting, ...]
    lost: tuple[Lost, ...] = ()
    runs_as: Mapping[str, object] = field(default_factory=dict[str, object])
    region_pins: tuple[str, ...] = ()
