"""Which context-parallel degrees are searched: a model's costs, the batch and the pins in, the options out.

Unpinned, cp is tried where samples are long: for short ones more replicas, or tp, do the same with less sent.
Of two legal kinds the one whose attention takes less time is tried.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoplan.errors import BadInputError
from autoplan.planner.context import ULYSSES
from autoplan.planner.model_costs import ModelCosts
from autoplan.planner.space import CP_KINDS, Contexts, Inside, Pins

# Fewer tokens than this a rank keep neither its products nor its links busy (thousands of tokens to fill a
# chip's matrix units: see the m of the measured product rates).
LEAST_TOKENS = 8192
# Where the batch has fewer samples than there are groups of ranks, idle ones would be the alternative.
LEAST_TOKENS_OF_FEW_SAMPLES = 1024


def context_options(
    costs: ModelCosts, devices: int, global_batch: int, tp_degrees: Sequence[int], pins: Pins
) -> Contexts:
    """The cp degrees above 1 and their kinds for every tp degree.

    Raises BadInputError for a pinned degree that cuts neither the model's tokens nor suits its heads.
    """
    few = global_batch * max(tp_degrees) < devices
    most = costs.capture.tokens_per_sample // (LEAST_TOKENS_OF_FEW_SAMPLES if few else LEAST_TOKENS)
    degrees = [2**i for i in range(1, most.bit_length()) if 2**i <= devices]
    if pins.cp is not None:
        degrees = [pins.cp] if pins.cp > 1 else []
    found = {tp: _of_tp(costs, tp, degrees, pins) for tp in tp_degrees}
    if pins.cp is not None and pins.cp > 1 and not any(found.values()):
        raise BadInputError(_illegal_message(costs, pins, devices))
    return found


def _of_tp(costs: ModelCosts, tp: int, degrees: Sequence[int], pins: Pins) -> dict[int, Sequence[str]]:
    wanted = (pins.cp_kind,) if pins.cp_kind else CP_KINDS
    legal = {cp: [kind for kind in wanted if costs.context.suits(kind, cp, tp)] for cp in degrees}
    return {
        cp: kinds if len(kinds) == 1 else [_quicker(costs, cp, kinds)] for cp, kinds in legal.items() if kinds
    }


def _quicker(costs: ModelCosts, cp: int, kinds: Sequence[str]) -> str:
    """The kind with the least time in all regions, one sample on one tp rank."""

    def seconds(kind: str) -> float:
        inside = Inside(cp=cp, cp_kind=kind)
        found = [costs.cost(region.class_id, inside, costs.capture.batch) for region in costs.regions]
        return sum(c.forward_s + c.backward_s + c.tp_forward_s + c.tp_backward_s for c in found)

    return min(kinds, key=seconds)


def _illegal_message(costs: ModelCosts, pins: Pins, devices: int) -> str:
    tp = pins.tp or 1
    valid = {
        kind: [cp for cp in range(1, devices + 1) if costs.context.suits(kind, cp, tp)] for kind in CP_KINDS
    }
    shown = "; ".join(f"{kind}: {_some(found)}" for kind, found in valid.items())
    heads = sorted({(q, kv) for _, q, kv in costs.heads()})
    counts = " and ".join(f"{q} heads with {kv} key-value heads" for q, kv in heads) or "no attention"
    by_heads = f" ({ULYSSES} cuts heads, ring needs 2 x cp equal pieces of a causal sequence)"
    return (
        f"--pin cp={pins.cp}: the model has {counts} and {costs.capture.tokens_per_sample} tokens a sample"
        f"{by_heads if heads else ''}. Valid degrees{f' beside tp={tp}' if tp > 1 else ''}: {shown}."
    )


def _some(degrees: Sequence[int]) -> str:
    return ", ".join(map(str, degrees[:12])) + (", ..." if len(degrees) > 12 else "") or "none"
