"""Fitted sections in, YAML lines below the marker of a profile out; the hand-written part stays as it is."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fit_attention import AttentionCurve
from fit_collectives import Fit, Fits
from fit_gemm import GemmFit

MARKER = "# ---- below: fitted by tools/fit_profiles.py; run it again instead of editing ----"
MEMORY_SIZES_MIB = (0.0625, 0.25, 1, 4, 16, 64, 256)
MIB = 2.0**20


@dataclass(frozen=True)
class GemmSection:
    """The curves of one dtype."""

    fit: GemmFit
    tag: str
    source: str


@dataclass(frozen=True)
class Like:
    """A dtype that has another dtype's shape, scaled to one best rate."""

    dtype: str
    best_tflops: float
    tag: str
    source: str


@dataclass(frozen=True)
class Sections:
    """Everything below the marker; ``memory`` is (GB/s, latency in us, fraction at large sizes, source)."""

    memory: tuple[float, float, float, str]
    gemm: Mapping[str, GemmSection | Like]
    attention: Sequence[AttentionCurve]
    intra: Fits
    inter: Fits


@dataclass
class _Writer:
    """Collects lines and the sources they name; ``names`` maps a source to its short name."""

    names: dict[str, str]
    fitted: dict[str, str] = field(default_factory=dict[str, str])

    def origin(self, section: str, tag: str, source: str) -> str:
        """``tag: ..., source: NAME``; a new source is named after the section that needs it first."""
        if source not in self.names:
            taken = set(self.names.values())
            numbers = (f"{section}_{number}" for number in itertools.count(2))
            self.names[source] = next(n for n in itertools.chain([section], numbers) if n not in taken)
            self.fitted[self.names[source]] = source
        return f"tag: {tag}, source: {self.names[source]}"

    def memory(self, gb_per_s: float, latency_us: float, fraction: float, source: str) -> list[str]:
        half_mib = gb_per_s * 1e3 * latency_us / MIB
        values = [fraction * size / (size + half_mib) for size in MEMORY_SIZES_MIB]
        return [
            "# Share of the memory bandwidth that one operation of so many bytes reaches.",
            "memory_efficiency:",
            f"  {{mib: {_list(MEMORY_SIZES_MIB)}, fraction: {_list(values, 3)},",
            f"   {self.origin('copy', 'estimated', source)}}}",
        ]

    def gemm(self, sections: Mapping[str, GemmSection | Like]) -> list[str]:
        lines = ["# Rate of [m, k] x [k, n]: by_m(m) * by_n(n) * by_k(k), launch not included.", "gemm:"]
        for dtype, section in sections.items():
            origin = self.origin(f"gemm_{dtype}", section.tag, section.source)
            if isinstance(section, Like):
                like = f"like: {section.dtype}, best_tflops: {_number(section.best_tflops)}"
                lines += [f"  {dtype}: {{{like}, {origin}}}"]
                continue
            lines.append(f"  {dtype}:")
            curves = {
                "m": ("tflops", section.fit.by_m_tflops),
                "n": ("factor", section.fit.by_n),
                "k": ("factor", section.fit.by_k),
            }
            for name, (key, curve) in curves.items():
                lines.append(f"    by_{name}:")
                lines.append(f"      {{{name}: {_list(list(curve))},")
                lines.append(f"       {key}: {_list(list(curve.values()), 3)}, {origin}}}")
        return lines

    def attention(self, curves: Sequence[AttentionCurve]) -> list[str]:
        lines = ["# Fused attention; causal work counts as half.", "attention:"]
        for c in curves:
            head = f"kernel: {c.kernel}, direction: {c.direction}, causal: {str(c.causal).lower()}"
            head += f", head_dim: {c.head_dim}"
            lines += [
                f"  - {{{head}, {self.origin('attention', c.tag, c.source)},",
                f"     sequence: {_list(list(c.tflops))}, tflops: {_list(list(c.tflops.values()), 3)}}}",
            ]
        return lines

    def span(self, name: str, fits: Fits) -> list[str]:
        lines = [f"  {name}:"]
        for kind, some in fits.items():
            lines.append(f"    {kind}:")
            lines += [f"      - {{{self.fit(name, f)}}}" for f in some]
        return lines

    def fit(self, span: str, f: Fit) -> str:
        numbers = {
            "alpha_us": f.alpha_us,
            "gb_per_s": f.gb_per_s,
            "ramp_us": f.ramp_us,
            "ramp_mib": f.ramp_mib,
        }
        shown = ", ".join(f"{key}: {_number(value, 4)}" for key, value in numbers.items())
        return f"ranks: {f.ranks}, {shown}, {self.origin(span, f.tag, f.source)}"


def write_sections(path: Path, sections: Sections, sources: Mapping[str, str]) -> None:
    """Replace what stands below the marker line; ``sources`` are the file's own short names."""
    text = path.read_text(encoding="utf-8")
    hand = text[: text.index(MARKER)]
    writer = _Writer({source: name for name, source in sources.items()})
    body = [
        *writer.memory(*sections.memory),
        "",
        *writer.gemm(sections.gemm),
        "",
        *writer.attention(sections.attention),
        "",
        "# t(s) = alpha + s*F/bandwidth + ramp * s/(s + ramp_mib); inter: one rank a node.",
        "collectives:",
        *writer.span("intra", sections.intra),
        *writer.span("inter", sections.inter),
        "",
    ]
    named = [f'  {name}: "{source}"' for name, source in writer.fitted.items()]
    lines = [MARKER, "", "fitted_sources:", *named, "", *body]
    path.write_text(hand + "\n".join(lines), encoding="utf-8")


def _list(values: Sequence[float], digits: int = 6) -> str:
    return "[" + ", ".join(_number(value, digits) for value in values) + "]"


def _number(value: float, digits: int = 6) -> str:
    """A short plain decimal with ``digits`` significant digits (never in exponent form)."""
    rounded = float(f"{value:.{digits}g}")
    return str(int(rounded)) if rounded == int(rounded) else f"{rounded:.10f}".rstrip("0")
