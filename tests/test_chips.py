"""Chips and kernels of other packages, what a chip runs, and code that its release of torch has."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from autoplan.cli import main
from autoplan.errors import BadInputError, BadProfileError
from autoplan.hardware import FUSED_KERNELS, load_profile, profile_names
from autoplan.plan import Plan
from autoplan.planner.driver import search_plan
from autoplan.planner.fusion_space import fused_kernels
from autoplan.runtime import devices, load
from autoplan.runtime.prepare import prepare_from_file
from autoplan_codegen.script import rewrite_script
from autoplan_codegen.versions import too_new
from autoplan_passes.fusions import GROUPED_PRODUCT, KERNELS

ROOT = Path(__file__).parents[1]
GPT, TRAIN = ROOT / "examples" / "gpt.py", ROOT / "examples" / "train.py"
MIXTRAL = Path(__file__).parent / "models" / "tiny_mixtral.py"
ONE_WAY = ("pp=1", "zero=0", "micro_batch=1", "schedule=1f1b", "sp=0")
RMS = Path(__file__).parent / "models" / "tiny_llama_hf.py"


@pytest.fixture(scope="module")
def mock_chip(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The example package, installed by pip into a folder on the path."""
    folder = tmp_path_factory.mktemp("installed")
    command = [*(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation")]
    subprocess.run(
        [*command, "--target", str(folder), str(ROOT / "examples" / "mock_chip")],
        check=True,
        capture_output=True,
    )
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    yield folder
    sys.path.remove(str(folder))


def test_another_package_brings_a_chip(
    mock_chip: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Only AUTOPLAN_HW says which chip it is: plan, script and launch command follow."""
    assert "mock-chip" in profile_names() and Path(load_profile("mock").file).is_relative_to(mock_chip)
    monkeypatch.setenv("AUTOPLAN_HW", "mock-chip")
    plan = search_plan(RMS, devices=1, global_batch=4, dtype="fp32", pins=("fuse=all", *ONE_WAY))
    used = {name for layout in plan.layouts.values() for name in layout.kernels}
    assert plan.hardware == "mock-chip" and used == {
        "linear_cross_entropy",
        "rms_norm",
        "add_rms_norm",
        "swiglu",
    }
    assert any(
        "rotary: the chip has no kernel for it" in text
        for layout in plan.layouts.values()
        for text in layout.unfused
    )
    monkeypatch.setenv("MOCK_CHIP_FAST", load_profile("mock").software.environment["MOCK_CHIP_FAST"])
    given: list[tuple[str, str]] = []

    def record(op: str, device: str, function: Callable[..., torch.Tensor]) -> None:
        assert function(torch.ones(1, 4), torch.ones(4), 1e-5).shape == (1, 4)
        given.append((op, device))

    monkeypatch.setattr(torch.library, "register_kernel", record)
    load.register_kernels(torch.device("cpu"))
    load.register_kernels(torch.device("cpu"))  # once is enough
    assert given == [("autoplan::rms_norm", "cpu")]


@pytest.mark.parametrize(
    ("field", "wrong", "said"),
    [
        ("device_type: cpu", "device_type: gpu of ours", "one of cpu, cuda"),
        ("collective_backend: gloo", "collective_backend: 'nccl or so'", "collective backend"),
        ('torch_version: "2.11 or later"', 'torch_version: "new"', "version of torch"),
        ("kernels: [flash_attention", "kernels: [flash_atention", "flash_attention"),
    ],
)
def test_a_profile_says_only_what_torch_knows(field: str, wrong: str, said: str, tmp_path: Path) -> None:
    """Any text passed as a device type, and failed on the cluster."""
    text = (ROOT / "hw_profiles" / "cpu.yaml").read_text()
    path = tmp_path / "cpu.yaml"
    path.write_text(text.replace(field, wrong))
    assert field in text
    with pytest.raises(BadProfileError, match=said):
        load_profile(str(path))


def test_devices_are_those_of_the_launch_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chip that is not CUDA's was run on the CPU without a word."""
    monkeypatch.setenv(devices.DEVICE_TYPE, "npu")
    monkeypatch.setenv(devices.BACKEND, "hccl")
    assert devices.collective_backend(torch.device("cpu")) == "hccl"
    with pytest.raises(BadInputError, match=r"torch\.npu"):
        devices.local_device()


def test_what_a_chip_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """The table of ``hw show``, and the names that profiles may use."""
    assert set(FUSED_KERNELS) == {*KERNELS} - {GROUPED_PRODUCT}
    assert main(["hw", "show", "kunlun", "--json"]) == 0
    operators = json.loads(capsys.readouterr().out)["operators"]
    assert (
        operators["rms_norm"] == "fused kernel"
        and operators["grouped products"] == "group by group (torch 2.5)"
    )
    assert fused_kernels(load_profile("cpu")) == ("linear_cross_entropy",)
    assert GROUPED_PRODUCT not in fused_kernels(load_profile("h100"))


def code_of(plan: Plan) -> list[str]:
    return [source.text for source in prepare_from_file(plan).sources]


@pytest.mark.parametrize(
    ("model", "pins"),
    [(MIXTRAL, ("ep=2", "dp=2", "recompute=none")), (RMS, ("tp=2", "dp=1", "recompute=selective"))],
    ids=["experts", "dense"],
)
def test_code_for_a_chip_is_of_its_release(model: Path, pins: tuple[str, ...]) -> None:
    """``torch._grouped_mm`` was written for a torch that does not have it."""
    profile = load_profile("kunlun")
    plan = search_plan(model, hw="kunlun", devices=2, global_batch=4, pins=(*pins, *ONE_WAY))
    assert profile.software.release == (2, 5)
    texts = code_of(plan)
    assert not [str(one) for text in texts for one in too_new(text, profile.software.release)]
    if model is MIXTRAL:
        assert "grouped_product(" in texts[0]


def test_scripts_are_of_the_release() -> None:
    """The table of releases finds imports, attributes and keywords."""
    assert not too_new(rewrite_script(TRAIN.read_text(), name="train.py", plan_path="plan.yaml").text, (2, 5))
    assert [str(one) for one in too_new("y = torch._grouped_mm(x, w, ends)", (2, 5))] == [
        "line 1: torch._grouped_mm needs torch 2.8"
    ]
    text = "import torch\nfrom torch.distributed.fsdp import fully_shard\ntorch.accelerator.count()\n"
    assert [str(one) for one in too_new(text, (2, 5))] == [
        "line 2: torch.distributed.fsdp.fully_shard needs torch 2.6",
        "line 3: torch.accelerator needs torch 2.6",
    ]
