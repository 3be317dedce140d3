"""What a plan fuses, for people and programs: a plan in, lines or plain data out."""

from __future__ import annotations

from typing import Any

from autoplan.plan import Plan

LEVELS = {
    "keep_logits": "the logits are kept: made twice, as the fused loss does, they take more time "
    "(--pin fuse=all)",
    "off": "none: --pin fuse=off",
}


def fusion_lines(plan: Plan) -> list[str]:
    """``rms_norm, swiglu in LlamaDecoderLayer``, a line a region class; then what was not fused, and why."""
    fused = [(name, layout.kernels) for name, layout in plan.layouts.items() if layout.kernels]
    lines = [f"{', '.join(kernels)} in {name}" for name, kernels in fused]
    lines += [LEVELS[level] for level in dict.fromkeys(part.fuse for part in plan.parts) if level in LEVELS]
    for name, layout in plan.layouts.items():
        lines += [f"not in {name}: {reason}" for reason in layout.unfused]
    return lines


def fusions_json(plan: Plan) -> dict[str, Any]:
    """``level`` of the first part, and by layout the kernels used and what was left, with reasons."""
    by_layout = {
        name: {"kernels": list(layout.kernels), "not_fused": list(layout.unfused)}
        for name, layout in plan.layouts.items()
        if layout.kernels or layout.unfused
    }
    return {"level": plan.parts[0].fuse, "layouts": by_layout}
