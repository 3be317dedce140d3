"""What a cluster did corrects its profile: logs as three frameworks write them, traces as torch does."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autoplan.calibration.correction import with_sustained
from autoplan.calibration.forecasts import forecast_of_plan, forecast_of_settings
from autoplan.calibration.observed import observe
from autoplan.calibration.step_log import read_step_times
from autoplan.calibration.trace import read_trace
from autoplan.cli import main
from autoplan.errors import BadInputError
from autoplan.hardware import load_profile
from autoplan.importing.settings import read_settings
from autoplan.plan import Plan
from autoplan.planner.driver import search_plan
from autoplan_cost_models.collectives import traffic_factor

MODEL = Path(__file__).parent / "models" / "tiny_gpt.py"
TOKENS = 4096.0  # of one step on one device


def megatron(step: int, seconds: float) -> str:
    """As ``training_log`` of Megatron-LM core 0.14 writes it."""
    return (
        f" [2025-05-02 10:00:{step % 60:02d}] iteration {step:8d}/{100:8d} | "
        f"consumed samples: {512 * step:12d} | "
        f"elapsed time per iteration (ms): {seconds * 1e3:.1f} | throughput per GPU (TFLOP/s/GPU): 401.2 | "
        "learning rate: 1.000000E-05 | global batch size:   512 | lm loss: 1.034524E+01 | loss scale: 1.0 | "
        "grad norm: 1.202 | number of skipped iterations:   0 | number of nan iterations:   0 |"
    )


def torchtitan(step: int, seconds: float) -> str:
    """As torchtitan 0.3 writes it, colours included."""
    return (
        "[rank0]:[titan] 2025-05-02 10:00:00,123 - root - INFO - "
        f"\x1b[31mstep: {step:2}  \x1b[32mloss: 7.1234  "
        f"\x1b[38;2;180;60;0mgrad_norm:  1.0342  \x1b[38;2;54;234;195mmemory: 48.52GiB(51.07%)  "
        f"\x1b[34mtps: {round(TOKENS / seconds):,}  \x1b[36mtflops: 350.10  \x1b[35mmfu: 35.40%\x1b[39m"
    )


def autoplan(step: int, seconds: float) -> str:
    return json.dumps({"autoplan_step": step, "seconds": round(seconds, 6)})


WRITERS: dict[str, Callable[[int, float], str]] = {
    "megatron": megatron,
    "torchtitan": torchtitan,
    "autoplan": autoplan,
}


def write_log(path: Path, writer: str, seconds: float, count: int = 30) -> Path:
    """Slow first steps, a little noise, one step in which a disk was busy, lines of other things between."""
    rows: list[str] = ["setting up", "[rank0] loading step: none"]
    for step in range(1, count + 1):
        factor = 4.0 if step <= 3 else 3.0 if step == 20 else 1.0 + 0.01 * ((step * 7) % 5 - 2) / 2
        rows += [WRITERS[writer](step, seconds * factor), "validation loss at iteration 3 | ..."]
    path.write_text("\n".join(rows))
    return path


@pytest.mark.parametrize("writer", WRITERS)
def test_logs_are_read_as_they_are_written(writer: str, tmp_path: Path) -> None:
    """Warm-up counted as training, or a checkpoint's step, once made a cluster look twice as slow."""
    times = read_step_times(write_log(tmp_path / "run.log", writer, 0.8), TOKENS)
    assert times.written_by == writer
    assert times.median_s == pytest.approx(0.8, rel=2e-3) and times.spread == pytest.approx(0.01, abs=2e-3)
    assert times.warm_up == 3 and times.steps == 26
    assert [step for step, _ in times.outliers] == [20]
    with pytest.raises(BadInputError, match="has no line with a step's time"):
        (tmp_path / "other.log").write_text("loss 1.0\n")
        read_step_times(tmp_path / "other.log", TOKENS)
    with pytest.raises(BadInputError, match="expected at least 3"):
        read_step_times(write_log(tmp_path / "short.log", writer, 0.8, count=2), TOKENS)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Plan]:
    path = tmp_path_factory.mktemp("plan") / "plan.yaml"
    made = search_plan(MODEL, hw="cpu", devices=2, global_batch=4, dtype="fp32")
    made.save(path)
    return path, made


def test_a_log_corrects_the_forecast(
    plan: tuple[Path, Plan], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The share is found that made the log, and forecasts with the new profile are what was measured."""
    path, made = plan
    forecast = forecast_of_plan(made, None, None, lambda _: None)
    profile = load_profile("cpu")
    assert made.prediction is not None
    assert forecast.step_s(profile) == pytest.approx(made.prediction.step_time_s, rel=1e-6)
    true_s = forecast.step_s(with_sustained(profile, "fp32", 0.4))
    log = write_log(tmp_path / "run.log", "autoplan", true_s)
    mine = tmp_path / "mine.yaml"
    told = ["hw", "calibrate", "--from-log", str(log), "-o", str(mine)]
    assert main([*told, "--plan", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["log"]
    assert found["sustained_after"] == pytest.approx(0.4, rel=0.05) and abs(found["residual"]) < 1e-3
    assert forecast.step_s(load_profile(str(mine))) == pytest.approx(true_s, rel=0.01)
    assert load_profile(str(mine)).sustained["fp32"].tag == "measured"
    write_log(log, "autoplan", true_s * 1e3)  # no share explains this
    assert main([*told, "--plan", str(path)]) == 0
    assert "no matter of the matrix rate" in capsys.readouterr().out
    assert main(told) == 2


def test_settings_of_a_launch_script_are_forecast(tmp_path: Path) -> None:
    """Megatron's own log goes with Megatron's own script."""
    script = tmp_path / "launch.sh"
    script.write_text(
        "torchrun --nproc_per_node 2 pretrain_gpt.py --num-layers 2 --hidden-size 256 "
        "--num-attention-heads 4 --seq-length 512 --max-position-embeddings 512 "
        "--micro-batch-size 2 --global-batch-size 8 --bf16 --tensor-model-parallel-size 2 --vocab-size 1024\n"
    )
    settings = replace(read_settings(script, "megatron", {}), devices=2)
    forecast = forecast_of_settings(settings, "h100", None, lambda _: None)
    profile = load_profile("h100")
    assert forecast.tokens == 8 * 512 and forecast.devices == 2
    assert forecast.step_s(with_sustained(profile, "bf16", 0.2)) > forecast.step_s(profile) > 0


def device_trace(slow: float) -> dict[str, Any]:
    """Operators and kernels as kineto writes them for a GPU, ``slow`` times what the H100 profile says."""
    profile, events = load_profile("h100"), list[dict[str, Any]]()
    rates, launch_s = profile.gemm["bf16"], profile.launch_s.value

    def ran(name: str, dims: Any, types: Any, seconds: float, **more: Any) -> None:
        number = len(events) + 1
        at = {"ph": "X", "pid": 1, "tid": 1, "ts": 1000.0 * number}
        op = {"External id": number, "Input Dims": dims, "Input type": types}
        events.append({**at, "cat": "cpu_op", "name": name, "dur": 5.0, "args": op})
        kernel = {"External id": number, "stream": 7, **more}
        events.append({**at, "cat": "kernel", "name": "sm90_k", "dur": seconds * 1e6, "args": kernel})

    for m, n, k in ((8192, 4096, 4096), (8192, 14336, 4096), (2048, 4096, 14336)):
        seconds = launch_s + slow * 2 * m * n * k / rates.at(m, n, k)
        ran("aten::mm", [[m, k], [k, n]], ["c10::BFloat16"] * 2, seconds)
    for elements in (2**25, 2**27):
        size = 3 * 2 * elements
        eff = profile.memory_efficiency.at(size / 2**20)
        seconds = launch_s + slow * size / (profile.memory_bytes_per_s.value * eff)
        ran("aten::add", [[elements], [elements], []], ["c10::BFloat16", "c10::BFloat16", "Scalar"], seconds)
    for size in (2**20, 2**24, 2**28):
        for waits in (1.0, 1.0, 2.5):
            seconds = waits * (3e-5 + size * traffic_factor("all_reduce", 8) / 2e11)
            told = {"Collective name": "allreduce", "Group size": 8, "dtype": "BFloat16"}
            elements = {"In msg nelems": size // 2, "Out msg nelems": size // 2}
            ran("c10d::allreduce_", [], [], seconds, **told, **elements)
    far = {"Collective name": "allreduce", "Group size": 64, "dtype": "Float", "In msg nelems": 99}
    ran("c10d::allreduce_", [], [], 1e-3, **far)
    return {"schemaVersion": 1, "traceEvents": events}


def test_a_trace_moves_the_curves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rates, bandwidth and a collective's fit that made the trace are found; what waits is not bandwidth."""
    trace, mine = tmp_path / "trace.json", tmp_path / "mine.yaml"
    trace.write_text(json.dumps(device_trace(1.25)))
    assert (
        main(["hw", "calibrate", "--from-trace", str(trace), "--base", "h100", "-o", str(mine), "--json"])
        == 0
    )
    told = json.loads(capsys.readouterr().out)
    for fit in told["trace"]:
        assert fit["after"] < 0.01, fit
        if fit["what"] != "all_reduce on 8 ranks":
            assert fit["before"] == pytest.approx(0.2, abs=0.02)
    assert ["64 ranks" in text for text in told["left_out"]] == [True]
    base, profile = load_profile("h100"), load_profile(str(mine))
    assert profile.gemm["bf16"].at(8192, 4096, 4096) * 1.25 == pytest.approx(
        base.gemm["bf16"].at(8192, 4096, 4096), rel=0.01
    )
    assert profile.memory_bytes_per_s.value * 1.25 == pytest.approx(base.memory_bytes_per_s.value, rel=0.01)
    fit = next(one for one in profile.collectives["intra"]["all_reduce"] if one.ranks == 8)
    assert fit.bytes_per_s == pytest.approx(2e11, rel=0.02) and fit.alpha_s == pytest.approx(3e-5, rel=0.05)


def test_a_trace_of_the_profiler_is_read(tmp_path: Path) -> None:
    """What torch itself writes, so that a change of its format is seen."""
    a, b, big = torch.randn(256, 128), torch.randn(128, 512), torch.randn(2**22)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as ran:
        for _ in range(3):
            torch.mm(a, b)
            torch.nn.functional.linear(a, b.T, torch.zeros(512))
            torch.add(big, big)
    path = tmp_path / "trace.json.gz"
    ran.export_chrome_trace(str(path))
    times = read_trace(path)
    assert len(times.products["fp32", 1, 256, 512, 128]) >= 6
    assert len(times.moves[3 * 4 * 2**22]) == 3
    found = observe(times, load_profile("cpu"))
    assert {one.what for one in found.fitted} == {"fp32 products", "memory bandwidth"}
    assert all(one.after <= one.before + 1e-9 for one in found.fitted if one.shapes == 1)


@pytest.mark.parametrize("text", ["{", "[]", '{"traceEvents": []}', '{"a": 1}'])
def test_what_is_no_trace_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text(text)
    with pytest.raises(BadInputError, match=r"trace\.json"):
        read_trace(tmp_path / "trace.json")
