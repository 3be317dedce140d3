"""What a person sees of a plan: the drawing, the tables, the JSON; all made from one hand-made plan."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import re
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest
from plan_fixture import llama_plan

from autoplan.cli import main, show
from autoplan.errors import BadInputError
from autoplan.plan import Plan, RegionPlan
from autoplan.report import draw
from autoplan.report.graph import plan_dot
from autoplan.report.summary import largest_part, plan_summary_json, typical_layout
from autoplan.report.terminal import print_plan
from autoplan.units import bytes_text, count_text, seconds_text, share_text

PLAN = llama_plan()
DOT = plan_dot(PLAN)
SUMMARY_KEYS = {  # those that programs may rely on
    "plan", "hardware", "devices", "step_time_s", "tokens_per_s", "mfu", "memory_gib", "mesh", "parts",
    "micro_batch", "microbatches", "schedule", "stages", "certificate", "wall_s",
    "collectives_per_layer_forward", "bytes_per_layer_forward",
}  # fmt: skip


def show_json(plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> Any:
    """What ``autoplan show plan.yaml --json`` prints, parsed."""
    plan.save(tmp_path / "plan.yaml")
    parser = argparse.ArgumentParser()
    show.add_parser(parser.add_subparsers())
    args = parser.parse_args(["show", str(tmp_path / "plan.yaml"), "--json", *options])
    assert args.run(args) == 0
    return json.loads(capsys.readouterr().out)


def printed(plan: Plan, width: int | None) -> str:
    out = io.StringIO()
    print_plan(plan, out, width)
    return out.getvalue()


# ---- the drawing ------------------------------------------------------------------------------------


def test_identical_neighbours_are_one_node() -> None:
    """Guards: a drawing of 126 nodes, one a layer."""
    nodes = re.findall(r"^ +(p\d+_s\d+_r\d+) \[label", DOT, re.M)
    assert len(nodes) == 6
    assert "<B>model.layers.0-7</B> x8" in DOT and "<B>model.layers.24-31</B> x8" in DOT
    assert plan_dot(llama_plan(layers=126)).count("_r0 [label") == 2


def test_drawing_tells_stages_bytes_placements_recompute_and_kernels() -> None:
    """Guards: a picture of boxes without the numbers a person came for."""
    for told in (
        "<B>stage 0</B>", "ranks 32-63", "forward ~20.1 ms, backward ~40.2 ms + ~10.1 ms recompute",
        "31.0 of 86.2 GiB (36%)", "to stage 1\\n32.0 MiB\\ntp R\\ndp S(0)", "recompute full",
        "recompute selective", "kernels: flash_attention", "forward: 2 all-reduce, 64.0 MiB",
        "parameters on tp: 2 x S(1), 5 x S(0), 2 x R", "step ~4.33 s", "loss",
    ):  # fmt: skip
        assert told in DOT, told
    assert "tp R" not in plan_dot(llama_plan(tp=1))


def test_stages_have_their_own_colours() -> None:
    """Guards: neighbouring stages that cannot be told apart."""
    fills = re.findall(r'fillcolor="(#\w+)"; color', plan_dot(llama_plan(stages=4)))
    assert len(fills) == 4 == len(set(fills))


def with_region_name(name: str) -> Plan:
    """The plan with a first region of this name."""
    part = PLAN.parts[0]
    regions = (RegionPlan(name, "embed.tp8"), *part.stages[0].regions[1:])
    stages = (dataclasses.replace(part.stages[0], regions=regions), *part.stages[1:])
    return dataclasses.replace(PLAN, parts=(dataclasses.replace(part, stages=stages),))


@pytest.mark.parametrize("name", ['a"b', "<b>", "a & b", "x\\n", "модель", "]};"])
def test_any_name_can_be_drawn(name: str) -> None:
    """Guards: a module's name read as DOT or HTML."""
    root = xml.etree.ElementTree.fromstring(draw.render(plan_dot(with_region_name(name)), "svg"))
    assert name in " ".join(root.itertext())


def test_svg_and_png_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards: an empty file where the picture should be; stages drawn out of order."""
    files = {form: tmp_path / f"plan.{form}" for form in ("svg", "png", "dot")}
    options = [word for form, path in files.items() for word in (f"--{form}", str(path))]
    told = show_json(llama_plan(stages=8), tmp_path, capsys, *options)
    assert sorted(told["drawn"]) == sorted(map(str, files.values()))
    assert files["png"].read_bytes().startswith(b"\x89PNG\r\n") and files["png"].stat().st_size > 20_000
    assert files["dot"].read_text().startswith("digraph plan")
    svg = xml.etree.ElementTree.fromstring(files["svg"].read_bytes())
    places = {
        text: float(element.get("x", "nan"))
        for element in svg.iter("{http://www.w3.org/2000/svg}text")
        if re.fullmatch(r"stage \d", text := "".join(element.itertext()).strip())
    }
    assert [name for name, _ in sorted(places.items(), key=lambda item: item[1])] == [
        f"stage {s}" for s in range(8)
    ]


def test_without_graphviz_the_message_says_what_to_type(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Guards: FileNotFoundError: 'dot' as a traceback."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    with pytest.raises(BadInputError, match="pip install graphviz-pure"):
        draw.render(DOT, "svg")


def test_a_folder_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    """Guards: a traceback after the search took a minute."""
    with pytest.raises(BadInputError, match=r"cannot write .*plan.svg: No such file"):
        draw.write_picture(DOT, tmp_path / "none" / "plan.svg", "svg")


# ---- the tables -------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [40, 60, 80, 110, 160])
def test_tables_fit_the_terminal(width: int) -> None:
    """Guards: lines that wrap in the middle of a table on a narrow terminal."""
    text = printed(PLAN, width)
    assert max(len(line) for line in text.splitlines()) <= width
    told = "".join(text.split())  # at 40 columns the regions and their recompute once had no room
    assert all(word in told for word in ("embed", "model.layers.", "full", "selective", "head", "GiB"))
    for told in ("stage", "31.0", "21.5", "~4.33 s", "optimizer states", "bubble", "--devices"):
        assert told in text, told


def test_a_file_gets_plain_wide_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: escape codes in a log file; a table squeezed to 80 columns because there is no terminal."""
    monkeypatch.delenv("COLUMNS", raising=False)
    text = printed(PLAN, None)
    assert "\x1b" not in text
    assert max(len(line.rstrip()) for line in text.splitlines()) > 90
    monkeypatch.setenv("COLUMNS", "0")  # printed nothing at all
    assert "stage" in printed(PLAN, None)


def test_estimates_are_marked_and_named() -> None:
    """Guards: an estimated rate of the chip told as if it were measured."""
    assert PLAN.prediction is not None
    assert "~ rests on numbers that kunlun-p800's profile marks as estimated: peak_flops.bf16" in printed(
        PLAN, 200
    )
    measured = dataclasses.replace(PLAN.prediction, estimated_inputs=())
    assert "~" not in printed(dataclasses.replace(PLAN, prediction=measured), 200)


def test_a_plan_without_a_forecast_is_still_shown() -> None:
    """Guards: a crash on a plan made by hand."""
    part = PLAN.parts[0]
    bare = dataclasses.replace(
        part, stages=tuple(dataclasses.replace(s, prediction=None) for s in part.stages)
    )
    plan = dataclasses.replace(PLAN, parts=(bare,), prediction=None, certificate=None, wall_s={})
    assert "model.layers.0-7" in printed(plan, 100)
    assert "model.layers.0-7" in plan_dot(plan)
    assert plan_summary_json(plan)["step_time_s"] is None


# ---- the JSON ---------------------------------------------------------------------------------------


def test_json_has_the_promised_entries(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards: a program that reads `show --json` broken by a renamed entry."""
    told = show_json(PLAN, tmp_path, capsys)
    assert set(told) >= SUMMARY_KEYS
    assert told["mesh"] == {"pp": 2, "dp": 4, "tp": 8, "cp": 1, "ep": 1}
    assert told["memory_gib"]["by_stage"] == pytest.approx([31.0, 21.5])
    assert told["memory_gib"]["peak"] == pytest.approx(31.0) and told["memory_gib"]["limit"] == pytest.approx(
        86.2
    )
    assert told["memory_gib"]["peak_items"][0]["name"] == "saved activations x 2"
    assert told["certificate"].keys() == {
        "objective_s",
        "bound_s",
        "gap",
        "meshes_considered",
        "meshes_solved",
    }
    assert told["collectives_per_layer_forward"] == {"all_reduce": 2}
    assert told["bytes_per_layer_forward"] == 2 * 2.0 * 4096 * 4096
    assert [part["name"] for part in told["parts"]] == ["model"]
    assert told["stages"][1]["regions"] == ["model.layers.16-23", "model.layers.24-31", "head"]


@pytest.mark.parametrize(
    ("name", "fingerprint", "said"),
    [("kunlun-p800", "0" * 16, "the profile changed since"), ("no-such-chip", "0" * 16, ""), ("cpu", "", "")],
)
def test_an_old_forecast_is_said_but_no_obstacle(
    name: str, fingerprint: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A profile that was calibrated anew left plans with times that nobody had questioned."""
    path = tmp_path / "plan.yaml"
    dataclasses.replace(PLAN, hardware=name, hardware_fingerprint=fingerprint).save(path)
    assert main(["show", str(path)]) == 0
    told = capsys.readouterr().err
    assert said in told if said else not told


def test_the_largest_part_and_the_typical_layer_speak_for_the_plan() -> None:
    """Guards: a vision tower's mesh reported as the mesh of the whole model."""
    small = dataclasses.replace(llama_plan(stages=1, tp=1, dp=1, layers=4).parts[0], name="vision")
    layouts = {**llama_plan(stages=1, tp=1).layouts, **PLAN.layouts}
    plan = dataclasses.replace(PLAN, parts=(small, *PLAN.parts), layouts=layouts)
    assert largest_part(plan).name == "model"
    layer = typical_layout(plan)
    assert layer is not None and (layer.region_class, layer.tp.size) == ("block-7f3a", 8)


UNITS = [
    (share_text(31 * 2**30, 86.2 * 2**30), "31.0 of 86.2 GiB"),
    (share_text(2**20, 2**30), "1.00 MiB of 1.00 GiB"),
    (bytes_text(0), "0 B"), (bytes_text(2**25), "32.0 MiB"), (bytes_text(1.5 * 2**40), "1.50 TiB"),
    (seconds_text(0), "0"), (seconds_text(4.3333), "4.33 s"), (seconds_text(0.0123), "12.3 ms"),
    (seconds_text(0.9999999), "1000 ms"), (seconds_text(123.4), "123 s"), (seconds_text(2e-7), "0.20 us"),
    (count_text(8.03e9), "8.03 B"), (count_text(512), "512"), (count_text(405e9), "405 B"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), UNITS)
def test_units(text: str, expected: str) -> None:
    """Guards: 1024 and 1000 mixed up; a number of nine digits where three tell it."""
    assert text == expected


def test_stage_code_is_written_without_weights(tmp_path: Path) -> None:
    """The generated modules could only be seen from a running rank."""
    from autoplan.planner.driver import search_plan

    gpt = Path(__file__).parent.parent / "examples" / "gpt.py"
    plan = search_plan(gpt, hw="cpu", devices=4, global_batch=8, pins=("tp=2", "pp=2"))
    plan.save(tmp_path / "plan.yaml")
    assert main(["show", str(tmp_path / "plan.yaml"), "--stages", str(tmp_path / "stages")]) == 0
    codes = [(tmp_path / "stages" / f"stage_{k}.py").read_text() for k in range(2)]
    assert all("reduce_from(" in code and "import autoplan" not in code for code in codes)
    for code in codes:
        compile(code, "stage.py", "exec")
