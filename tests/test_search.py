"""The search on small models: pins, certificates, defaults and what is said when nothing fits."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from autoplan.capture import capture_model
from autoplan.cli import main
from autoplan.errors import BadInputError, InfeasibleError
from autoplan.hardware import load_profile
from autoplan.plan import Mesh, Plan, Workload
from autoplan.planner.balance import balanced_cut
from autoplan.planner.chain import quick_bound_s, without_once
from autoplan.planner.columns import solve_chain
from autoplan.planner.driver import search_plan
from autoplan.planner.mixes import ColumnPricer
from autoplan.planner.model_costs import ModelCosts
from autoplan.planner.pricing import Pricing
from autoplan.planner.space import Pins, candidates, divisors, parse_pins, require_pinned_regions
from autoplan.runtime.check import run_check
from autoplan_cost_models import CostModel

EXAMPLES = Path(__file__).parent.parent / "examples"
GPT = EXAMPLES / "gpt.py"


@pytest.fixture(scope="module")
def gpt_plan() -> Plan:
    return search_plan(GPT, hw="cpu", devices=4, global_batch=16)


def test_plan_states_everything(gpt_plan: Plan) -> None:
    """A plan once came without the assumptions the search had made."""
    assert any("--dtype" in assumption for assumption in gpt_plan.assumptions)
    assert any("--optimizer" in assumption for assumption in gpt_plan.assumptions)
    (part,) = gpt_plan.parts
    assert part.mesh.devices == 4
    assert part.micro_batch * part.microbatches * part.mesh.dp == 16
    assert [r.region for s in part.stages for r in s.regions] == [
        "embed",
        *(f"blocks.{i}" for i in range(4)),
        "head",
    ]


def test_certificate_bounds_the_plan(gpt_plan: Plan) -> None:
    """The bound must never pass the simulated step time."""
    certificate, prediction = gpt_plan.certificate, gpt_plan.prediction
    assert certificate is not None and prediction is not None
    assert 0 < certificate.bound_s <= certificate.objective_s == prediction.step_time_s
    assert certificate.gap == pytest.approx(1 - certificate.bound_s / certificate.objective_s)
    assert sum(prediction.breakdown_s.values()) == pytest.approx(prediction.step_time_s)


def test_runners_up_lose_and_fit(gpt_plan: Plan) -> None:
    """What a plan is compared with must be legal, another mesh or schedule, and no faster."""
    (part,), told = gpt_plan.parts, gpt_plan.prediction
    assert told is not None and len(gpt_plan.runners_up) >= 2
    times = [other.step_time_s for other in gpt_plan.runners_up]
    assert times == sorted(times) and times[0] >= told.step_time_s * (1 - 1e-9)
    limit = min(s.prediction.memory_limit_bytes for s in part.stages if s.prediction)
    for other in gpt_plan.runners_up:
        kinds = [(one.mesh, one.zero, one.schedule, one.vpp) for one in (other, part)]
        assert kinds[0] != kinds[1] and other.memory_peak_bytes <= limit
        assert other.mesh.devices == 4 and sum(other.recompute.values()) == 6
        assert sum(other.breakdown_s.values()) == pytest.approx(other.step_time_s)


@pytest.fixture(scope="module")
def two_nodes() -> Pricing:
    """The whole space of a small model on two nodes of eight."""
    profile = load_profile("h100")
    capture = capture_model(GPT, dtype="bf16")
    costs = ModelCosts(capture, CostModel(profile, "bf16"), lambda _: None)
    workload = Workload(16, 256, dtype="bf16", tokens_per_sample=capture.tokens_per_sample)
    options = candidates(16, 256, costs.tp_degrees(8), len(costs.regions), Pins(), node=8)
    return Pricing(costs, profile, workload, Pins(), options)


def test_zero_options_are_all_replicas_and_groups_of_nodes(two_nodes: Pricing) -> None:
    """ZeRO over half a node, or of one replica, once doubled the space for nothing."""
    found = {(c.mesh.dp, c.mesh.tp, c.zero, c.zero_shard) for c in two_nodes.candidates if c.mesh.pp == 1}
    assert {(z, s) for dp, tp, z, s in found if (dp, tp) == (16, 1)} == {
        (0, 0), (1, 0), (1, 8), (2, 0), (2, 8), (3, 0), (3, 8)
    }  # fmt: skip
    assert {s for dp, tp, z, s in found if (dp, tp) == (8, 2)} == {0, 4}
    assert {s for dp, tp, z, s in found if dp == 1} <= {0}
    pinned = candidates(16, 256, [1], 1, Pins(zero=1, zero_shard=4), node=8)
    assert {(c.zero, c.zero_shard) for c in pinned} == {(1, 4)}


def test_no_plan_beats_its_bounds(two_nodes: Pricing) -> None:
    """A bound that forgot what overlaps, or counted a tied table twice, ruled out better plans unseen."""
    checked = 0
    for candidate in two_nodes.candidates[::3]:
        chain = two_nodes.chain(candidate)
        cut = balanced_cut(ColumnPricer(chain))
        if cut is None:
            continue
        assert two_nodes.could_fit(candidate)
        step_s = two_nodes.priced(candidate, cut).prediction.step_time_s * (1 + 1e-9)
        assert quick_bound_s(without_once(chain)) <= quick_bound_s(chain) <= step_s, candidate
        if candidate.microbatches >= candidate.mesh.pp and checked % 10 == 0:
            assert solve_chain(chain).bound_s <= step_s, candidate
        checked += 1
    assert checked > 60


@pytest.mark.parametrize(
    ("pins", "mesh"),
    [
        (("tp=2",), {"tp": 2}),
        (("pp=2",), {"pp": 2}),
        (("dp=4",), {"dp": 4}),
        (("pp=2", "dp=1", "tp=2"), {"pp": 2, "dp": 1, "tp": 2}),
    ],
)
def test_no_pinned_plan_beats_the_free_one(
    gpt_plan: Plan, pins: tuple[str, ...], mesh: dict[str, int]
) -> None:
    """Pins are obeyed, and the certificate holds: no pinned plan is faster than the bound."""
    pinned = search_plan(GPT, hw="cpu", devices=4, global_batch=16, pins=pins)
    found = dataclasses.asdict(pinned.parts[0].mesh)
    assert {axis: found[axis] for axis in mesh} == mesh
    assert pinned.prediction is not None and gpt_plan.certificate is not None
    assert pinned.prediction.step_time_s >= gpt_plan.certificate.bound_s * (1 - 1e-9)


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


def test_nothing_fits_says_what_does(tmp_path: Path) -> None:
    """The answer to a model too large names the limit, three contributors and a cluster that fits."""
    model = tmp_path / "wide.py"
    model.write_text(
        "import torch\nfrom torch import nn\n\n\nclass Wide(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.blocks = nn.ModuleList(nn.Linear(16384, 16384) for _ in range(16))\n\n"
        "    def forward(self, x):\n        for block in self.blocks:\n            x = x + block(x)\n"
        "        return x.square().mean()\n\n\n"
        "def build_model():\n    return Wide()\n\n\n"
        "def example_inputs(batch_size):\n    return {'x': torch.randn(batch_size, 16384)}\n"
    )
    with pytest.raises(InfeasibleError) as caught:
        search_plan(model, hw="cpu", devices=2, global_batch=8)
    message = str(caught.value)
    assert caught.value.exit_code == 1
    assert message.count(" GiB  ") == 3 and "--devices 6 (the smallest count that fits)" in message
    assert search_plan(model, hw="cpu", devices=6, global_batch=8).workload.devices == 6
    plan = search_plan(model, hw="cpu", global_batch=8)
    assert plan.workload.devices == 8
    assert any("--devices" in assumption for assumption in plan.assumptions)


SMALL = """
from torch import nn, randn

class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Conv1d(8, 8, 1), nn.BatchNorm1d(8), nn.Conv1d(8, 1, 1)

    def forward(self, x):
        return self.last(self.norm(self.first(x))).square().mean()

def build_model():
    return Small()

def example_inputs(batch_size):
    return {"x": randn(batch_size, 8, 4)}
"""


def test_batch_norm_is_told_and_its_way_out_holds(tmp_path: Path) -> None:
    """A plan for batch norm failed `check` without a word on why."""
    model = tmp_path / "small.py"
    model.write_text(SMALL)
    pins = ("dp=1", "micro_batch=8")
    plan = search_plan(model, hw="cpu", devices=2, global_batch=8, pins=pins)
    assert any(text.startswith("batch norm") for text in plan.assumptions)
    assert run_check(plan, model).ok


PAIRS = """
import torch
from torch import nn

class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.text, self.image = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))

    def forward(self, x, y):
        logits = self.text(x) @ self.image(y).T
        return nn.functional.cross_entropy(logits, torch.arange(len(x)))

def build_model():
    return Pairs()

def example_inputs(batch_size):
    return {"x": torch.randn(batch_size, 8), "y": torch.randn(batch_size, 8)}
"""
ALONE = PAIRS.replace("@ self.image(y).T", "* self.image(y)").replace("torch.arange(len(x))", "y.softmax(1)")


def test_a_loss_over_pairs_of_samples_keeps_the_batch_whole(tmp_path: Path) -> None:
    """A contrastive loss was planned with dp and micro-batches, and trained on another loss."""
    model = tmp_path / "pairs.py"
    model.write_text(PAIRS)
    plan = search_plan(model, hw="cpu", devices=2, global_batch=48)
    (part,) = plan.parts
    assert (part.mesh.dp, part.micro_batch, part.microbatches) == (1, 48, 1)
    assert any(text.startswith("dp=1 and micro_batch=48") for text in plan.assumptions)
    assert run_check(plan, model).ok


@pytest.mark.parametrize(
    ("text", "options", "says"),
    [
        (PAIRS, {"pins": ("dp=2",)}, r"--pin dp=2: at .*pairs.py:11.*pin dp=1"),
        (PAIRS, {"pins": ("micro_batch=2",)}, r"--pin micro_batch=2: at .*pairs.py:11.*pin micro_batch=8"),
        (PAIRS, {"devices": 64}, r"pairs.py:11: the loss pairs.*--devices \d+` or"),
        (ALONE, {"pins": ("micro_batch=1",)}, "fewer than 2 samples. Type --pin micro_batch=2"),
        (ALONE, {"global_batch": 1}, "multiple of dp x micro-batch .2, 4."),
    ],
)
def test_what_the_batch_cannot_be_is_refused(
    tmp_path: Path, text: str, options: dict[str, Any], says: str
) -> None:
    """The model decides which batches mean the same; a pin against that gave a wrong plan."""
    model = tmp_path / "pairs.py"
    model.write_text(text)
    chosen: dict[str, Any] = {"hw": "cpu", "devices": 2, "global_batch": 8, **options}
    with pytest.raises(BadInputError, match=says):
        search_plan(model, **chosen)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("return Small()", "return Small().requires_grad_(False)", "requires_grad, and none is"),
        (".square()", ".square().detach()", "its loss depends on none"),
    ],
)
def test_a_model_that_cannot_train_is_refused(tmp_path: Path, old: str, new: str, says: str) -> None:
    """It was planned, and training it ended in a traceback."""
    model = tmp_path / "small.py"
    model.write_text(SMALL.replace(old, new))
    with pytest.raises(BadInputError, match=says):
        search_plan(model, hw="cpu", devices=2)


def test_command_line_json_and_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--json`` prints one object with the documented keys and nothing else."""
    out = tmp_path / "plan.yaml"
    code = main(
        ["search", str(GPT), "--hw", "cpu", "--devices", "2", "--global-batch", "8", "-o", str(out), "--json"]
    )
    assert code == 0
    found = json.loads(capsys.readouterr().out)
    documented = (
        "plan hardware devices step_time_s tokens_per_s mfu memory_gib mesh parts micro_batch microbatches "
        "schedule stages certificate wall_s"
    )
    assert set(documented.split()) <= set(found)
    assert {"import", "capture", "cost", "search", "total"} == set(found["wall_s"])
    assert found["plan"] == str(out) and Plan.load(out).workload.devices == 2
    assert main(["search", str(tmp_path / "none.py"), "--hw", "cpu"]) == 2
    assert main(["search", str(GPT), "--hw", "kunlunn"]) == 2
    assert main(["search", str(GPT), "--hw", "cpu", "--devices", "0"]) == 2
    assert main(["search", str(GPT), "--hw", "cpu", "-o", str(tmp_path)]) == 2
    capsys.readouterr()


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("serch", "Did you mean `search`?"),
        ("search model.py --hww cpu", "Did you mean `--hw`?\nType `autoplan search --help`"),
        ("search model.py --dtype bf61", "Did you mean `bf16`?"),
        ("hw lst", "Did you mean `list`?"),
        ("search model.py other.py", "unknown argument other.py"),
        ("search model.py --devices two", "expected a whole number of at least 1, got 'two'"),
    ],
)
def test_slips_of_the_keyboard_name_what_was_meant(
    typed: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unknown options named neither the nearest one nor the command they were typed for."""
    assert main(typed.split()) == 2
    assert says in capsys.readouterr().err
    assert main([*typed.split(), "--json"]) == 2
    assert says in json.loads(capsys.readouterr().out)["error"]


def test_what_the_model_prints_stays_out_of_the_json(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A ``print`` in model.py came before the object."""
    noisy = tmp_path / "noisy.py"
    noisy.write_text(GPT.read_text() + '\nprint("hello")\n')
    typed = ["search", str(noisy), "--hw", "cpu", "--devices", "1", "-o", str(tmp_path / "p.yaml"), "--json"]
    with open(1, "w", closefd=False) as standard_output, contextlib.redirect_stdout(standard_output):
        assert main(typed) == 0
    told = capfd.readouterr()
    assert json.loads(told.out)["devices"] == 1 and "hello" in told.err


def test_a_module_in_memory_plans_like_its_file(gpt_plan: Plan) -> None:
    """``autoplan.search(model, inputs)`` plans the same model, and leaves its weights alone."""
    import importlib.util

    import torch

    import autoplan

    spec = importlib.util.spec_from_file_location("gpt_in_memory", GPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.build_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plan = autoplan.search(model, module.example_inputs(3), hw="cpu", devices=4, global_batch=16)
    assert plan.model.fingerprint == gpt_plan.model.fingerprint
    assert plan.prediction is not None and gpt_plan.prediction is not None
    assert plan.prediction.step_time_s == pytest.approx(gpt_plan.prediction.step_time_s)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_paired_samples_are_priced_with_their_square(tmp_path: Path) -> None:
    """A contrastive batch was priced linearly: 0.4 MB where one [B, B] tensor takes 67 MB."""
    model = tmp_path / "pairs.py"
    model.write_text(
        "import torch\nfrom torch import nn\nfrom torch.nn import functional as F\n\n\n"
        "class Pairs(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)\n\n"
        "    def forward(self, x, y):\n        scores = self.a(x) @ self.b(y).T\n"
        "        return F.cross_entropy(scores, torch.arange(len(scores)))\n\n\n"
        "def build_model():\n    return Pairs()\n\n\n"
        "def example_inputs(batch_size):\n    x, y = torch.randn(2, batch_size, 8)\n"
        "    return {'x': x, 'y': y}\n"
    )
    peaks = []
    for batch in (1024, 2048):
        plan = search_plan(model, hw="cpu", devices=1, global_batch=batch)
        (stage,) = plan.parts[0].stages
        assert stage.prediction is not None and plan.parts[0].micro_batch == batch
        peaks.append(stage.prediction.memory_peak_bytes)
    assert peaks[1] > 3.5 * peaks[0] and peaks[0] > 3 * 1024 * 1024 * 4
