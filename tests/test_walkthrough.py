"""The lecture: four layouts on one small model, and what it teaches must be what the numbers show."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module")
def walkthrough() -> ModuleType:
    spec = importlib.util.spec_from_file_location("walkthrough", EXAMPLES / "walkthrough.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.MODEL = EXAMPLES / "gpt.py"
    module.DEVICES = 4
    module.LECTURE = {
        name: (tuple(pin.replace("=8", "=4") for pin in pins), text)
        for name, (pins, text) in module.LECTURE.items()
    }
    return module


def test_what_is_taught_is_what_is_computed(
    walkthrough: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    quotes = walkthrough.lecture("h100")
    data, sharded, tensor, pipeline = quotes.values()
    assert sharded.memory_peak_bytes < data.memory_peak_bytes, "sharding saves memory"
    assert data.breakdown_s["zero_gather"] == 0 < sharded.breakdown_s["zero_gather"]
    assert data.breakdown_s["tp_communication"] == 0 < tensor.breakdown_s["tp_communication"]
    assert data.breakdown_s["pipeline_bubble"] == 0 < pipeline.breakdown_s["pipeline_bubble"]
    assert tensor.breakdown_s["gradient_sync"] == 0 < data.breakdown_s["gradient_sync"]
    for number, (name, quote) in enumerate(quotes.items(), 1):
        walkthrough.say(number, name, quote)
    told = capsys.readouterr().out
    assert "waiting for other stages" in told and "DOES NOT FIT" not in told
