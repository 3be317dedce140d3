"""The whole plan as one HTML page: a :class:`Plan` in, a self-contained text out that needs no network.

Every picture is SVG drawn here and has a table with the same numbers; the script adds zooming and reading a
block under the pointer, by D3 (ISC licence, ``assets/d3.LICENSE``), which travels inside the page.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from torch import fx

from autoplan.errors import AutoplanError
from autoplan.hardware import HardwareProfile, load_profile
from autoplan.output_files import write_file
from autoplan.plan import Plan
from autoplan.plan_table import estimate_mark, heading
from autoplan.report.markup import Markup, raw, tag
from autoplan.report.page.breakdown import breakdown_section
from autoplan.report.page.cluster import cluster_section
from autoplan.report.page.graph import graph_section
from autoplan.report.page.memory import memory_section
from autoplan.report.page.operations import operations_section
from autoplan.report.page.runners import runners_section
from autoplan.report.page.summary import certificate_section, footer, header, inputs_section
from autoplan.report.page.timeline import timeline_section
from autoplan.report.timeline import timeline

NO_GRAPHS: Mapping[str, fx.GraphModule] = MappingProxyType({})
_ASSETS = Path(__file__).parent / "assets"
_CONTENTS = (
    ("time", "Where the time goes"),
    ("timeline", "Pipeline timeline"),
    ("memory", "Memory"),
    ("graph", "Model and stages"),
    ("operations", "Operations"),
    ("cluster", "Cluster and traffic"),
    ("runners", "Runners-up"),
    ("certificate", "Certificate"),
    ("inputs", "Assumptions and estimates"),
)


def write_html(plan: Plan, path: str | Path, graphs: Mapping[str, fx.GraphModule] = NO_GRAPHS) -> None:
    """Write the report to ``path``; BadInputError where that cannot be done."""
    write_file(path, report_html(plan, graphs))


def report_html(plan: Plan, graphs: Mapping[str, fx.GraphModule] = NO_GRAPHS) -> str:
    """The page's text; the same for equal plans and profiles.

    ``graphs``, what one rank runs by layout name, adds the operations inside each region.
    """
    mark, profile = estimate_mark(plan), plans_profile(plan)
    lines = [line for part in plan.parts if (line := timeline(plan, part)) is not None]
    sections = (
        breakdown_section(plan, mark),
        timeline_section(plan, lines, mark),
        memory_section(plan, lines),
        graph_section(plan, mark),
        operations_section(plan, graphs),
        cluster_section(plan, profile),
        runners_section(plan, mark),
        certificate_section(plan),
        inputs_section(plan, profile),
    )
    body = tag(
        "body",
        tag("a", "Skip to the report", href="#main", class_="skip"),
        header(plan),
        _contents(),
        tag("main", sections, id="main", tabindex="-1"),
        footer(plan),
        raw("script", _asset("d3.min.js")),
        raw("script", _asset("report.js")),
    )
    return f"<!DOCTYPE html>\n{tag('html', _head(plan), body, lang='en')}\n"


def plans_profile(plan: Plan) -> HardwareProfile | None:
    """The profile that the plan was made for, if it is here as it was then."""
    try:
        profile = load_profile(plan.hardware)
    except AutoplanError:
        return None
    return profile if profile.fingerprint == plan.hardware_fingerprint else None


def _head(plan: Plan) -> Markup:
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"autoplan: {heading(plan)}"),
        raw("style", _asset("report.css")),
    )


def _contents() -> Markup:
    entries = [tag("li", tag("a", title, href=f"#{name}")) for name, title in _CONTENTS]
    return tag("nav", tag("ul", entries), aria_label="Contents")


@functools.cache
def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")
