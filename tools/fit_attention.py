"""Measured attention in, TFLOP/s by sequence length for every kernel, direction, mask and head size out.

Causal work counts as half. Where only forward and backward together were measured they are taken apart, by
the forward where that was measured too, else with the ratio of the two on an H100 (FlashAttention-2); where
a mask or head size is missing, the ratio of a neighbour that has both fills in. Whatever is derived is
tagged estimated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

SEQUENCES = (512, 1024, 2048, 4096, 8192, 16384)
BACKWARD_WORK = 2.5
FA2, FA3 = "FlashAttention-2", "FlashAttention-3"

Series = dict[int, float]


@dataclass(frozen=True)
class AttentionCurve:
    """One curve; ``causal`` work is counted as half."""

    direction: str
    causal: bool
    head_dim: int
    tflops: Series
    tag: str
    source: str
    kernel: str = "flash"


@dataclass(frozen=True)
class Measurements:
    """The rows of the attention table, asked for by chip and kernel."""

    rows: Sequence[Mapping[str, str]]

    def series(self, chip: str, kernel: str, direction: str, causal: bool, head_dim: str) -> Series:
        """Best TFLOP/s over batch and head counts by sequence length (SimuMax rows halved when causal)."""
        half = 0.5 if causal and "SimuMax" in kernel else 1.0
        best: Series = {}
        for row in self.rows:
            key = (row["chip"], row["kernel"], row["direction"], row["causal"], row["head_dim"])
            if key == (chip, kernel, direction, str(causal), head_dim):
                length = int(row["seqlen"])
                best[length] = max(best.get(length, 0.0), float(row["tflops"]) * half)
        return dict(sorted(best.items()))

    def source(self, chip: str, kernel: str, direction: str) -> str:
        """Where those rows are from."""
        key = (chip, kernel, direction)
        found = {r["source"] for r in self.rows if (r["chip"], r["kernel"], r["direction"]) == key}
        closed = (s.rstrip("; ") + ")" * (s.count("(") - s.count(")")) for s in found)
        return "; ".join(sorted(closed))


KERNELS = {"flash2": FA2, "flash3": FA3, "cudnn": "cuDNN"}
TRITON_FORWARD, TRITON_BACKWARD = 1 / 1.4, 1 / 2.0
TRITON_WHY = (
    "FlashAttention-2 is 1.3-1.5x faster than FlashAttention in Triton forward and about 2x backward "
    "(arXiv 2307.08691, section 4.1)"
)


def fit_h100(table: Measurements) -> list[AttentionCurve]:
    """FlashAttention-2 and -3, cuDNN and Triton on the H100."""
    curves = [curve for kernel in KERNELS for curve in _fit_hopper(table, kernel)]
    return curves + triton([curve for curve in curves if curve.kernel == "flash2"])


def _fit_hopper(table: Measurements, kernel: str) -> list[AttentionCurve]:
    """One kernel; causal backward from both directions together, else from the forward's ratio of masks."""
    name = KERNELS[kernel]
    source, back = (table.source("H100-SXM", name, direction) for direction in ("fwd", "bwd"))
    forward = {
        (causal, dim): _filled(table.series("H100-SXM", name, "fwd", causal, str(dim)))
        for causal in (True, False)
        for dim in (64, 128, 256)
    }
    backward = {dim: table.series("H100-SXM", name, "bwd", False, str(dim)) for dim in (64, 128)}
    backward[256] = _times(backward[128], forward[False, 256], forward[False, 128])
    curves = [AttentionCurve("forward", c, d, s, "measured", source, kernel) for (c, d), s in forward.items()]
    for dim, full in backward.items():
        both = table.series("H100-SXM", name, "fwd+bwd", True, str(dim))
        causal, why = _times(full, forward[True, dim], forward[False, dim]), "mask as forward"
        if both:
            causal, why = _taken_apart(both, forward[True, dim]), "from both directions together"
        tag = "measured" if dim != 256 else "estimated"
        curves.append(AttentionCurve("backward", True, dim, causal, "estimated", f"{back}; {why}", kernel))
        curves.append(AttentionCurve("backward", False, dim, full, tag, back, kernel))
    return curves


def triton(flash2: Sequence[AttentionCurve]) -> list[AttentionCurve]:
    """The Triton kernel of 2022 and 2023, from the FlashAttention-2 of the same chip."""
    share = {"forward": TRITON_FORWARD, "backward": TRITON_BACKWARD}
    return [
        replace(
            c,
            tflops={x: y * share[c.direction] for x, y in c.tflops.items()},
            tag="estimated",
            source=TRITON_WHY,
            kernel="triton",
        )
        for c in flash2
    ]


def _taken_apart(both: Series, forward: Series) -> Series:
    """The backward's rate from that of both together and of the forward alone."""
    work = 1 + BACKWARD_WORK
    return {x: BACKWARD_WORK / (work / rate - 1 / forward[x]) for x, rate in both.items()}


def fit_a100(table: Measurements) -> list[AttentionCurve]:
    """FlashAttention-2 on the A100, taken apart with the H100's ratio, and Triton."""
    source = f"{table.source('A100-80-SXM', FA2, 'fwd+bwd')}; taken apart with the H100's ratio"
    curves: list[AttentionCurve] = []
    for dim in (64, 128):
        ratio = {
            length: table.series("H100-SXM", FA2, "bwd", False, str(dim))[length] / forward
            for length, forward in table.series("H100-SXM", FA2, "fwd", False, str(dim)).items()
        }
        for causal in (True, False):
            both = table.series("A100-80-SXM", FA2, "fwd+bwd", causal, str(dim))
            forward = {
                length: rate * (1 + BACKWARD_WORK / ratio[length]) / (1 + BACKWARD_WORK)
                for length, rate in both.items()
            }
            backward = {length: rate * ratio[length] for length, rate in forward.items()}
            curves.append(AttentionCurve("forward", causal, dim, forward, "estimated", source, "flash2"))
            curves.append(AttentionCurve("backward", causal, dim, backward, "estimated", source, "flash2"))
    return curves + triton(curves)


def fit_h200(table: Measurements) -> list[AttentionCurve]:
    """The H100's curves (same compute units) with the H200's own causal forward of FlashAttention-3."""
    kernel = "vllm_flash_attn_fa3"
    source = table.source("H200", kernel, "fwd")
    curves = scale(fit_h100(table), 1.0, "as the H100, whose compute units it has")
    own = {dim: table.series("H200", kernel, "fwd", True, str(dim)) for dim in (64, 128)}
    return [
        AttentionCurve("forward", True, c.head_dim, own[c.head_dim], "measured", source, "flash3")
        if (c.kernel, c.direction, c.causal) == ("flash3", "forward", True) and c.head_dim in own
        else c
        for c in curves
    ]


def fit_b200(table: Measurements) -> list[AttentionCurve]:
    """Causal forward measured; backward anchored at 4096 tokens, its shape and the rest from the H100."""
    kernel, training = "vllm_flashinfer_trtllmprefill", "TE/FA (SimuMax)"
    h100 = {(c.direction, c.causal, c.head_dim): c.tflops for c in _fit_hopper(table, "flash3")}
    forward = {dim: table.series("B200", kernel, "fwd", True, str(dim)) for dim in (64, 128)}
    anchor = table.series("B200", training, "bwd", True, "128/128")[4096]
    ratio = anchor / h100["backward", True, 128][4096]
    source, train_source = table.source("B200", kernel, "fwd"), table.source("B200", training, "bwd")
    curves: list[AttentionCurve] = []
    for dim, causal in forward.items():
        full = _times(causal, h100["forward", False, dim], h100["forward", True, dim])
        curves.append(AttentionCurve("forward", True, dim, causal, "measured", source, "cudnn"))
        why = f"{source}; mask ratio of the H100"
        curves.append(AttentionCurve("forward", False, dim, full, "estimated", why, "cudnn"))
        for mask in (True, False):
            rates = {length: rate * ratio for length, rate in h100["backward", mask, dim].items()}
            why = f"{train_source} at 4096 tokens; shape of the H100"
            curves.append(AttentionCurve("backward", mask, dim, rates, "estimated", why, "cudnn"))
    return curves


def scale(curves: Iterable[AttentionCurve], factor: float, why: str) -> list[AttentionCurve]:
    """A relative's curves for a chip without its own: times ``factor``, tagged estimated."""
    return [
        replace(c, tflops={x: y * factor for x, y in c.tflops.items()}, tag="estimated", source=why)
        for c in curves
    ]


def _times(base: Series, over: Series, under: Series) -> Series:
    return {length: rate * over[length] / under[length] for length, rate in base.items()}


def _filled(series: Series) -> Series:
    """A missing length takes the mean of its neighbours, the first one the second's rate."""
    known = dict(series)
    for i, length in enumerate(SEQUENCES):
        if length not in known:
            around = [series[at] for at in SEQUENCES[max(0, i - 1) : i + 2] if at in series]
            known[length] = sum(around) / len(around)
    return {length: known[length] for length in SEQUENCES}
