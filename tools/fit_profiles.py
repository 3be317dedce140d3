"""Measurement tables in, the fitted part of ``hw_profiles/*.yaml`` rewritten, residuals printed.

``python tools/fit_profiles.py DATA_FOLDER [--profiles hw_profiles] [CHIP ...]``: the folder holds
``gemm_efficiency.csv``, ``attention_efficiency.csv`` and ``collective_busbw.csv``. What stands above the
marker line of a profile is written by hand and left alone. One recipe a chip says which measurements it
has and which relative stands in (tagged estimated) where it has none.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import fit_attention as attention
import fit_collectives as collectives
import fit_gemm as gemm
import yaml
from write_profile import GemmSection, Like, Sections, write_sections

AZURE = "Azure/AI-benchmarking-guide@8fd0c6e:Azure_Results/ND_{}_v{}_results.md (BabelStream triad)"
RAMP = "; below 64 MiB a memory latency of 0.7 us assumed"
SIMUMAX = "MooreThreads/SimuMax@4dcaae5:configs/system/b200_bf16_ceperm.json"


@dataclass(frozen=True)
class Tables:
    """The measurement tables and the fits several chips share, made once."""

    folder: Path

    def rows(self, name: str) -> list[dict[str, str]]:
        with (self.folder / name).open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    @cached_property
    def products(self) -> list[dict[str, str]]:
        return self.rows("gemm_efficiency.csv")

    @cached_property
    def collective_rows(self) -> list[dict[str, str]]:
        return self.rows("collective_busbw.csv")

    @cached_property
    def attention_rows(self) -> attention.Measurements:
        return attention.Measurements(self.rows("attention_efficiency.csv"))

    def fit_gemm(self, chip: str, dtype: str, method: str) -> tuple[gemm.GemmFit, str]:
        """The fit of one table, and its source."""
        found = gemm.fit_products(gemm.select_products(self.products, chip, dtype, method))
        source = next(
            row["source"]
            for row in self.products
            if row["chip"] == chip and row["dtype"] == dtype and method in row["method"]
        )
        return found, source


@dataclass(frozen=True)
class Recipe:
    """Which measurements a chip has, and what stands in where it has none."""

    memory: tuple[float, str]
    gemm: Callable[[Tables], dict[str, GemmSection | Like]]
    attention: Callable[[Tables], list[attention.AttentionCurve]]
    intra: Callable[[Tables], collectives.Fits]
    inter: Callable[[Tables], collectives.Fits]
    latency_us: float = 0.7
    likes: Mapping[str, Like] = field(default_factory=dict[str, Like])


def _own_gemm(chip: str, dtypes: Mapping[str, str]) -> Callable[[Tables], dict[str, GemmSection | Like]]:
    """Curves from the chip's own tables: dtype to measuring method."""

    def fit(tables: Tables) -> dict[str, GemmSection | Like]:
        sections: dict[str, GemmSection | Like] = {}
        for dtype, method in dtypes.items():
            found, source = tables.fit_gemm(chip, dtype, method)
            sections[dtype] = GemmSection(found, "measured", source)
        return sections

    return fit


def _b200_gemm(tables: Tables) -> dict[str, GemmSection | Like]:
    """Shapes from short runs, level from the sustained rates of Megatron/TE linear layers."""
    sections: dict[str, GemmSection | Like] = {}
    sustained = gemm.select_products(tables.products, "B200", "bf16", "Megatron/TE")
    for dtype, method in {"bf16": "trtllm", "fp8": "torch_flow fp8;"}.items():
        found, source = tables.fit_gemm("B200", dtype, method)
        ratio = gemm.sustained_ratio(found, sustained) if dtype == "bf16" else 1.0
        why = f"{source}; level x {ratio:.2f}, the sustained rate of Megatron/TE linear layers in {SIMUMAX}"
        sections[dtype] = GemmSection(found.scaled(ratio), "measured", why if ratio != 1.0 else source)
    return sections


def _at_b200_level(chip: str) -> Callable[[Tables], dict[str, GemmSection | Like]]:
    """The chip's own shapes from short runs, at the share of them that a B200 sustains in training."""

    def fit(tables: Tables) -> dict[str, GemmSection | Like]:
        sections: dict[str, GemmSection | Like] = {}
        sustained = gemm.select_products(tables.products, "B200", "bf16", "Megatron/TE")
        ratio = gemm.sustained_ratio(tables.fit_gemm("B200", "bf16", "trtllm")[0], sustained)
        for dtype, method in HOPPER_FP8.items():
            found, source = tables.fit_gemm(chip, dtype, method)
            factor = ratio if dtype == "bf16" else 1.0
            why = f"{source}; level x {factor:.2f}, the share that a B200 sustains in {SIMUMAX}"
            tag, told = ("estimated", why) if factor != 1.0 else ("measured", source)
            sections[dtype] = GemmSection(found.scaled(factor), tag, told)
        return sections

    return fit


def _gemm_like(
    chip: str, best_tflops: float | None, why: str, dtypes: Mapping[str, str] | None = None
) -> Callable[[Tables], dict[str, GemmSection | Like]]:
    """A relative's curves, scaled so that the large-size rate is ``best_tflops`` (None: as they are)."""

    def fit(tables: Tables) -> dict[str, GemmSection | Like]:
        sections: dict[str, GemmSection | Like] = {}
        for dtype, method in (dtypes or {"bf16": "trtllm"}).items():
            found = tables.fit_gemm(chip, dtype, method)[0]
            factor = best_tflops / max(found.by_m_tflops.values()) if best_tflops else 1.0
            sections[dtype] = GemmSection(found.scaled(factor), "estimated", why)
        return sections

    return fit


def _attention_like(
    fit: Callable[[attention.Measurements], list[attention.AttentionCurve]],
    factor: float,
    why: str,
    kernel: str = "",
) -> Callable[[Tables], list[attention.AttentionCurve]]:
    """A relative's curves; of one ``kernel`` alone where the chip has another software stack."""

    def like(tables: Tables) -> list[attention.AttentionCurve]:
        curves = attention.scale(fit(tables.attention_rows), factor, why)
        return [replace(c, kernel="flash") for c in curves if c.kernel == kernel] if kernel else curves

    return like


def _intra(chip: str, pair_gb_per_s: float, pair_source: str) -> Callable[[Tables], collectives.Fits]:
    def fit(tables: Tables) -> collectives.Fits:
        fits = collectives.fit_intra(tables.collective_rows, chip)
        return {**fits, "p2p": [collectives.point_to_point(fits, pair_gb_per_s, pair_source)]}

    return fit


def _intra_like(
    chip: str, pair: float, factor: float, why: str, limit: float = 1e9
) -> Callable[[Tables], collectives.Fits]:
    return lambda t: collectives.scale(_intra(chip, pair, why)(t), factor, why, limit)


def _intra_given(
    widths: Mapping[int, float], pair: float, why: str, alpha_us: float | None = None
) -> Callable[[Tables], collectives.Fits]:
    """Bus bandwidth by ranks, the same for every kind; start-up as the H100's or ``alpha_us``."""

    def fit(tables: Tables) -> collectives.Fits:
        like = collectives.fit_intra(tables.collective_rows, "H100-SXM")
        fits = collectives.from_bandwidths(widths, like, alpha_us, why)
        return {**fits, "p2p": [collectives.point_to_point(fits, pair, why)]}

    return fit


def _inter_h100(tables: Tables) -> collectives.Fits:
    return collectives.fit_inter_h100(tables.collective_rows, 50.0)


def _inter_like(share: float, nic: float, why: str) -> Callable[[Tables], collectives.Fits]:
    return lambda tables: collectives.inter_like(_inter_h100(tables), share, nic, why)


MARKS = "start-up and ramp of a DGX H100 cluster"
A100_NET = f"192 GB/s over 4 nodes / 8 devices, NVIDIA GTC24 S62129 slide; {MARKS}"
UNIT = "the same matrix unit as bf16, assumed at the same rate"
HALF = "tf32 runs at half the bf16 rate"
FLAG = "FlagOpen/FlagPerf@1b5a030:base/{}/computation-{}/{}/README.md"
HOPPER_FP8 = {"bf16": "trtllm", "fp8": "torch_flow fp8;"}
NET = "stas00/ml-engineering@744d01e:network/README.md"
CLOSEOUT = "FlagRT/FlagPerf@569e31a:base/docs/p800-closeout-20260930.md (8192^3)"
P800_LINK = (
    "pair 28.9 GB/s measured (FlagRT BKCL transport log 2026-09-24); a quad between that and its three "
    "links at once (90): geometric mean; both quads between the pair and the PCIe rate measured (37.9)"
)
MESH = f"{NET}: MI300X all-reduce 47.7 GB/s on 2 and 312.9 on 8 ranks; 4 ranks: three links"
MESH_910B = "56 GB/s a link both ways (Huawei pages, second-hand), used like the MI300X's mesh (0.70)"
FP32_A100 = Like("bf16", 19.05, "measured", FLAG.format("benchmarks", "FP32", "nvidia/A100"))
TF32_A800 = Like("bf16", 145.4, "measured", FLAG.format("toolkits", "TF32", "nvidia/A100") + " (A800)")
A100_LIKES = {"fp16": Like("bf16", 270, "estimated", UNIT), "tf32": TF32_A800, "fp32": FP32_A100}
HOPPER_LIKES = {
    "fp16": Like("bf16", 800, "estimated", UNIT),
    "tf32": Like("bf16", 400, "estimated", HALF),
    "fp32": Like("bf16", 60, "estimated", "0.9 of the data sheet, as on the A100"),
}

RECIPES: dict[str, Recipe] = {
    "a100-80": Recipe(
        (0.834, AZURE.format("A100", 4)),
        _own_gemm("A100-80-SXM", {"bf16": "trtllm"}),
        lambda t: attention.fit_a100(t.attention_rows),
        _intra("A100-80-SXM", 274.3, f"{NET} (p2pBandwidthLatencyTest); start-up of the 2-rank all-gather"),
        _inter_like(24.0, 25.0, A100_NET),
        likes=A100_LIKES,
    ),
    "a100-40": Recipe(
        (0.854, "FlagOpen/FlagPerf@1b5a030:base/benchmarks/main_memory-bandwidth/nvidia/A100/README.md"),
        _gemm_like("A100-80-SXM", None, "as the A100 80 GB, whose compute units it has"),
        _attention_like(attention.fit_a100, 1.0, "as the A100 80 GB, whose compute units it has"),
        _intra_like("A100-80-SXM", 274.3, 1.0, "as the A100 80 GB, whose links it has"),
        _inter_like(24.0, 25.0, A100_NET),
        likes=A100_LIKES,
    ),
    "a800-80": Recipe(
        (0.834, AZURE.format("A100", 4) + ", as the A100"),
        _gemm_like("A100-80-SXM", None, "as the A100 80 GB, whose compute units it has"),
        _attention_like(attention.fit_a100, 1.0, "as the A100 80 GB, whose compute units it has"),
        _intra_like("A100-80-SXM", 274.3, 2 / 3, "the A100's times 200/300, the NVLink cut"),
        _inter_like(24.0, 25.0, A100_NET),
        likes=A100_LIKES,
    ),
    "h100": Recipe(
        (0.887, AZURE.format("H100", 5)),
        _own_gemm("H100-SXM", HOPPER_FP8),
        lambda t: attention.fit_h100(t.attention_rows),
        _intra("H100-SXM", 376.0, f"{NET} (p2pBandwidthLatencyTest); start-up of the 2-rank all-gather"),
        _inter_h100,
        likes=HOPPER_LIKES,
    ),
    "h800": Recipe(
        (0.887, AZURE.format("H100", 5) + ", as the H100"),
        _gemm_like("H100-SXM", None, "as the H100, whose compute units it has", HOPPER_FP8),
        _attention_like(attention.fit_h100, 1.0, "as the H100, whose compute units it has"),
        _intra_like(
            "H100-SXM",
            376.0,
            200 / 450,
            "the H100's times 200/450, at most the 160 GB/s DeepEP states (deepseek-ai/DeepEP@dd758ca)",
            160.0,
        ),
        _inter_like(46.0, 50.0, "as the H100: the network is not cut"),
        likes=HOPPER_LIKES,
    ),
    "h200": Recipe(
        (0.865, AZURE.format("H200", 5)),
        _own_gemm("H200", HOPPER_FP8),
        lambda t: attention.fit_h200(t.attention_rows),
        _intra("H200", 396.4, f"{NET} (nvbandwidth); start-up of the 2-rank all-gather"),
        _inter_like(45.6, 50.0, f"{NET} (364.9 GB/s over 4 p5en nodes / 8 devices); {MARKS}"),
        likes=HOPPER_LIKES,
    ),
    "b200": Recipe(
        (0.80, f"the planning value of ai-dynamo/aiconfigurator@095f58a; a GB200 copies at 0.73 ({NET})"),
        _b200_gemm,
        lambda t: attention.fit_b200(t.attention_rows),
        _intra("B200", 747.0, f"a GB200's 746.7 GB/s ({NET}); start-up of the 2-rank all-gather"),
        _inter_like(47.7, 50.0, f"{NET} (381.8 GB/s over 4 p6-b200 nodes / 8 devices); {MARKS}"),
        likes={
            "fp16": Like("bf16", 1130, "estimated", UNIT),
            "tf32": Like("bf16", 565, "estimated", HALF),
            "fp32": Like("bf16", 72, "estimated", "0.9 of the data sheet, as on the A100"),
        },
    ),
    "b300": Recipe(
        (0.80, "the planning value of ai-dynamo/aiconfigurator@095f58a for a B200"),
        _at_b200_level("B300"),
        _attention_like(attention.fit_b200, 1.0, "as the B200: no measurement was found"),
        _intra("B300", 747.0, f"a GB200's 746.7 GB/s ({NET}); start-up of the 2-rank all-gather"),
        _inter_like(95.4, 100.0, f"the B200's 0.95 of the NIC ({NET}); {MARKS}"),
        likes={
            "fp16": Like("bf16", 1130, "estimated", UNIT),
            "tf32": Like("bf16", 565, "estimated", HALF),
            "fp32": Like("bf16", 72, "estimated", "0.9 of the data sheet, as on the A100"),
        },
    ),
    "gb200": Recipe(
        (0.727, f"5815 of 8000 GB/s, a copy by p2pBandwidthLatencyTest ({NET})"),
        _at_b200_level("GB200"),
        _attention_like(attention.fit_b200, 1.0, "as the B200: the same kernels"),
        _intra("GB200", 746.7, f"{NET} (p2pBandwidthLatencyTest); start-up of the 2-rank all-gather"),
        _inter_like(47.7, 50.0, f"the B200's 0.95 of the NIC ({NET}); {MARKS}"),
        likes={
            "fp16": Like("bf16", 1250, "estimated", UNIT),
            "tf32": Like("bf16", 625, "estimated", HALF),
            "fp32": Like("bf16", 72, "estimated", "0.9 of the data sheet, as on the A100"),
        },
    ),
    "kunlun-p800": Recipe(
        (1.0, "the bandwidth above is itself a measured copy"),
        _gemm_like(
            "A100-80-SXM",
            180.0,
            "the A100's shape (no shape sweep is published), 180 TFLOP/s at large sizes: 0.95 of the 188 "
            "measured with XMLIR_MATMUL_FAST_MODE=1 (mmBF16FIX); 118 without it, 281 hand tuned",
        ),
        _attention_like(
            attention.fit_a100, 0.67, "the A100's times 180/268, the ratio of bf16 products", "flash2"
        ),
        _intra_given({2: 28.9, 4: 51.0, 8: 33.0}, 31.2, P800_LINK, 20.0),
        _inter_like(23.0, 25.0, f"0.92 of the NIC, as on a DGX H100 cluster; {MARKS}"),
        likes={
            "fp16": Like("bf16", 259, "measured", CLOSEOUT),
            "fp32": Like("bf16", 117.9, "measured", CLOSEOUT),
        },
    ),
    "ascend-910b": Recipe(
        (0.80, "assumed: no measurement was found"),
        _gemm_like(
            "A100-80-SXM",
            304.0,
            FLAG.format("benchmarks", "BF16", "ascend") + " (304 at 8192^3); other sizes as the A100",
        ),
        _attention_like(attention.fit_a100, 0.8, "the A100's times 0.8: no measurement was found", "flash2"),
        _intra_given({2: 20.9, 4: 60.0, 8: 137.0}, 20.9, MESH_910B, 20.0),
        _inter_like(23.0, 25.0, f"0.92 of the NIC, as on a DGX H100 cluster; {MARKS}"),
        likes={
            "fp16": Like("bf16", 313, "measured", FLAG.format("benchmarks", "FP16", "ascend")),
            "fp32": Like("bf16", 82, "measured", FLAG.format("benchmarks", "FP32", "ascend")),
        },
    ),
    "mi300x": Recipe(
        (0.80, "assumed from the MI250X's 0.82 (ROCm/rocm-blogs@c9a603f, BabelStream)"),
        _gemm_like(
            "H100-SXM",
            647.0,
            "stas00/ml-engineering@744d01e:compute/accelerator/README.md (best shape found 668.4, large "
            "sizes 0.97 of it as on the H100); other sizes as the H100",
        ),
        _attention_like(
            attention.fit_h100, 0.8, "the H100's times 647/804, the ratio of bf16 products", "flash3"
        ),
        _intra_given({2: 47.7, 4: 143.0, 8: 312.9}, 47.7, MESH),
        _inter_like(46.0, 50.0, f"0.92 of the NIC, as on a DGX H100 cluster; {MARKS}"),
        likes={
            "fp16": Like("bf16", 647, "estimated", UNIT),
            "tf32": Like("bf16", 323, "estimated", HALF),
            "fp32": Like("bf16", 110, "estimated", "0.67 of the data sheet, assumed"),
        },
    ),
}


def fit_sections(recipe: Recipe, tables: Tables, bandwidth_gb_per_s: float) -> Sections:
    """All fitted parts of one profile."""
    fraction, source = recipe.memory
    return Sections(
        memory=(bandwidth_gb_per_s, recipe.latency_us, fraction, source + RAMP),
        gemm={**recipe.gemm(tables), **recipe.likes},
        attention=recipe.attention(tables),
        intra=recipe.intra(tables),
        inter=recipe.inter(tables),
    )


def residual_lines(chip: str, sections: Sections) -> list[str]:
    """How far the fits are off, for the terminal."""
    lines: list[str] = []
    for dtype, section in sections.gemm.items():
        if isinstance(section, GemmSection) and section.tag == "measured":
            lines.append(f"{chip:12s} gemm {dtype:5s} fitted   {section.fit.fitted}")
            lines.append(f"{chip:12s} gemm {dtype:5s} held out {section.fit.held_out}")
    for span, fits in (("intra", sections.intra), ("inter", sections.inter)):
        errors = [f"{kind} {f.ranks}: {f.error:.1%}" for kind, some in fits.items() for f in some if f.error]
        if errors:
            lines.append(f"{chip:12s} {span} median error  " + "  ".join(errors))
    return lines or [f"{chip:12s} nothing of its own to fit: all curves come from a relative"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="folder with the measurement tables")
    parser.add_argument("chips", nargs="*", metavar="CHIP", help=f"of {', '.join(RECIPES)}; default: all")
    parser.add_argument("--profiles", type=Path, default=Path(__file__).parent.parent / "hw_profiles")
    args = parser.parse_args(argv)
    if unknown := set(args.chips) - set(RECIPES):
        parser.error(f"expected chips of {', '.join(RECIPES)}, got {', '.join(sorted(unknown))}")
    tables = Tables(args.data)
    for chip in args.chips or RECIPES:
        path = args.profiles / f"{chip}.yaml"
        hand = yaml.safe_load(path.read_text(encoding="utf-8"))
        bandwidth = float(hand["memory"]["bandwidth_gb_per_s"]["value"])
        sections = fit_sections(RECIPES[chip], tables, bandwidth)
        write_sections(path, sections, hand.get("sources", {}))
        print("\n".join(residual_lines(chip, sections)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
