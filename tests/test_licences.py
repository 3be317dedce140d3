"""Licences of everything that is installed for autoplan; and that the report can fail."""

from __future__ import annotations

import importlib.util
import sys
from importlib.metadata import Distribution, PathDistribution
from pathlib import Path
from typing import Any

import pytest

TOOL = Path(__file__).parent.parent / "tools" / "licences.py"
spec = importlib.util.spec_from_file_location("licences", TOOL)
assert spec is not None and spec.loader is not None
licences: Any = importlib.util.module_from_spec(spec)
sys.modules["licences"] = licences
spec.loader.exec_module(licences)


@pytest.mark.parametrize("extra", [(), ("transformers", "triton", "exports", "dev")], ids=["planning", "all"])
def test_every_dependency_is_allowed(extra: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """Direct and transitive, of planning alone and of all extras."""
    code = licences.main([word for name in extra for word in ("--extra", name)])
    out = capsys.readouterr().out
    assert code == 0, out
    assert "ortools" in out and "torch" in out and "sympy" in out
    assert ("transformers" in out) == bool(extra)


def made(folder: Path, *lines: str) -> Distribution:
    """A package that states its licence in these lines."""
    path = folder / "some-1.0.dist-info"
    path.mkdir()
    (path / "METADATA").write_text("\n".join(["Metadata-Version: 2.4", "Name: some", "Version: 1.0", *lines]))
    return PathDistribution(path)


CASES = {
    "License-Expression: MIT": True,
    "License-Expression: GPL-2.0-only OR MIT": True,
    "License-Expression: MIT AND GPL-2.0-only": False,
    "License-Expression: Apache-2.0 WITH LLVM-exception": True,
    "License-Expression: AGPL-3.0-or-later": False,
    "License-Expression: LicenseRef-Unheard-Of": False,
    "License: Apache 2.0 License": True,
    "License: MPL-2.0 AND MIT": True,
    "License: GNU GPL v3": False,
    "License: ask us": False,
    "Classifier: License :: OSI Approved :: MIT License": True,
    "Classifier: License :: OSI Approved :: GNU General Public License v3 (GPLv3)": False,
    "Classifier: License :: OSI Approved :: GNU Affero General Public License v3": False,
    "Summary: states none": False,
}


@pytest.mark.parametrize("line", CASES)
def test_what_is_not_known_is_refused(line: str, tmp_path: Path) -> None:
    """A report that passes whatever it meets would be no report."""
    assert licences.licence_of(made(tmp_path, line)).allowed == CASES[line]


def test_a_refused_dependency_fails_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One copyleft package among the good ones is named, and the exit code is 1."""
    good, bad = (tmp_path / "good", tmp_path / "bad")
    packages: dict[str, Distribution] = {}
    for folder, line in ((good, "License: MIT"), (bad, "License: GPLv3")):
        folder.mkdir()
        packages[folder.name] = made(folder, line)
    monkeypatch.setattr(licences, "dependencies", lambda *_: list(packages))
    monkeypatch.setattr(licences.metadata, "distribution", packages.__getitem__)
    assert licences.main([]) == 1
    assert "NOT ALLOWED" in capsys.readouterr().out
