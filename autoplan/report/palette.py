"""Colours of stages and of recompute, shared by the terminal (rich style names) and the drawings (RGB)."""

from __future__ import annotations

from dataclasses import dataclass

STAGE_STYLES = ("blue", "magenta", "green", "yellow", "cyan", "red")
RECOMPUTE_STYLE = {"none": "dim", "selective": "yellow", "full": "red"}
RECOMPUTE_FILL = {"selective": "#FFE9A8", "full": "#FFC9B8"}


@dataclass(frozen=True)
class StageColours:
    """Three tones of one hue: the box round the stage, its regions, and lines and the memory bar."""

    box: str
    region: str
    line: str


_HUES = (
    StageColours("#F2F7FE", "#D3E4FB", "#2F6DB5"),
    StageColours("#FBF3FC", "#EFD7F2", "#8E44A3"),
    StageColours("#F1FAF2", "#CFEBD2", "#2E7D44"),
    StageColours("#FFF6EC", "#FFE0BF", "#B5651D"),
    StageColours("#EEFAFA", "#C9ECEC", "#1F7A80"),
    StageColours("#FDF2F4", "#F8D3DA", "#B23A55"),
)


def stage_colours(number: int) -> StageColours:
    """The tones of a stage; neighbours differ, and the order starts again after six."""
    return _HUES[number % len(_HUES)]
