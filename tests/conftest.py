"""Options shared by the tests: ``--update-golden`` rewrites the golden files instead of comparing."""

from __future__ import annotations

from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite tests/golden/ from what is made now"
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest):
    """Compare a text with ``tests/golden/NAME``."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"{path} is missing: run the test once with --update-golden"
        assert text == path.read_text(), f"{name} changed: look at it, then run with --update-golden"

    return compare
