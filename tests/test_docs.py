"""The documentation: what its commands print is what they print now, its rules are proved, its site builds.

``pytest tests/test_docs.py --update-golden`` writes the outputs into the pages.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from console import run_page, written
from rule_cases import Case, aten, r
from test_rules import check_case

from autoplan.errors import BadPlanError
from autoplan_passes import rules
from autoplan_passes.dims import NONLINEAR
from autoplan_passes.patterns import letters
from autoplan_passes.rows import Row

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


@pytest.fixture
def typed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
):
    """Run a page's commands in a folder with the tutorial's files; what it printed must be in the page."""
    for path in (DOCS / "tutorial").glob("*.py"):
        shutil.copy(path, tmp_path)
    shutil.copytree(ROOT / "hw_profiles", tmp_path / "hw_profiles")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, value in (("OMP_NUM_THREADS", "1"), ("COLUMNS", "96")):
        monkeypatch.setenv(name, value)

    def run(name: str, page: str | None = None) -> str:
        path = DOCS / name
        return run_page(page if page is not None else path.read_text(encoding="utf-8"), capfd)

    def compare(name: str, page: str) -> None:
        differ = written(DOCS / name, page, request.config.getoption("--update-golden"))
        assert not differ, f"docs/{name} shows what is no longer printed: {differ[:5]}"

    run.compare = compare  # type: ignore[attr-defined]  two steps of one thing
    return run


@pytest.mark.parametrize("name", ["tutorial.md", "adding-a-chip.md"])
def test_pages_show_what_their_commands_print(name: str, typed) -> None:
    """The tutorial once ended before anything was trained."""
    typed.compare(name, typed(name))


def test_the_worked_rule_is_the_tables_and_bought_what_the_page_says(
    typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page's first half is run without the rule, its second half with it."""
    page = (DOCS / "adding-an-op.md").read_text(encoding="utf-8")
    line, case = re.findall(r"^```python\n(.*?\n)```", page, re.DOTALL | re.MULTILINE)[1:3]
    assert line in (ROOT / "passes/autoplan_passes/table_pointwise.py").read_text().replace("    ", "")
    assert case in (ROOT / "tests/rule_cases.py").read_text().replace("    ", "")
    before, mark, after = page.partition("## What it bought")
    with monkeypatch.context() as without:
        without.delitem(rules.ROWS, "aten.prelu")
        run_before = typed("adding-an-op.md", before)
    typed.compare("adding-an-op.md", run_before + mark + typed("adding-an-op.md", after))


def test_the_wrong_line_of_the_page_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proof that anything passes."""
    case = Case(aten.prelu.default, (r(2, 4, 6) - 0.5, r(4)))
    assert check_case(case)
    monkeypatch.setitem(rules.ROWS, "aten.prelu", Row(letters("b c ..., d -> b c ...", NONLINEAR)))
    with pytest.raises(BadPlanError, match="does not fit its local tensors"):
        check_case(case)


def test_every_page_is_in_the_contents_and_says_where_its_files_are() -> None:
    """A page that no menu leads to; a path that moved."""
    contents = re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(contents) == sorted(path.name for path in DOCS.glob("*.md"))
    for path in DOCS.glob("*.md"):
        assert "--8 <" not in path.read_text(), "a formatter took the mark of a snippet for arithmetic"
        names = re.findall(
            r"`((?:tests|autoplan|passes|codegen|cost_models|hw_profiles|examples)/[\w/]+\.\w+)`",
            path.read_text(),
        )
        assert all((ROOT / name).exists() for name in names), (path, names)


def test_the_site_builds_and_asks_the_network_for_nothing(tmp_path: Path) -> None:
    """A broken link, a formula that is no MathML, a font from elsewhere."""
    pytest.importorskip("material")
    pytest.importorskip("latex2mathml")
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(site)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for page in site.glob("*.html"):
        text = page.read_text()
        fetched = re.findall(r"<(?:script|img|iframe)[^>]+src=\"?(\S+?)[\" >]", text)
        fetched += re.findall(r"<link[^>]+rel=\"?(?:stylesheet|preload|icon)[^>]+href=\"?(\S+?)[\" >]", text)
        assert not [one for one in fetched if "//" in one], page
    decides = (site / "how-it-decides.html").read_text()
    assert decides.count("<math") >= 8 and "$$" not in decides
    assert "autoplan search" in (site / "commands.html").read_text()
