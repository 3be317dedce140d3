"""``autoplan validate``: published runs are read, placed, priced and scored as their sources state them."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from autoplan.cli import main
from autoplan.errors import BadInputError
from autoplan.hardware import load_profile
from autoplan.validation.clusters import cluster_of, network_bytes_per_s
from autoplan.validation.points import SHIPPED, Point, read_points
from autoplan.validation.pricing import Forecast, layers_of_stages, price_points, unpriced
from autoplan.validation.scores import scores, total, worst
from autoplan.validation.worth import record, worth_of, worth_text

POINTS = {point.name: point for point in read_points()}


def point(**changes: object) -> Point:
    """A run of a small classic decoder on eight devices, with some fields changed."""
    base = POINTS["llm_foundry_fsdp-0100"]
    return replace(base, **changes)  # type: ignore[arg-type]  # fields by name


def forecast(measured_s: float, predicted_s: float, **changes: object) -> Forecast:
    return Forecast(point(step_time_s=measured_s, **changes), step_s=predicted_s)


def test_every_shipped_point_has_a_source_and_a_consistent_mesh() -> None:
    for one in POINTS.values():
        assert one.text["source"], one.name
        assert one.devices == one.pp * one.dp * one.tp * one.cp, one.name
        assert one.step_time_s or one.peak_memory_bytes or one.out_of_memory, one.name


NETWORKS = [
    ("Omni-Path 100Gb/s, 4 links/node (Jean Zay)", 6.25e9),
    ("1600 Gb/s RoCE per node", 25e9),
    ("8x400Gb/s InfiniBand NDR", 50e9),
    ("4x100Gb RoCE", 6.25e9),
    ("400Gb/s RDMA per GPU", 50e9),
    ("RoCE RDMA (bandwidth not stated)", None),
    ("", None),
]


@pytest.mark.parametrize(("text", "expected"), NETWORKS)
def test_network_as_stated(text: str, expected: float | None) -> None:
    assert network_bytes_per_s(text, 8) == expected


def test_a_slower_network_slows_what_crosses_nodes_alone() -> None:
    usual = load_profile("a100-80")
    run = point(text={"inter_node": "4x100Gb RoCE"})
    slow = cluster_of(run, usual)
    assert slow.collectives["intra"] == usual.collectives["intra"]
    for kind, fits in slow.collectives["inter"].items():
        for fit, before in zip(fits, usual.collectives["inter"][kind]):
            assert fit.bytes_per_s == pytest.approx(before.bytes_per_s / 4)


STAGES = [
    ({"layers": 8, "pp": 4}, [2, 2, 2, 2]),
    ({"layers": 70, "pp": 12}, [5, *[6] * 10, 5]),  # the embedding layers own a slot (BLOOM)
    ({"layers": 8, "pp": 3}, [3, 3, 2]),
    ({"layers": 12, "pp": 1}, [12]),
    (
        {
            "layers": 12,
            "pp": 4,
            "text": {"notes": "decoder-first-pipeline-num-layers=2 decoder-last-pipeline-num-layers=2"},
        },
        [2, 4, 4, 2],
    ),
]


@pytest.mark.parametrize(("changes", "expected"), STAGES)
def test_layers_of_stages(changes: dict[str, object], expected: list[int]) -> None:
    assert layers_of_stages(point(**changes)) == expected


def test_redistributed_layers_leave_the_last_stage_less() -> None:
    counts = layers_of_stages(point(layers=48, pp=16, vocab=256000, schedule="1F1B, layers redistributed"))
    assert sum(counts) == 48 and counts[-1] < min(counts[:-1])


def test_scores_are_exact() -> None:
    """Three runs of one workload, the best forecast on the second-best run; another source apart."""
    same = {"subset": "one", "devices": 8}
    found = [forecast(1.0, 1.2, **same), forecast(1.1, 0.9, **same), forecast(2.0, 2.0, **same)]
    found += [forecast(1.0, 1.5, subset="two"), Forecast(point(subset="two"), skipped="experts")]
    one, two = scores(found)
    assert one.step_time_median_error == pytest.approx(0.2 / 1.1)
    assert one.rank_correlation == pytest.approx(0.5) and one.regret == pytest.approx(0.1)
    assert (two.points, two.skipped, two.rank_correlation) == (1, 1, None)
    assert total([one, two])["step_time_median_error"] == pytest.approx((0.2 / 1.1 + 0.5) / 2)
    assert worst(found, 1)[0].point.subset == "two"


def test_refusals_are_counted_by_what_was_published() -> None:
    found = [
        Forecast(point(out_of_memory=True, step_time_s=None), refused=True),
        Forecast(point(out_of_memory=True, step_time_s=None), refused=False),
        Forecast(point(), refused=True, step_s=1.0),
    ]
    (score,) = scores(found)
    assert (score.oom, score.oom_refused, score.running, score.running_refused) == (2, 1, 1, 1)


GROUPED = [
    ({"zero": 1, "dp": 64}, "8", 8),
    ({"zero": 1, "dp": 64}, "64", 0),
    ({"zero": 0, "dp": 64}, "8", 0),
    ({"zero": 3, "dp": 64}, "", 0),
]


@pytest.mark.parametrize(("changes", "stated", "expected"), GROUPED)
def test_zero_is_sharded_over_as_many_replicas_as_the_source_states(
    changes: dict[str, int], stated: str, expected: int
) -> None:
    assert point(**changes, text={"zero_shard_size": stated}).zero_shard == expected


def test_points_beyond_the_models_are_skipped_with_a_reason() -> None:
    assert unpriced(point(chip="TPU-v5e")) == "no hardware profile for TPU-v5e"
    assert unpriced(point()) == ""


def test_equal_runs_share_their_capture_and_keep_their_order() -> None:
    """Points are priced by shape, and come back in the order they were given."""
    runs = [point(micro_batch=size, hidden=256, heads=4, kv_heads=4, head_dim=64, ffn=512) for size in (2, 1)]
    told = price_points(runs, lambda _: None)
    assert [forecast.point.micro_batch for forecast in told] == [2, 1]
    assert all(forecast.step_s > 0 and not forecast.skipped for forecast in told)


def test_command_takes_other_rows_and_prints_one_object(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with SHIPPED.open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    chosen = [row for row in rows if row["subset"] == "internevo_a100"][:2]
    path = tmp_path / "rows.csv"
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(chosen)
    assert main(["validate", "--data", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    wanted = {"points", "step_time_median_error", "step_time_p90_error", "memory_median_error"}
    wanted |= {"rank_correlation", "regret"}
    assert [group["source"] for group in told["groups"]] == ["internevo_a100"]
    assert wanted <= set(told["groups"][0]) and wanted <= set(told["total"])
    assert len(told["worst"]) == 2


BAD = [
    ("id,subset\na,b\n", "expected the columns"),
    (None, "no such file"),
]


@pytest.mark.parametrize(("text", "message"), BAD)
def test_bad_tables_are_named(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "rows.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(BadInputError, match=message):
        read_points(path)


def test_what_predictions_are_worth_is_recorded_and_read_back(tmp_path: Path) -> None:
    """Medians over sources of each source's median, so that a large source does not drown a small one."""
    found = [
        forecast(1.0, 1.1, subset="one"),
        forecast(1.0, 1.1, subset="one"),
        forecast(1.0, 0.7, subset="two"),
    ]
    found += [Forecast(point(chip="H200"), skipped="experts")]
    path = tmp_path / "worth.yaml"
    record(found, path)
    worth = worth_of("a100-80", path)
    assert worth is not None and (worth.points, worth.sources) == (3, 2)
    assert worth.median_error == pytest.approx(0.2) and worth.bias == pytest.approx(-0.1)
    assert worth_of("h200", path) is None and worth_of("kunlun-p800") is None
    assert "never validated" in worth_text("kunlun-p800")


def test_only_the_whole_table_is_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--record", "--source", "internevo"]) == 2
    assert "--record" in capsys.readouterr().err
