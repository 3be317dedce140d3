"""The plan file: what was saved comes back exactly, and nothing else comes in."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from plan_fixture import llama_plan

from autoplan.errors import BadInputError, BadPlanError
from autoplan.plan import Layout, Plan, RegionPlan, Stage
from autoplan.plan_file import parse_plan, plan_fingerprint, plan_of, plan_text
from autoplan.region_runs import expand_range, fold_regions, range_label

PLAN = llama_plan()
DOCUMENT = yaml.safe_load(plan_text(PLAN))


def with_regions(names: list[str], recompute: str = "none") -> Plan:
    """A plan of one stage whose regions have these names."""
    plan = llama_plan(stages=1)
    stage = Stage(tuple(RegionPlan(name, "block.tp8", recompute) for name in names))
    return dataclasses.replace(plan, parts=(dataclasses.replace(plan.parts[0], stages=(stage,)),))


def with_float(value: float) -> Plan:
    assert PLAN.prediction is not None
    return dataclasses.replace(PLAN, prediction=dataclasses.replace(PLAN.prediction, step_time_s=value))


ROUND_TRIPS = {
    "two stages": PLAN,
    "one stage, no tp": llama_plan(stages=1, tp=1),
    "126 layers in 16 stages": llama_plan(layers=126, stages=16),
    "nothing predicted": dataclasses.replace(PLAN, prediction=None, certificate=None, assumptions=()),
    "smallest float": with_float(5e-324),
    "float without a short form": with_float(0.1 + 0.2),
    "largest float": with_float(1.7976931348623157e308),
    "infinite": with_float(math.inf),
    "names that are ranges themselves": with_regions(["a.0-3", "a.4"]),
    "two counted components": with_regions(["a.0.0", "a.0.1", "a.1.0", "a.1.1", "a.1.2", "a.2.2"]),
    "leading zeros": with_regions(["a.00", "a.01", "a.9", "a.10", "a.11"]),
    "range in another component": with_regions(["a.0-3.0", "a.0-3.1"]),
    "names that YAML would read as something else": with_regions(
        ["null", "1e5", "yes", "", " x", "#", "é\n"]
    ),
    "text that looks like a number": dataclasses.replace(PLAN, hardware_fingerprint="123e4567"),
}


@pytest.mark.parametrize("plan", ROUND_TRIPS.values(), ids=ROUND_TRIPS.keys())
def test_what_was_saved_comes_back_exactly(plan: Plan, tmp_path: Path) -> None:
    """Guards: floats cut to six digits; folded regions that unfold to other names."""
    path = tmp_path / "plan.yaml"
    plan.save(path)
    again = Plan.load(path)
    assert again == plan
    assert plan_fingerprint(again) == plan_fingerprint(plan)
    assert plan_text(again) == plan_text(plan)


def test_numbers_of_other_libraries_are_saved_as_python_numbers(tmp_path: Path) -> None:
    """Guards: a numpy float from the solver written as a YAML object, unreadable by safe_load."""
    import numpy

    plan = with_float(numpy.float64(4.5))
    part = dataclasses.replace(plan.parts[0], micro_batch=numpy.int64(1))
    plan = dataclasses.replace(plan, parts=(part,))
    plan.save(tmp_path / "plan.yaml")
    assert Plan.load(tmp_path / "plan.yaml") == plan


def leaves(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every scalar of plain data, as (path, value)."""
    entries = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else None
    if entries is None:
        yield path, data
        return
    for key, item in entries:
        yield from leaves(item, (*path, key))


def path_text(path: tuple[Any, ...]) -> str:
    """``("parts", 0, "zero") -> "parts[0].zero"``."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).lstrip(".")


def document() -> Any:
    """The plan's file, parsed, for one test to spoil."""
    return copy.deepcopy(DOCUMENT)


def edited(path: tuple[Any, ...], value: Any) -> Any:
    """The plan's file with ``value`` in one place."""
    whole = place = document()
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return whole


def another(value: Any) -> Any:
    """A different value of the same type, as small a change as there is."""
    if isinstance(value, float):
        return math.nextafter(value, math.inf)
    return value + 1 if isinstance(value, int) else value + "x"


def test_every_edit_of_one_value_is_refused_and_named() -> None:
    """Guards: a forecast edited in its last digit, or a plan changed by hand, taken at its old numbers."""
    for path, value in leaves(DOCUMENT):
        with pytest.raises(BadPlanError) as refusal:
            plan_of(edited(path, another(value)))
        told, _, _ = str(refusal.value).partition(": ")
        assert told == path_text(path), f"{path_text(path)} was edited, the message says: {refusal.value}"


def test_every_wrong_type_is_refused_and_named() -> None:
    """Guards: `micro_batch: "1"` or `zero: true` reaching arithmetic; null where a record belongs."""
    for path, _ in leaves(DOCUMENT):
        for wrong in ([], {"a": 1}, True, None):
            with pytest.raises(BadPlanError, match="expected") as refusal:
                plan_of(edited(path, wrong))
            assert str(refusal.value).startswith(path_text(path)), (path, wrong, str(refusal.value))


def without(*path: Any) -> Any:
    """The plan's file with one entry taken out."""
    whole = place = document()
    for key in path[:-1]:
        place = place[key]
    del place[path[-1]]
    return whole


REGIONS = ("parts", 0, "stages", 0, "regions", 1, "regions")
REFUSED = {
    "missing field": (without("parts", 0, "zero"), "parts[0].zero: expected an entry, found nothing"),
    "missing section": (without("layouts"), "layouts: expected an entry"),
    "missing seal": (without("fingerprint"), "fingerprint: expected text, found null"),
    "missing copy": (without("sealed_copy"), "sealed_copy: expected text"),
    "unknown field": (edited(("parts", 0, "mesh", "qp"), 1), "parts[0].mesh.qp: no such entry"),
    "unknown section": (edited(("notes",), 1), "notes: no such entry; expected one of"),
    "one stage less": (without("parts", 0, "stages", 1), "parts[0].stages[1]: edited"),
    "bad range": (edited(REGIONS, "a.7-0"), "regions: expected one ascending range"),
    "endless range": (edited(REGIONS, "a.0-9999999999"), "one ascending range"),
    "not a number": (edited(("prediction", "mfu"), math.nan), "mfu: expected a number, found nan"),
    "other format": (edited(("autoplan_plan",), 7), "autoplan_plan: expected 1, found 7"),
    "a list": ([1, 2], "not a plan: expected the entry `autoplan_plan`, found a list of 2"),
    "empty": (None, "not a plan"),
}


@pytest.mark.parametrize(("data", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_not_a_plan_is_refused_in_one_sentence(data: Any, message: str) -> None:
    """Guards: a KeyError or TypeError traceback for a file of the wrong shape."""
    with pytest.raises(BadPlanError) as refusal:
        plan_of(data)
    assert message in str(refusal.value)


@pytest.mark.parametrize("text", ["a: [1, 2", "a: 2024-13-45", "!!python/object/apply:os.system ['true']"])
def test_what_is_not_yaml_is_refused_in_one_sentence(text: str) -> None:
    """Guards: a parser's traceback, or objects built from a file."""
    with pytest.raises(BadPlanError, match="expected YAML"):
        parse_plan(text)


def test_a_plan_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    """Guards: IsADirectoryError as a traceback after a whole search."""
    with pytest.raises(BadInputError, match="cannot write"):
        PLAN.save(tmp_path)


def test_a_file_that_is_not_there_names_the_command_that_makes_it(tmp_path: Path) -> None:
    """Guards: FileNotFoundError as a traceback."""
    with pytest.raises(
        BadPlanError, match=r"cannot read the plan .*none.yaml: No such file[^`]*`autoplan search"
    ):
        Plan.load(tmp_path / "none.yaml")


def test_only_the_content_is_sealed() -> None:
    """Guards: a plan refused for its comments, its order of keys, or regions written one by one."""
    whole = document()
    regions = whole["parts"][0]["stages"][0]["regions"]
    run = regions.pop(1)
    names = expand_range(run.pop("regions"))
    assert names is not None
    regions[1:1] = [{"region": name, **run} for name in names]
    assert parse_plan(yaml.safe_dump(whole, sort_keys=True)) == PLAN


CONTRADICTIONS = {
    "stages": (dataclasses.replace(PLAN.parts[0], stages=PLAN.parts[0].stages[:1]), "stages: expected 2"),
    "layout": (with_regions(["a"]).parts[0], "regions[0].layout: expected one of embed.tp1"),
    "recompute": (with_regions(["a"], "some").parts[0], "regions[0].recompute"),
    "micro-batch": (dataclasses.replace(PLAN.parts[0], micro_batch=0), "micro_batch: expected at least 1"),
    "zero": (dataclasses.replace(PLAN.parts[0], zero=4), "zero: expected 0, 1, 2 or 3"),
}


@pytest.mark.parametrize(("part", "message"), CONTRADICTIONS.values(), ids=CONTRADICTIONS.keys())
def test_a_plan_that_contradicts_itself_is_not_saved(part: Any, message: str, tmp_path: Path) -> None:
    """Guards: a search that writes a file which nothing can run."""
    layouts = PLAN.layouts if "layout" not in message else {"embed.tp1": Layout("embed")}
    with pytest.raises(BadPlanError) as refusal:
        dataclasses.replace(PLAN, parts=(part,), layouts=layouts).save(tmp_path / "plan.yaml")
    assert message in str(refusal.value)
    assert not (tmp_path / "plan.yaml").exists()


FOREIGN = {
    "other model": (
        lambda: PLAN.require_model("00ff", "mixtral"),
        "model.name: the plan was made for llama3_8b",
    ),
    "changed model": (lambda: PLAN.require_model("00ff", "llama3_8b"), "model.fingerprint"),
    "other sizes": (lambda: PLAN.require_sizes({"sequence": 512}), "workload.sizes.sequence"),
}


@pytest.mark.parametrize(("use", "message"), FOREIGN.values(), ids=FOREIGN.keys())
def test_a_foreign_or_stale_plan_is_refused(use: Any, message: str) -> None:
    """Guards: a stored plan reused with another model or sequence and shown with its old numbers."""
    with pytest.raises(BadPlanError) as refusal:
        use()
    assert message in str(refusal.value)


def test_a_plan_accepts_its_own_model_and_sizes() -> None:
    """Guards: a plan refused by the very model it was made for."""
    PLAN.require_model(PLAN.model.fingerprint, "renamed file")
    PLAN.require_sizes({"sequence": 4096})


def test_str_is_a_table_with_folded_regions() -> None:
    """Guards: a table of 126 rows, one a layer."""
    text = str(llama_plan(layers=126, stages=2))
    assert "model.layers.0-30" in text and "MFU ~41.2%" in text
    assert len(text.splitlines()) < 20
    assert max(map(len, text.splitlines())) <= 110


def test_folding_is_the_inverse_of_expanding() -> None:
    """Guards: a run that counts in one component continued in another."""
    names = ["a.0.0", "a.0.1", "a.1.1", "a.2.1", "b"]
    runs = fold_regions([RegionPlan(name, "x") for name in names])
    assert [run.label for run in runs] == ["a.0.0-1", "a.1-2.1", "b"]
    assert expand_range(range_label(("a.1.1", "a.2.1"))) == ("a.1.1", "a.2.1")
