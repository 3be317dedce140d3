"""A ``model.py``, ``config.json`` or module comes in; a :class:`Capture` of forward and loss goes out."""

from autoplan.capture.capturing import capture_model, capture_module
from autoplan.capture.program import BatchForm, Capture, ParameterInfo
from autoplan.capture.source import ModelSource, load_model_source, loss_of

__all__ = [
    "BatchForm",
    "Capture",
    "ModelSource",
    "ParameterInfo",
    "capture_model",
    "capture_module",
    "load_model_source",
    "loss_of",
]
