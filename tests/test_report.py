"""The HTML report and what it is drawn from: times, bytes, links are the plan's own; the page is whole."""

from __future__ import annotations

import dataclasses
import html
import itertools
import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import pytest
from plan_fixture import llama_plan

from autoplan.cli import main
from autoplan.errors import BadInputError
from autoplan.hardware import load_profile
from autoplan.plan import Mesh, Plan, RegionPlan
from autoplan.planner.driver import search_plan
from autoplan.report.cluster import axis_spans, coordinates, node_groups, traffic
from autoplan.report.html import plans_profile, report_html
from autoplan.report.markup import Markup, raw, tag
from autoplan.report.memory_curve import memory_curve
from autoplan.report.mermaid import plan_mermaid
from autoplan.report.operations import operation_rows, operations_dot
from autoplan.report.page.timeline import pieces
from autoplan.report.timeline import Timeline, timeline
from autoplan.report.waterfall import waterfall
from autoplan.runtime.layout_graphs import layout_graphs
from autoplan.units import bytes_text, seconds_text

GPT = Path(__file__).parent.parent / "examples" / "gpt.py"
HAND_MADE = llama_plan()
PINS = (
    ("pp=4", "schedule=1f1b"),
    ("pp=2", "tp=2", "recompute=full", "schedule=1f1b"),
    ("pp=1", "zero=3"),
    ("pp=2", "schedule=zb_h1", "vpp=2", "zero=1"),
    ("pp=2", "schedule=interleaved_1f1b", "vpp=3"),
)


@pytest.fixture(scope="module", params=PINS, ids=lambda pins: ",".join(pins))
def planned(request: pytest.FixtureRequest) -> Plan:
    """A really priced plan of a small GPT on four devices."""
    return search_plan(GPT, hw="cpu", devices=4, global_batch=16, pins=request.param)


def lines_of(plan: Plan) -> Timeline:
    found = timeline(plan, plan.parts[0])
    assert found is not None
    return found


def parsed(text: str) -> ElementTree.Element:
    """The page as XML, what scripts and styles hold left out; fails where it is not well-formed."""
    bare = re.sub(r"(<(script|style)[^>]*>).*?(</\2>)", r"\1\3", text, flags=re.DOTALL)
    return ElementTree.fromstring(bare.removeprefix("<!DOCTYPE html>"))


def words_of(root: ElementTree.Element) -> str:
    return " ".join(" ".join(root.itertext()).split())


# ---- what is drawn ----------------------------------------------------------------------------------


def test_the_timeline_ends_with_the_forecast(planned: Plan) -> None:
    """A drawing that ended before the step it was drawn of."""
    line, told = lines_of(planned), planned.prediction
    assert told is not None
    ends = [track.once[-1].end_s if track.once else track.events[-1].end_s for track in line.tracks]
    assert max(ends) == pytest.approx(told.step_time_s)
    for track in line.tracks:
        assert sum(line.spent_s(track).values()) == pytest.approx(told.step_time_s)
        assert line.bubble_s(track) >= -1e-12
        drawn = list(pieces(track, line))
        for (_, _, end_s), (_, start_s, _) in itertools.pairwise(drawn):
            assert start_s >= end_s - 1e-9
    part = planned.parts[0]
    first = [e.microbatch for e in line.tracks[0].events if e.kind == "forward" and e.stage == 0]
    assert first == list(range(part.microbatches))


def test_what_happens_once_a_step_is_drawn_and_travels(planned: Plan) -> None:
    """Gathered weights and the sum of a tied table were waiting time in the picture, and no traffic."""
    line, (part,), told = lines_of(planned), planned.parts, planned.prediction
    assert told is not None
    gathered = [one for track in line.tracks for one in track.once if one.kind == "weight_gather"]
    if part.zero in (1, 2):
        assert gathered[0].end_s - gathered[0].start_s == pytest.approx(told.breakdown_s["zero_gather"])
    else:
        assert not gathered
    tied = [{one.kind for one in track.once} >= {"tied_sync"} for track in line.tracks]
    homes = {0, part.mesh.pp - 1} if part.mesh.pp > 1 else set[int]()
    assert {rank for rank, found in enumerate(tied) if found} == homes
    axes = [one.axis for one in traffic(part, load_profile("cpu"))]
    assert ("tied" in axes) == (part.mesh.pp > 1)


def test_memory_over_the_step_reaches_the_predicted_peak(planned: Plan) -> None:
    """A curve whose top was not the peak that the plan was accepted for."""
    line = lines_of(planned)
    for track in line.tracks:
        curve = memory_curve(line, track)
        assert curve.highest_bytes == pytest.approx(curve.peak_bytes)
        assert min(amount for _, amount in curve.points) >= curve.always_bytes * (1 - 1e-9)
        assert curve.points[-1][1] == pytest.approx(curve.always_bytes)
        times = [time_s for time_s, _ in curve.points]
        assert all(after >= one - 1e-9 for one, after in itertools.pairwise(times))


def test_the_waterfall_falls_from_the_ideal_to_the_step(planned: Plan) -> None:
    """Seconds counted twice, or not at all."""
    falls, told = waterfall(planned), planned.prediction
    assert told is not None
    assert falls[0].seconds == pytest.approx(told.mfu * told.step_time_s)
    for one, after in itertools.pairwise(falls):
        assert after.from_s == pytest.approx(one.from_s + one.seconds)
    assert falls[-1].from_s + falls[-1].seconds == pytest.approx(told.step_time_s)


LINKS = [  # mesh, chip -> where each axis's bytes go
    (Mesh(pp=2, dp=4, tp=8), "h100", {"tp": {"node"}, "dp": {"network"}, "pp": {"network"}}),
    (Mesh(pp=2, dp=4, tp=4), "kunlun", {"tp": {"fast domain"}, "dp": {"node", "network"}, "pp": {"network"}}),
    (Mesh(pp=2, dp=4, tp=8), "kunlun", {"tp": {"node"}, "dp": {"network"}, "pp": {"network"}}),
    (Mesh(pp=2, dp=4, tp=1), "h100", {"dp": {"node"}, "pp": {"node"}}),
]


@pytest.mark.parametrize(("mesh", "chip", "expected"), LINKS)
def test_bytes_go_over_the_links_that_an_axis_spans(
    mesh: Mesh, chip: str, expected: dict[str, set[str]]
) -> None:
    """Tensor parallelism drawn on the network, or pipeline hops inside a node."""
    part = dataclasses.replace(llama_plan(tp=mesh.tp, dp=mesh.dp, stages=mesh.pp).parts[0], mesh=mesh)
    found = {one.axis: one for one in traffic(part, load_profile(chip)) if one.axis in expected}
    assert {axis: set(one.by_tier) for axis, one in found.items()} == expected
    for one in found.values():
        assert sum(one.by_tier.values()) == pytest.approx(one.sent_bytes)


def test_ranks_and_nodes_follow_the_mesh() -> None:
    """A device drawn in another group than it is in."""
    mesh = Mesh(pp=2, dp=4, cp=2, tp=2, ep=2)
    for axis, span in axis_spans(mesh).items():
        if axis in ("pp", "ep", "tied"):
            continue
        places = [coordinates(mesh, rank * span.stride) for rank in range(span.size)]
        moving = {name for place in places for name, at in place.items() if at != places[0][name]}
        assert moving == ({"dp", "cp"} if axis == "dp" else {axis})
    part = dataclasses.replace(llama_plan().parts[0], mesh=mesh)
    groups = node_groups(part, load_profile("h100"))
    assert [(group.first, group.count, set(group.stages)) for group in groups] == [(0, 2, {0}), (16, 2, {1})]


# ---- the page ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [HAND_MADE, llama_plan(stages=1, tp=1, dp=1), llama_plan(stages=8)])
def test_the_page_is_whole(plan: Plan) -> None:
    """A page that a browser has to repair, with links that lead nowhere, or that asks the network."""
    text = report_html(plan)
    root = parsed(text)
    ids = [element.get("id") for element in root.iter() if element.get("id")]
    assert len(ids) == len(set(ids))
    for element in root.iter():
        for name in ("href", "src", "aria-labelledby", "aria-describedby"):
            for target in (element.get(name) or "").split():
                assert target.removeprefix("#") in ids, (name, target)
        assert not {name for name in element.attrib if name.startswith("on")}
    own = re.sub(r"<script>// https://d3js.*?</script>", "", text, flags=re.DOTALL)
    assert not re.search(r"https?://|@import|url\((?!#)", own)
    assert root.get("lang") == "en" and len(list(root.iter("h1"))) == 1 and list(root.iter("main"))
    for chart in (element for element in root.iter("svg")):
        assert chart.find("title") is not None and chart.find("desc") is not None
    for table in root.iter("table"):
        assert table.find("caption") is not None
        assert all(cell.get("scope") for cell in table.iter("th"))


def test_the_page_tells_the_plans_own_numbers(planned: Plan) -> None:
    """A number in the report that is not the plan's."""
    told, part = planned.prediction, planned.parts[0]
    assert told is not None and planned.certificate is not None
    words = words_of(parsed(report_html(planned)))
    expected = [
        seconds_text(told.step_time_s), f"{told.mfu:.1%}", f"{planned.certificate.gap:.2%}", str(part.mesh),
        seconds_text(planned.certificate.bound_s), *planned.assumptions, *told.estimated_inputs,
        *(seconds_text(seconds) for seconds in told.breakdown_s.values() if seconds),
    ]  # fmt: skip
    for stage in part.stages:
        assert stage.prediction is not None
        expected += [seconds_text(stage.prediction.forward_s), bytes_text(stage.prediction.memory_peak_bytes)]
        for item in stage.prediction.memory_items:
            expected += [item.name, bytes_text(item.bytes)]
    for other in planned.runners_up:
        expected += [str(other.mesh), seconds_text(other.step_time_s), bytes_text(other.memory_peak_bytes)]
    for one in expected:
        assert " ".join(one.split()) in words, one


def test_tables_of_ranks_sum_to_the_step() -> None:
    """The text beside a picture said something else than the picture."""
    line = lines_of(HAND_MADE)
    root = parsed(report_html(HAND_MADE))
    (table,) = [
        t for t in root.iter("table") if (t.findtext("caption") or "").startswith("Seconds of one step")
    ]
    heads = ["".join(cell.itertext()) for cell in table.find("thead/tr") or ()]
    for row, track in zip(table.findall("tbody/tr"), line.tracks, strict=True):
        cells = dict(zip(heads, ("".join(cell.itertext()) for cell in row)))
        assert cells["devices"] == track.label
        assert cells["waiting (bubble)"] == f"~{seconds_text(line.bubble_s(track))}"
        assert cells["recompute"] == f"~{seconds_text(line.spent_s(track)['recompute'])}"


@pytest.mark.parametrize("name", ['a"b', "<b>", "a & b", "</script><script>", "модель", "x" * 300])
def test_any_name_can_stand_in_the_page(name: str) -> None:
    """A module's name read as markup."""
    part = HAND_MADE.parts[0]
    regions = (RegionPlan(name, "embed.tp8"), *part.stages[0].regions[1:])
    stages = (dataclasses.replace(part.stages[0], regions=regions), *part.stages[1:])
    plan = dataclasses.replace(HAND_MADE, parts=(dataclasses.replace(part, stages=stages),))
    root = parsed(report_html(plan))
    assert name in [cell.text for cell in root.iter("td")]
    assert len(list(root.iter("script"))) == 3  # the timeline's data, d3, ours


def test_a_plan_without_forecast_or_profile_is_still_a_page() -> None:
    """A crash on a plan made by hand, or for a chip whose profile is elsewhere."""
    part = HAND_MADE.parts[0]
    stages = tuple(dataclasses.replace(stage, prediction=None) for stage in part.stages)
    bare = dataclasses.replace(
        HAND_MADE, parts=(dataclasses.replace(part, stages=stages),), prediction=None, certificate=None,
        wall_s={}, runners_up=(), hardware="my-chip", assumptions=(),
    )  # fmt: skip
    words = words_of(parsed(report_html(bare)))
    assert "model.layers.0-7" in words and "profile my-chip" in words and "no certificate" in words
    assert plans_profile(HAND_MADE) is None  # the fixture's fingerprint is made up
    with pytest.raises(BadInputError, match="no forecast"):
        main_trace(bare)


def main_trace(plan: Plan) -> None:
    from autoplan.report.trace import plan_trace

    plan_trace(plan)


def large_plan() -> Plan:
    """126 blocks on 16,384 devices: 16 stages, 128 micro-batches."""
    plan = llama_plan(layers=126, stages=16, tp=8, dp=128)
    part = dataclasses.replace(plan.parts[0], microbatches=128)
    profile = load_profile("h100")
    return dataclasses.replace(
        plan, parts=(part,), hardware=profile.name, hardware_fingerprint=profile.fingerprint
    )


def test_a_large_plan_is_a_small_page() -> None:
    """A page of tens of megabytes, or one that draws 16,384 devices one by one."""
    text = report_html(large_plan())
    assert len(text) < 3_000_000
    root = parsed(text)
    assert len(list(root.iter())) < 12_000
    assert "x127 alike" in words_of(root) or "x128 alike" in words_of(root)
    assert report_html(large_plan()) == text


def test_operations_are_what_a_rank_runs(tmp_path: Path) -> None:
    """A drawing of the whole model's shapes, or without the messages that the plan was priced with."""
    pins = ("tp=2", "pp=2", "schedule=1f1b")
    plan = search_plan(GPT, hw="cpu", devices=4, global_batch=16, pins=pins)
    graphs = layout_graphs(plan, GPT)
    assert set(graphs) == set(plan.layouts)
    for name, graph in graphs.items():
        layout, rows = plan.layouts[name], operation_rows(graph, plan.layouts[name])
        counts = {"forward": layout.collectives_forward, "backward": layout.collectives_backward}
        for direction, expected in counts.items():
            sent = [text for row in rows for text in row.sends if text.startswith(direction)]
            kinds = Counter(text.split()[1].replace("-", "_") for text in sent)
            assert kinds == Counter({kind: count for kind, count in expected.items() if count}), name
        drawn = set(re.findall(r'^  "([^"]+)" \[label', operations_dot(rows), re.MULTILINE))
        ends = set(re.findall(r'"([^"]+)" -> "([^"]+)"', operations_dot(rows)))
        assert {end for edge in ends for end in edge} <= drawn
        assert drawn == {row.name for row in rows if row.kind not in ("free", "parameter")}
    root = parsed(report_html(plan, graphs))
    shapes = [cell.text for cell in root.iter("td")]
    assert "[192, 128] fp32" in shapes and "[384, 128] fp32" not in shapes  # qkv, cut in two
    plan.save(tmp_path / "plan.yaml")
    assert main(["show", str(tmp_path / "plan.yaml"), "--model", str(GPT)]) == 2
    page = tmp_path / "page.html"
    assert main(["show", str(tmp_path / "plan.yaml"), "--html", str(page), "--model", str(GPT)]) == 0
    parsed(page.read_text())


def test_what_would_close_a_script_is_refused() -> None:
    """Data that ends the script it is in."""
    with pytest.raises(ValueError, match="closes itself"):
        raw("script", "x</script>")
    assert tag("p", "a < b", None, [Markup("<br/>"), 1.0], class_="x", hidden=True, id=None) == (
        '<p class="x" hidden="">a &lt; b<br/>1</p>'
    )


def test_mermaid_text_names_every_run(tmp_path: Path) -> None:
    """A drawing in a README without the numbers of the SVG."""
    text = plan_mermaid(HAND_MADE)
    assert text.count("subgraph") == 2 and text.count("model.layers.") == 4
    assert 'p0_s0_r2 ==>|"32.0 MiB, tp R, dp S(0)"| p0_s1_r0' in text
    assert all(text.count(f'{c}"') % 2 == 0 for c in "[") and "<b>" not in text
    HAND_MADE.save(tmp_path / "plan.yaml")
    target = tmp_path / "plan.mmd"
    assert main(["show", str(tmp_path / "plan.yaml"), "--mermaid", str(target)]) == 0
    assert target.read_text() == text


# ---- in a browser -----------------------------------------------------------------------------------

SCRIPT = """
window.addEventListener('error', (e) => document.body.dataset.error = e.message);
const found = {}, chart = document.querySelector('[data-zoom=x]'), key = (box, name) =>
  box.dispatchEvent(new KeyboardEvent('keydown', { key: name, bubbles: true }));
const scaled = () => chart.querySelector('.scaled').getAttribute('transform');
found.ready = document.documentElement.dataset.ready;
found.still = scaled();
chart.querySelectorAll('button')[1].click();
found.zoomed = scaled();
['0', 'End', 'ArrowLeft', 'ArrowDown', 'Home'].forEach((name) => key(chart, name));
found.read = chart.querySelector('.readout').textContent;
found.whole = scaled();
for (let i = 0; i < 6; i++) key(chart, '+');
found.labels = chart.querySelectorAll('.labels text').length;
const graph = document.querySelector('[data-zoom=xy]');
graph.querySelectorAll('button')[1].click();
found.graph = graph.querySelector('.scaled').getAttribute('transform');
const link = graph.querySelector('a');
link.dispatchEvent(new MouseEvent('click', { bubbles: true, cancelable: true }));
found.opened = document.getElementById(link.getAttribute('href').slice(1)).open;
found.sideways = document.documentElement.scrollWidth > innerWidth;
found.requests = performance.getEntriesByType('resource').length;
document.body.setAttribute('data-found', JSON.stringify(found));
"""


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Debian's chromium")
def test_the_page_works_in_a_browser(tmp_path: Path) -> None:
    """Zooming, walking by keyboard and links, in headless Chromium, with no error and no request."""
    page = tmp_path / "report.html"
    page.write_text(report_html(large_plan()).replace("</body>", f"<script>{SCRIPT}</script></body>"))
    command = [
        "chromium",
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=1280,900",
        "--dump-dom",
    ]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=4000", page.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "data-error" not in shown
    match = re.search(r'data-found="([^"]*)"', shown)
    assert match is not None
    found = json.loads(html.unescape(match[1]))
    assert found["ready"] == "yes" and found["requests"] == 0 and not found["sideways"]
    assert found["still"] == found["whole"] == "translate(0,0) scale(1,1)"
    assert found["zoomed"].endswith("scale(2,1)") and found["graph"].endswith("scale(2)")
    assert found["read"].startswith("ranks 1024-2047, stage 1: forward of micro-batch 0")
    assert found["labels"] > 5 and found["opened"]
