"""Pins, batches and counts: which candidates there are, and what is said to those who ask for others."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoplan.errors import BadInputError
from autoplan.plan import Mesh
from autoplan.planner.driver import search_plan
from autoplan.planner.space import Pins, candidates, divisors, parse_pins, require_pinned_regions
from autoplan.runtime.check import run_check

EXAMPLES = Path(__file__).parent.parent / "examples"


GPT = EXAMPLES / "gpt.py"


def test_region_pins_reach_their_regions() -> None:
    """A range of regions is pinned without touching the others."""
    pins = ("pp=2", "blocks.0-1:recompute=full", "blocks.2:recompute=selective")
    plan = search_plan(GPT, hw="cpu", devices=2, global_batch=8, pins=pins)
    kinds = {r.region: r.recompute for s in plan.parts[0].stages for r in s.regions}
    assert [kinds[f"blocks.{i}"] for i in range(3)] == ["full", "full", "selective"]


@pytest.mark.parametrize(
    ("pin", "says"),
    [
        ("tp", "expected KEY=VALUE"),
        ("tpp=2", "Did you mean 'tp'"),
        ("tp=0", "positive whole number"),
        ("zero=9", "ZeRO stages"),
        ("recompute=some", "none, selective, full"),
        ("layers.0:tp=2", "a region takes recompute="),
        ("cp_kind=wheel", "expected one of ulysses, ring"),
    ],
)
def test_bad_pins_are_named(pin: str, says: str) -> None:
    with pytest.raises(BadInputError, match=says) as caught:
        parse_pins([pin])
    assert repr(pin) in str(caught.value)


def test_contradicting_pins_are_refused() -> None:
    """The last of two pins won silently."""
    with pytest.raises(BadInputError, match="tp is pinned to 2 already"):
        parse_pins(["tp=2", "pp=2", "tp=1"])
    assert parse_pins(["tp=2", "tp=2"]) == Pins(tp=2)


@pytest.mark.parametrize(
    ("glob", "says"), [("nolayer.*", "embed, blocks.0-3, head"), ("blocks.0-7", "blocks.4")]
)
def test_a_region_pin_that_matches_nothing_is_refused(glob: str, says: str) -> None:
    """It was ignored, and the plan looked pinned."""
    regions = ["embed", *(f"blocks.{i}" for i in range(4)), "head"]
    require_pinned_regions(parse_pins(["blocks.0-3:recompute=full", "hea*:recompute=none"]), regions)
    with pytest.raises(BadInputError, match=says):
        require_pinned_regions(parse_pins([f"{glob}:recompute=full"]), regions)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"devices": 10**9}, "--devices 1000000000: expected a whole number from 1 to"),
        ({"devices": 0}, "--devices 0: expected"),
        ({"global_batch": -1}, "--global-batch -1: expected"),
    ],
)
def test_counts_out_of_range_are_refused(options: dict[str, int], says: str) -> None:
    """A billion devices were searched for minutes; 0 from Python was not refused at all."""
    with pytest.raises(BadInputError, match=says):
        search_plan(GPT, hw="cpu", **options)  # pyright: ignore[reportArgumentType]  only counts are given


def test_divisors_are_all_and_ascending() -> None:
    for n in (1, 2, 12, 16, 36, 97):
        assert divisors(n) == [d for d in range(1, n + 1) if n % d == 0]


def test_mesh_that_does_not_multiply_out_is_refused() -> None:
    """``--devices 6 --pin tp=4`` named no way out."""
    with pytest.raises(BadInputError, match="--devices 8"):
        candidates(6, 12, [1, 2, 4], 8, Pins(tp=4))


def test_batch_that_no_mesh_divides_lists_the_nearest() -> None:
    with pytest.raises(BadInputError, match="nearest that work: 8, 4"):
        candidates(4, 7, [1], 1, Pins())


@pytest.mark.parametrize(("devices", "used"), [(3, 3), (7, 6), (12, 12)])
def test_devices_that_do_not_factor_get_plans(devices: int, used: int) -> None:
    """Six regions on 3 or 12 devices have meshes; of 7 one stays idle, and the plan says so."""
    plan = search_plan(GPT, hw="cpu", devices=devices, global_batch=96)
    assert plan.workload.devices == plan.parts[0].mesh.devices == used
    assert [text for text in plan.assumptions if "idle" in text and "1 stays" in text] or used == devices


def test_candidates_cover_every_mesh() -> None:
    """Each product of degrees appears, and none uses more or fewer devices."""
    found = {c.mesh for c in candidates(8, 64, [1, 2, 4], 4, Pins())}
    wanted = {
        Mesh(pp, dp, tp) for pp in (1, 2, 4) for tp in (1, 2, 4) for dp in (1, 2, 4, 8) if pp * dp * tp == 8
    }
    assert found == wanted


@pytest.mark.parametrize(
    ("pins", "expected"),
    [
        (Pins(pp=2), {("1f1b", 1), ("zb_h1", 1), ("interleaved_1f1b", 2), ("zb_h1", 2)}),
        (Pins(pp=2, zero=3), {("1f1b", 1), ("interleaved_1f1b", 2)}),
        (Pins(pp=1), {("1f1b", 1)}),
        (Pins(pp=2, vpp=2), {("interleaved_1f1b", 2), ("zb_h1", 2)}),
        (Pins(pp=2, vpp=1, schedule="gpipe"), {("gpipe", 1)}),
        (Pins(pp=2, schedule="zb_h1"), {("zb_h1", 1), ("zb_h1", 2)}),
    ],
)
def test_schedules_that_a_mesh_may_have(pins: Pins, expected: set[tuple[str, int]]) -> None:
    """Zero bubble puts weight gradients off; ZeRO-3 reduces them at once. One rank has no pipeline."""
    found = candidates(4, 16, [1], 6, pins)
    pipelined = [c for c in found if c.zero != 0 or pins.zero is None]
    assert {(c.schedule, c.vpp) for c in pipelined if c.zero in (0, pins.zero)} == expected


@pytest.mark.parametrize(
    ("pins", "says"),
    [
        (Pins(pp=2, vpp=2, schedule="1f1b"), "--pin vpp=2: 1f1b runs one stage a rank.*interleaved_1f1b"),
        (Pins(pp=2, vpp=4), "--pin vpp=4: pp x vpp is 8, and the model has 6 regions"),
        (Pins(pp=2, zero=3, schedule="zb_h1"), "--pin schedule=zb_h1: .*ZeRO-3.*--pin zero=1"),
    ],
)
def test_pins_that_leave_no_schedule_say_why(pins: Pins, says: str) -> None:
    """They were dropped, and another schedule was planned than the one asked for."""
    with pytest.raises(BadInputError, match=says):
        candidates(4, 16, [1], 6, pins)


@pytest.mark.parametrize("pins", [("vpp=2",), ("schedule=zb_h1", "vpp=1"), ("schedule=zb_h1", "vpp=2")])
def test_pinned_pipelines_are_planned_and_run(pins: tuple[str, ...]) -> None:
    """What the search prices is what the ranks run, with the gradients of one process."""
    plan = search_plan(GPT, hw="cpu", devices=2, global_batch=8, dtype="fp64", pins=("pp=2", "dp=1", *pins))
    (part,) = plan.parts
    pinned = dict(pin.split("=") for pin in pins)
    assert part.vpp == int(pinned["vpp"]) and part.schedule == pinned.get("schedule", part.schedule)
    assert len(part.stages) == 2 * part.vpp
    assert plan.certificate is not None and plan.certificate.gap < 0.05
    assert run_check(plan, GPT).ok


def test_tp_that_does_not_divide_heads_lists_degrees() -> None:
    """A fractional head was planned silently."""
    with pytest.raises(BadInputError, match=r"4 heads.*valid degrees: 1, 2"):
        search_plan(GPT, hw="cpu", devices=3, global_batch=6, pins=("tp=3",))
    with pytest.raises(BadInputError, match=r"here 2 devices; valid degrees: 1, 2"):
        search_plan(GPT, hw="cpu", devices=2, global_batch=6, pins=("tp=4",))
