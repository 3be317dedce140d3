"""Explanations: every claim is solved again here, by the search itself, and must agree."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import NoReturn
from unittest import mock

import pytest

from autoplan.capture import capture_model
from autoplan.cli import main
from autoplan.errors import BadInputError
from autoplan.hardware import HardwareProfile, load_profile
from autoplan.plan import Plan
from autoplan.planner.driver import Request, search_capture, search_plan
from autoplan.planner.space import parse_pins
from autoplan.planner.what_if import (
    WhatIf,
    with_faster_compute,
    with_faster_links,
    with_faster_memory,
    with_memory,
)
from autoplan.report.explain import Claim, explain, limits, neighbours, why, why_not
from autoplan.units import GIB

MODEL = Path(__file__).parent / "models" / "tiny_gpt.py"


def search(*pins: str, devices: int = 4) -> Plan:
    return search_plan(MODEL, hw="a100-80", devices=devices, global_batch=16, dtype="fp32", pins=pins)


@pytest.fixture(scope="module")
def what_if() -> WhatIf:
    plan = search()
    capture = capture_model(MODEL, dtype="fp32", sizes={})
    return WhatIf(plan, capture, load_profile("a100-80"), lambda _: None)


@pytest.fixture(scope="module")
def claims(what_if: WhatIf) -> list[Claim]:
    return explain(what_if)


def test_every_alternative_is_what_the_search_finds(what_if: WhatIf, claims: list[Claim]) -> None:
    """A claim from a shortcut, rather than a search, would be a guess with a number on it."""
    changed = [claim for claim in claims if claim.kind == "alternative" and claim.step_time_s]
    assert len(changed) >= 4
    for claim in changed[:: max(1, len(changed) // 3)]:
        again = search(claim.change)
        assert again.prediction is not None
        assert claim.step_time_s == pytest.approx(again.prediction.step_time_s, rel=1e-9)


def test_reasons_sum_to_the_difference(what_if: WhatIf, claims: list[Claim]) -> None:
    planned = what_if.plan.prediction
    assert planned is not None
    for claim in claims:
        if claim.because and claim.step_time_s is not None:
            assert sum(claim.because.values()) == pytest.approx(
                claim.step_time_s - planned.step_time_s, abs=1e-9
            )


def test_more_of_anything_never_costs_time(claims: list[Claim]) -> None:
    """The best plan of a better cluster is at least as good, up to what the search leaves unproved."""
    more = [claim for claim in claims if claim.kind == "shadow price" and "less" not in claim.change]
    better = [claim for claim in more if "instead" not in claim.change]
    assert len(better) == 4  # memory, links, memory bandwidth, products
    assert all(claim.relative is not None and claim.relative <= 0.003 for claim in better)


def test_shadow_prices_are_what_a_search_on_the_changed_cluster_finds(
    what_if: WhatIf, claims: list[Claim]
) -> None:
    """Prices from the layouts of the old chip alone, or of another batch, would be someone else's."""
    profile, told = load_profile("a100-80"), {claim.change: claim.step_time_s for claim in claims}
    request = Request(str(MODEL), "a100-80", 4, 16, "fp32", what_if.plan.workload.optimizer)
    for change, changed in (
        ("links 10% faster", with_faster_links(profile, 1.1)),
        ("memory bandwidth 10% higher", with_faster_memory(profile, 1.1)),
    ):
        start = time.perf_counter()
        again = search_capture(
            what_if.capture, changed, request, parse_pins(()), [], start, lambda _: None
        ).prediction
        assert again is not None
        assert told[change] == pytest.approx(again.step_time_s, rel=2e-3), change  # the search's tolerance
    doubled = search(devices=8).prediction
    assert doubled is not None
    assert told["8 devices instead of 4"] == pytest.approx(doubled.step_time_s, rel=1e-9)


def test_answers_of_a_chip_that_is_gone_are_no_other_chips(what_if: WhatIf) -> None:
    """Answers were kept by the chip's id, which the next chip made for a question may get again."""
    asker = WhatIf(what_if.plan, what_if.capture, what_if.profile, lambda _: None)

    def told(_pins: object, profile: HardwareProfile, _devices: int) -> NoReturn:
        raise BadInputError(str(profile.memory_bytes.value))

    with mock.patch.object(asker, "_search", told):
        for more_bytes in range(20):
            value = with_memory(what_if.profile, more_bytes).memory_bytes.value
            assert asker.on(with_memory(what_if.profile, more_bytes)).why == str(value)


def test_limits_name_memory_and_the_parts_of_the_step(what_if: WhatIf) -> None:
    named = [claim.change for claim in limits(what_if.plan)]
    assert named[0] == "memory" and "compute" in named


def test_changed_profiles_change_one_thing() -> None:
    profile = load_profile("a100-80")
    assert with_memory(profile, GIB).memory_bytes.value > profile.memory_bytes.value
    dtype = next(iter(profile.gemm))
    assert with_faster_compute(profile, 1.1).gemm[dtype].at(4096, 4096, 4096) == pytest.approx(
        1.1 * profile.gemm[dtype].at(4096, 4096, 4096)
    )
    reach, kinds = next(iter(profile.collectives.items()))
    kind, fits = next(iter(kinds.items()))
    faster = with_faster_links(profile, 1.1).collectives[reach][kind][0]
    assert faster.bytes_per_s == pytest.approx(1.1 * fits[0].bytes_per_s)
    assert faster.alpha_s == fits[0].alpha_s


def test_why_and_why_not_answer_about_the_plan_at_hand(what_if: WhatIf) -> None:
    mesh = what_if.plan.parts[0].mesh
    assert {claim.change for claim in why(what_if, f"tp={mesh.tp}")} == {
        f"tp={value}" for key, value in neighbours(what_if.plan) if key == "tp"
    }
    other = 2 if mesh.tp != 2 else 1
    (claim,) = why_not(what_if, f"tp={other}")
    assert claim.relative is not None and claim.relative >= -0.003
    with pytest.raises(BadInputError, match="--why-not"):
        why(what_if, f"tp={other}")
    with pytest.raises(BadInputError, match="--why tp"):
        why_not(what_if, f"tp={mesh.tp}")
    with pytest.raises(BadInputError, match="KEY=VALUE"):
        why_not(what_if, "tensor=2")


def test_an_answer_that_is_no_says_why(what_if: WhatIf) -> None:
    (claim,) = why_not(what_if, "dp=8")
    assert claim.step_time_s is None and claim.relative is None and "dp=8" in claim.text


def test_the_command_prints_claims_and_one_object(
    what_if: WhatIf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.yaml"
    what_if.plan.save(path)
    assert main(["explain", str(path), "--why-not", "pp=4", "--json"]) == 0
    (claim,) = json.loads(capsys.readouterr().out)["claims"]
    assert claim["kind"] == "why not" and claim["change"] == "pp=4"
    assert main(["explain", str(path), "--why", "pp=7"]) == 2
