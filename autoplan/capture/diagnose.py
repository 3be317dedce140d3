"""What the exporter raised comes in; a :class:`CaptureError` that says what to type next goes out."""

from __future__ import annotations

from torch import fx, nn

from autoplan.capture import advice
from autoplan.errors import CaptureError


def capture_error(error: Exception, source: str, model: nn.Module) -> CaptureError:
    return CaptureError(f"{advice.user_frame(error, source)}: {advice.one_line(error)}")


def refuse_data_dependent(graph: fx.Graph, source: str) -> None:
    return None
