"""The matrix of layouts: its rows, and six models under every pair of axes against one process."""

from __future__ import annotations

import json
import math
from itertools import combinations
from pathlib import Path

import pytest
from captured_models import small_sizes, small_source
from run_fixture import HandPlans

from autoplan.capture import capture_model
from autoplan.cli import main
from autoplan.errors import BadInputError
from autoplan.runtime.check import CheckResult
from autoplan.runtime.matrix import (
    PRODUCT_AXES,
    ROWS,
    Row,
    SearchedPlans,
    check_matrix,
    chosen_rows,
    products,
)

GPT = Path(__file__).parent / "models" / "tiny_gpt.py"
STEPS, LAYERS = 3, 2
ALL_AXES = Row({"tp": 2, "dp": 2, "pp": 2})
# model -> (row, recompute): together every pair of axes on every model, and what else can be pinned.
PROVED: dict[str, list[tuple[Row, str]]] = {
    "gpt": [(ALL_AXES, "full"), (Row({"tp": 2, "dp": 2, "pp": 2}, ("zero=3",)), "none")],
    "tiny_llama": [(ALL_AXES, "none")],
    "mixtral_8x7b": [(ALL_AXES, "full"), (Row({"tp": 2, "dp": 2, "pp": 2}, ("ep=2",)), "none")],
    "deepseek_v3": [(ALL_AXES, "none"), (Row({"tp": 2, "dp": 2, "pp": 2}, ("ep=2",)), "full")],
    "t5": [(Row(ALL_AXES.degrees, ("sp=1",)), "full")],
    "vlm": [(ALL_AXES, "none")],
}


def test_rows_are_every_product_once() -> None:
    """A layout that nobody lists is a layout that nobody proves."""
    for ranks in (2, 4, 8):
        plain = [row.degrees for row in ROWS if row.ranks == ranks and not row.pins]
        sizes = {tuple(degrees.get(axis, 1) for axis in PRODUCT_AXES) for degrees in plain}
        power = int(math.log2(ranks))
        assert len(plain) == len(sizes) == math.comb(power + len(PRODUCT_AXES) - 1, power)
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert [row.name for row in ROWS[:4]] == ["tp2", "dp2", "pp2", "tp4"]


def test_rows_pin_everything() -> None:
    """A degree left free is the search's choice, and the row proves another layout than it says."""
    row = Row({"tp": 2, "pp": 2}, ("zero=3",))
    assert set(row.all_pins) == {"tp=2", "cp=1", "dp=1", "pp=2", "ep=1", "sp=0", "zero=3", "recompute=none"}
    assert list(products(4, ("tp", "pp"))) == [{"tp": 4}, {"tp": 2, "pp": 2}, {"pp": 4}]


def test_rows_are_chosen_by_name() -> None:
    assert [row.name for row in chosen_rows(devices=2, only=("tp*", "pp*"))] == ["tp2", "pp2", "tp2 sp=1"]
    with pytest.raises(BadInputError, match="the rows are 'tp2', 'dp2'"):
        chosen_rows(only=("nonsense",))


def test_the_subset_covers_every_pair() -> None:
    for rows in PROVED.values():
        covered = {pair for row, _ in rows for pair in combinations(sorted(row.degrees), 2)}
        assert covered >= set(combinations(sorted(PRODUCT_AXES), 2))


@pytest.mark.parametrize("name", PROVED)
def test_models_under_every_pair_of_axes(name: str) -> None:
    """Loss, every gradient, norm, and the parameters after three steps of SGD, in double precision."""
    source = small_source(name, LAYERS)
    make_plan = SearchedPlans(source, "fp64", "cpu", small_sizes(source))
    for row, recompute in PROVED[name]:
        (result,) = check_matrix(source, make_plan, rows=[row], steps=STEPS, recompute=[recompute])
        assert isinstance(result, CheckResult), result
        assert result.ok and result.worst_parameter is not None, result
        assert (result.dtype, result.ranks) == ("fp64", 8)
        assert result.gradients > 10


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    """A row that the model does not allow is said with its reason, and is no failure."""
    only = ["--only", "pp8", "--only", "dp2*", "--devices", "8", "--json"]
    assert main(["check", str(GPT), "--matrix", *only[:2], "--only", "dp2", *only[4:]]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [(row["layout"], row["recompute"], row["ok"]) for row in answer["rows"]] == [
        ("dp2", "none", True),
        ("dp2", "full", True),
    ]
    assert [one["layout"] for one in answer["left_out"]] == ["pp8"]
    assert "pp is at most" in answer["left_out"][0]["reason"]
    assert main(["check", str(GPT), "--matrix", "--only", "pp8"]) == 1
    assert "left out: pp8" in capsys.readouterr().out


def test_a_plan_for_other_hardware_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are searched for ``--hw``, not for the chip that the plan was made for."""
    plan = HandPlans(capture_model(GPT, dtype="fp64"), "gpt").plan()
    plan.save(tmp_path / "plan.yaml")
    monkeypatch.setattr("autoplan.runtime.matrix.check_matrix", lambda *_, **__: iter(()))
    arguments = ["check", str(tmp_path / "plan.yaml"), str(GPT), "--matrix", "--only", "dp2"]
    assert main(arguments) == 1
    assert "warning" not in capsys.readouterr().err
    assert main([*arguments, "--hw", "h100"]) == 1
    assert "warning: hardware: the plan was made for cpu, found h100" in capsys.readouterr().err
