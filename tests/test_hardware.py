"""Hardware profiles: every file loads and is sane, every wrong file is refused with where and why."""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import math
from pathlib import Path

import pytest

from autoplan import profile_files
from autoplan.cli import hw
from autoplan.errors import AutoplanError, BadInputError, BadProfileError
from autoplan.hardware import (
    CollectiveFit,
    Curve,
    HardwareProfile,
    find_profile_files,
    load_profile,
    profile_names,
)

NAMES = [
    *("a100-40", "a100-80", "a800-80", "ascend-910b", "b200", "b300", "cpu", "gb200"),
    *("h100", "h200", "h800", "kunlun-p800", "mi300x"),
]
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p")


@pytest.fixture(scope="module")
def profiles() -> dict[str, HardwareProfile]:
    return {name: load_profile(name) for name in profile_names()}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the P800's file, to be spoiled."""
    path = tmp_path / "kunlun-p800.yaml"
    path.write_text(Path(load_profile("kunlun").file).read_text(encoding="utf-8"), encoding="utf-8")
    return path


def test_all_chips_are_there(profiles: dict[str, HardwareProfile]) -> None:
    """A file that was not packaged, or named unlike its chip, would vanish from the list."""
    assert list(profiles) == NAMES
    assert [path.stem for path in find_profile_files()] == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_number_says_where_it_is_from(profiles: dict[str, HardwareProfile], name: str) -> None:
    """A number without tag or source passed for a fact; short source names must all be resolved."""
    numbers = list(profiles[name].sourced())
    assert len(numbers) > 30
    for path, number in numbers:
        assert number.tag in ("datasheet", "measured", "estimated"), path
        assert len(number.source) > 6, path
        assert not number.source.startswith("/"), path


@pytest.mark.parametrize("name", NAMES)
def test_rates_are_possible(profiles: dict[str, HardwareProfile], name: str) -> None:
    """A scaled curve once ran above the peak; a mistyped point makes a curve jump."""
    profile = profiles[name]
    for dtype, rates in profile.gemm.items():
        assert rates.best_flops_per_s <= profile.peak_flops[dtype].value
        assert _dips(rates.by_m) < 0.11  # the B300 is measured 10% slower at 8192 rows than at 2048
        assert max(rates.by_n.y) <= 1 >= max(rates.by_k.y)
        assert _dips(rates.by_n) < 0.1 > _dips(rates.by_k)
    dense = max(profile.peak_flops.get(d, profile.peak_flops["fp32"]).value for d in ("bf16", "fp32"))
    for curve in profile.attention:
        assert max(curve.by_sequence.y) < dense
        assert _dips(curve.by_sequence) < 0.1
    found = {(c.direction, c.causal, c.head_dim) for c in profile.attention}
    assert {(d, c, 64) for d in ("forward", "backward") for c in (True, False)} <= found
    assert 0.5 < max(profile.memory_efficiency.y) <= 1.5


@pytest.mark.parametrize("name", NAMES)
def test_cluster_is_possible(profiles: dict[str, HardwareProfile], name: str) -> None:
    """A network faster than its card, or memory reserved beyond what there is, makes every plan wrong."""
    profile = profiles[name]
    assert profile.devices_per_node % profile.fast_domain == 0
    assert profile.reserve_bytes.value < 0.2 * profile.memory_bytes.value
    assert set(profile.collectives) == {"intra", "inter"}
    for span, kinds in profile.collectives.items():
        assert tuple(kinds) == KINDS
        for fits in kinds.values():
            assert [f.ranks for f in fits] == sorted({f.ranks for f in fits})
            for fit in fits:
                assert fit.bytes_per_s <= profile.nic_bytes_per_s.value or span == "intra"
                assert 0 < fit.alpha_s + fit.ramp_s < 0.05


def test_profiles_agree_with_published_facts(profiles: dict[str, HardwareProfile]) -> None:
    """The facts plans hang on most, each from its own source, not from the file under test."""
    p800 = profiles["kunlun-p800"]
    assert p800.memory_bytes.value / 2**30 == pytest.approx(95.83)
    assert p800.memory_bytes_per_s.value == pytest.approx(2237e9)
    assert (p800.devices_per_node, p800.fast_domain) == (8, 4)
    assert p800.gemm["bf16"].at(8192, 8192, 8192) == pytest.approx(180e12, rel=0.02)
    assert 255e12 < p800.gemm["fp16"].at(8192, 8192, 8192) < 270e12
    assert 112e12 < p800.gemm["fp32"].at(8192, 8192, 8192) < 119e12
    assert p800.software.environment["XMLIR_MATMUL_FAST_MODE"] == "1"
    assert p800.software.visible_devices_variables == ("CUDA_VISIBLE_DEVICES", "XPU_VISIBLE_DEVICES")
    assert (p800.software.device_type, p800.software.collective_backend) == ("cuda", "nccl")
    assert "fp8" in p800.forbidden
    assert p800.peak_flops["bf16"].tag == "estimated"
    # NVIDIA data sheets; NCCL 2.27-2.29 tables: 512 MiB all-reduce on 8 GPUs at 222, 445 and 704 GB/s.
    for name, peak, bus in (("a100-80", 312e12, 222e9), ("h100", 989e12, 445e9), ("b200", 2250e12, 704e9)):
        assert profiles[name].peak_flops["bf16"].value == peak
        fit = profiles[name].collectives["intra"]["all_reduce"][-1]
        assert _bus_bandwidth(fit, 2**29) == pytest.approx(bus, rel=0.08)


LOOKUPS = [
    ("kunlun", None, "kunlun-p800"),
    ("KUNLUN", None, "kunlun-p800"),
    ("a100", None, "a100-80"),
    ("h100", "kunlun", "h100"),
    (None, "kunlun", "kunlun-p800"),
    (None, " a800 ", "a800-80"),
]


@pytest.mark.parametrize(("name", "environment", "expected"), LOOKUPS)
def test_lookup(
    monkeypatch: pytest.MonkeyPatch, name: str | None, environment: str | None, expected: str
) -> None:
    """`--hw` wins over AUTOPLAN_HW; aliases work in both."""
    monkeypatch.delenv("AUTOPLAN_HW", raising=False)
    if environment:
        monkeypatch.setenv("AUTOPLAN_HW", environment)
    assert load_profile(name).name == expected


@pytest.mark.parametrize(
    ("name", "fragments"),
    [
        ("kunlum", ["`kunlum`", "Did you mean `--hw kunlun`?", "a100-80, a800-80", "mi300x"]),
        ("zzz", ["`zzz`", "Known: a100-40"]),
        (None, ["--hw NAME", "AUTOPLAN_HW", "kunlun-p800"]),
        ("", ["--hw NAME"]),
    ],
)
def test_unknown_name(monkeypatch: pytest.MonkeyPatch, name: str | None, fragments: list[str]) -> None:
    """An unknown chip lists what is known and the nearest; exit code 2."""
    monkeypatch.delenv("AUTOPLAN_HW", raising=False)
    with pytest.raises(BadInputError) as caught:
        load_profile(name)
    assert caught.value.exit_code == 2
    _says(caught.value, fragments)


def test_path_and_fingerprint(copy: Path) -> None:
    """A comment must not make a plan stale; a changed number must."""
    own = load_profile("kunlun")
    assert load_profile(str(copy)).fingerprint == own.fingerprint
    text = copy.read_text(encoding="utf-8")
    copy.write_text("# a comment\n" + text, encoding="utf-8")
    assert load_profile(str(copy)).fingerprint == own.fingerprint
    copy.write_text(text.replace("value: 95.83", "value: 90"), encoding="utf-8")
    changed = load_profile(str(copy))
    assert changed.fingerprint != own.fingerprint
    assert changed.memory_bytes.value == 90 * 2**30


USABLE = "usable_gib: {value: 95.83, tag: measured, source: closeout}"
FIT = "ranks: 2, alpha_us: 20, gb_per_s: 28.9"
BAD_FILES = [
    ("{value: 95.83, tag", "{value: 102896762880, tag", ["memory.usable_gib.value", "GiB", "102896762880"]),
    ("{value: 95.83, tag", "{value: 0.0000001, tag", ["memory.usable_gib.value", "between 0.25 and 4096"]),
    ("{value: 95.83, tag", "{value: lots, tag", ["memory.usable_gib.value", "a number of GiB", "'lots'"]),
    ("{value: 95.83, tag", "{value: 9e1, tag", ["memory.usable_gib.value", "1.0e+12"]),
    ("{value: 95.83, tag", "{value: true, tag", ["memory.usable_gib.value", "got True"]),
    ("{value: 95.83, tag", "{value: .nan, tag", ["memory.usable_gib.value", "got nan"]),
    (USABLE, "usable_gib: 95.83", ["memory.usable_gib", "a mapping", "got 95.83"]),
    (USABLE, "usable_gib: {value: 95.83, source: closeout}", ["memory.usable_gib", "field `tag`"]),
    (USABLE, "usable_gib: {value: 95.83, tag: measured}", ["memory.usable_gib", "field `source`"]),
    (USABLE, "usable_gib: {value: 9, tag: guess, source: x}", ["usable_gib.tag", "measured", "'guess'"]),
    (USABLE, "usable_gib: {value: 9, tag: measured, source: ''}", ["usable_gib.source", "a text"]),
    ("usable_gib:", "usable_gb:", ["memory.usable_gb", "unknown field", "Did you mean `usable_gib`?"]),
    ("launch_us:", "launch:", ["unknown field `launch`", "Did you mean `launch_us`?"]),
    ("vendor: Kunlunxin\n", "", ["the field `vendor`", "Add a line"]),
    ("name: kunlun-p800", "name: p900", ["name:", "the file's own name `kunlun-p800`", "'p900'"]),
    ("aliases: [kunlun, p800, kl3, xpu3]", "aliases: kunlun", ["aliases", "a list"]),
    ("fp16: {like: bf16", "fp16: {like: fp32", ["gemm.fp16.like", "one of bf16"]),
    ("best_tflops: 259", "best_tflops: 400", ["gemm.fp16", "no rate above the fp16 peak", "400 TFLOP/s"]),
    ("fp16: {like", "fp17: {like", ["gemm.fp17", "Did you mean `fp16`?"]),
    ("  fp32: {value: 122.14", "  int8: {value: 122.14", ["gemm.fp32", "peak_tflops to have the dtype"]),
    ("m: [1, 16, 64,", "m: [1, 64, 16,", ["by_m.m", "ascending order"]),
    ("m: [1, 16, 64,", "m: [1, 16,", ["by_m.tflops", "as many values as m (9)", "got 10"]),
    ("fast_domain: {value: 4", "fast_domain: {value: 3", ["node.fast_domain", "divides devices_per_node"]),
    ("fast_domain: {value: 4", "fast_domain: {value: 2.5", ["node.fast_domain", "whole number"]),
    (FIT, FIT.replace("ranks: 2", "ranks: 1"), ["all_reduce[0].ranks", "whole number between 2"]),
    (FIT, FIT.replace("ranks: 2", "ranks: 8"), ["all_reduce[1].ranks", "ascending ranks"]),
    (FIT, FIT.replace("28.9", "28900000000"), ["all_reduce[0].gb_per_s", "GB/s (1e9 bytes/s)"]),
    ("  intra:\n", "  inside:\n", ["collectives.inside", "unknown field", "intra, inter"]),
    ("direction: forward", "direction: foward", ["attention[0].direction", "Did you mean `forward`?"]),
    ("causal: true", "causal: 1", ["attention[0].causal", "true or false"]),
    ("[flash_attention,", "[flash_atention,", ["kernels[0]", "Did you mean `flash_attention`?"]),
    ('FAST_MODE: "1"', "FAST_MODE: 1", ["environment.XMLIR_MATMUL_FAST_MODE", "put numbers in quotes"]),
    ("vendor: Kunlunxin\n", "vendor: A\nvendor: B\n", ["vendor", "each field once"]),
    ("vendor: Kunlunxin\n", "vendor: [\n", ["expected YAML", "in line"]),
    ("usable_gib: {value: 95.83", "usable_gib: {value: 0.5", ["memory.reserve_gib", "less than usable_gib"]),
    ("vendor: Kunlunxin\n", "vendor: !!python/object:os.system x\n", ["expected YAML"]),
]


@pytest.mark.parametrize(("old", "new", "fragments"), BAD_FILES)
def test_bad_file(copy: Path, old: str, new: str, fragments: list[str]) -> None:
    """Each wrong entry is refused with the file, where in it, what was expected and what came."""
    text = copy.read_text(encoding="utf-8")
    assert old in text
    copy.write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(BadProfileError) as caught:
        load_profile(str(copy))
    assert caught.value.exit_code == 2
    _says(caught.value, [str(copy), "expected", *fragments])


def test_bad_file_names_the_line(copy: Path) -> None:
    """A wrong number among 150 lines has to be found without searching."""
    lines = copy.read_text(encoding="utf-8").splitlines()
    line = next(i for i, text in enumerate(lines) if "95.83" in text)
    lines[line] = lines[line].replace("95.83", "-1")
    copy.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(BadProfileError, match=rf":{line + 1}: memory\.usable_gib\.value"):
        load_profile(str(copy))


@pytest.mark.parametrize(
    ("content", "fragment"),
    [(None, "readable YAML file"), ("", "empty"), ("[1]", "a mapping"), ("3", "a mapping")],
)
def test_unreadable_file(tmp_path: Path, content: str | None, fragment: str) -> None:
    """A missing, empty or wholly different file is one sentence, not a traceback."""
    path = tmp_path / "chip.yaml"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(BadProfileError, match=fragment):
        load_profile(str(path))


class _Point:
    def __init__(self, target: Path) -> None:
        self.target = target

    def load(self) -> str:
        return str(self.target)


def test_other_packages_add_profiles(monkeypatch: pytest.MonkeyPatch, copy: Path) -> None:
    """An entry point may be a folder; its names and aliases work, ours win over equal aliases."""
    own = copy.with_name("my-chip.yaml")
    text = copy.read_text(encoding="utf-8").replace("name: kunlun-p800", "name: my-chip")
    own.write_text(text.replace("aliases: [kunlun,", "aliases: [mine, kunlun,"), encoding="utf-8")
    copy.unlink()
    monkeypatch.setattr(profile_files, "entry_points", lambda group: [_Point(own.parent)])  # pyright: ignore
    assert "my-chip" in profile_names()
    assert load_profile("my-chip").name == load_profile("mine").name == "my-chip"
    assert load_profile("kunlun").name == "kunlun-p800"
    own.rename(own.with_name("h100.yaml"))
    with pytest.raises(BadProfileError, match="a name of its own"):
        profile_names()


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """`hw list` and `hw show` print one JSON object each, and mark estimates in the tables."""
    listed = json.loads(_run(capsys, "list", "--json"))
    assert [profile["name"] for profile in listed["profiles"]] == NAMES
    kunlun = json.loads(_run(capsys, "show", "kunlun", "--json"))
    assert kunlun["memory_gib"] == pytest.approx(95.83)
    assert len(kunlun["numbers"]) > 50
    assert all(number["tag"] and number["source"] for number in kunlun["numbers"])
    table = _run(capsys, "show", "kunlun")
    assert "~345 TFLOP/s" in table
    assert "95.83 GiB" in table and "~95.83" not in table
    assert "kunlun-p800" in _run(capsys, "list")


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    parser = argparse.ArgumentParser()
    hw.add_parser(parser.add_subparsers())
    args = parser.parse_args(["hw", *arguments])
    assert args.run(args) == 0
    return capsys.readouterr().out


def _says(error: AutoplanError, fragments: list[str]) -> None:
    for fragment in fragments:
        assert fragment in str(error)


def _dips(curve: Curve) -> float:
    """The deepest fall of a curve below what it had reached, as a fraction."""
    highest, deepest = curve.y[0], 0.0
    for value in curve.y:
        highest = max(highest, value)
        deepest = max(deepest, 1 - value / highest)
    return deepest


def _bus_bandwidth(fit: CollectiveFit, size: int) -> float:
    factor = 2 * (fit.ranks - 1) / fit.ranks
    ramp = fit.ramp_s * size / (size + fit.ramp_bytes)
    return size * factor / (fit.alpha_s + size * factor / fit.bytes_per_s + ramp)


def test_curve_interpolates_in_log_x() -> None:
    """Halfway between powers of two in log x is halfway in y; outside is flat."""
    curve = Curve((1.0, 4.0), (10.0, 30.0), "measured", "x")
    for x, y in ((0.5, 10.0), (1, 10.0), (2, 20.0), (4, 30.0), (9, 30.0), (math.sqrt(2), 15.0)):
        assert curve.at(x) == pytest.approx(y)


def test_fits_recover_known_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fitter must give back the curves that made the data; a wrong F once halved all bandwidths."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "tools"))
    collectives = importlib.import_module("fit_collectives")
    known = collectives.Fit(8, 20.0, 300.0, 60.0, 4.0, "measured", "made up")
    for kind in ("all_reduce", "all_gather", "all_to_all"):
        points = [(2.0**e, known.time_us(kind, 2.0**e)) for e in range(9, 31)]
        fit = collectives.fit_points(points, kind, 8, "measured", "made up")
        assert (fit.alpha_us, fit.gb_per_s, fit.ramp_us) == pytest.approx((20.0, 300.0, 60.0), rel=1e-6)
        assert fit.error < 1e-9
    gemm = importlib.import_module("fit_gemm")
    by_m = {256: 300.0, 2048: 500.0, 4096: 600.0}
    factor = {512: 0.6, 2048: 0.9, 4096: 1.0, 8192: 1.0}
    products = []
    for m, n, k in itertools.product(by_m, factor, factor):
        seconds = gemm.LAUNCH_S + 2.0 * m * n * k / (by_m[m] * factor[n] * factor[k] * 1e12)
        products.append(gemm.Product(m, n, k, 2.0 * m * n * k / seconds / 1e12))
    fit = gemm.fit_products(products)
    assert fit.by_n == pytest.approx(factor, rel=1e-6)
    assert fit.by_k == pytest.approx(factor, rel=1e-6)
    assert fit.by_m_tflops == pytest.approx(by_m, rel=1e-6)
    assert fit.held_out.p90 < 1e-6
