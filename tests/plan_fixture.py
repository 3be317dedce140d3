"""A plan made by hand: a 32-layer Llama in two stages on 64 devices, for tests that need no search."""

from __future__ import annotations

from collections.abc import Sequence

from autoplan.plan import (
    AxisLayout,
    Certificate,
    Layout,
    MemoryItem,
    Mesh,
    ModelIdentity,
    Part,
    Plan,
    Prediction,
    RegionPlan,
    RunnerUp,
    Stage,
    StagePrediction,
    Workload,
)
from autoplan.units import GIB

PARAMETERS = 8_030_261_248
TOKENS = 4096
HIDDEN_BYTES = 2.0 * TOKENS * 4096  # one sample of hidden states, bf16


def llama_plan(*, layers: int = 32, stages: int = 2, tp: int = 8, dp: int = 4) -> Plan:
    """Blocks spread evenly; the first half of each stage recomputes everything, the rest selectively."""
    mesh = Mesh(pp=stages, dp=dp, tp=tp)
    part = Part("model", mesh, 1, 64, "1f1b", 0, tuple(_stage(s, stages, layers, tp) for s in range(stages)))
    return Plan(
        model=ModelIdentity(
            "llama3_8b", "llama3_8b.py", "0123456789abcdef" * 4, 8_030_261_248, 8_030_261_248
        ),
        hardware="kunlun-p800",
        hardware_fingerprint="fedcba9876543210" * 4,
        workload=Workload(mesh.devices, dp * 64, sizes={"sequence": TOKENS}, tokens_per_sample=TOKENS),
        parts=(part,),
        layouts={f"{name}.tp{tp}": layout for name, layout in _layouts(tp).items()},
        prediction=Prediction(
            step_time_s=1 / 3 + 4.0,
            tokens_per_s=dp * 64 * TOKENS / (1 / 3 + 4.0),
            mfu=0.4123,
            model_flops=5.4e16,
            breakdown_s={"compute": 3.1, "tensor parallel": 0.8, "bubble": 0.3, "other": 1 / 3 - 0.2},
            estimated_inputs=("peak_flops.bf16", "gemm.bf16.by_m"),
        ),
        certificate=Certificate(1 / 3 + 4.0, 4.25, 0.0192, 42, 7, 1.5, "dp x tp x pp, recompute"),
        assumptions=(
            "devices = 64: the smallest count that fits (--devices N)",
            "optimizer = adamw, fp32 states (--optimizer NAME)",
        ),
        runners_up=tuple(_runner_up(k, mesh.devices) for k in (1, 2)),
        wall_s={"import": 2.5, "capture": 1.0, "cost": 0.5, "search": 0.25, "total": 4.25},
    )


def _runner_up(k: int, devices: int) -> RunnerUp:
    """A slower plan on another mesh."""
    return RunnerUp(
        mesh=Mesh(pp=1, dp=devices // 2**k, tp=2**k),
        micro_batch=k,
        microbatches=8,
        schedule="1f1b",
        zero=3,
        vpp=1,
        zero_shard=0,
        recompute={"full": 30, "none": 4},
        step_time_s=1 / 3 + 4.0 + k,
        mfu=0.4 - 0.05 * k,
        memory_peak_bytes=40.0 * GIB,
        breakdown_s={"compute": 3.1 + k, "tensor parallel": 0.8, "bubble": 0.3, "other": 1 / 3 - 0.2},
    )


def _stage(number: int, stages: int, layers: int, tp: int) -> Stage:
    first, last = number * layers // stages, (number + 1) * layers // stages
    half = (first + last) // 2
    names: list[tuple[str, str, str]] = [
        (f"model.layers.{i}", "block", "full" if i < half else "selective") for i in range(first, last)
    ]
    if number == 0:
        names.insert(0, ("embed", "embed", "none"))
    if number == stages - 1:
        names.append(("head", "head", "none"))
    regions = tuple(RegionPlan(name, f"{kind}.tp{tp}", recompute) for name, kind, recompute in names)
    return Stage(regions, _stage_prediction(number, stages))


def _stage_prediction(number: int, stages: int) -> StagePrediction:
    items = (
        MemoryItem("optimizer states", 6.0 * GIB),
        MemoryItem("weights and gradients", 4.0 * GIB),
        MemoryItem(f"saved activations x {stages - number}", (stages - number) * 9.5 * GIB),
        MemoryItem("runtime reserve", 2.0 * GIB),
    )
    return StagePrediction(
        forward_s=0.0201 + 0.001 * number,
        backward_s=0.0402,
        recompute_s=0.0101,
        tp_communication_s=0.0032,
        gradient_sync_s=0.05,
        optimizer_s=0.01,
        sends_bytes=HIDDEN_BYTES if number < stages - 1 else 0.0,
        in_flight=stages - number,
        memory_limit_bytes=86.2 * GIB,
        memory_peak_bytes=sum(item.bytes for item in items),
        memory_items=items,
        forward_parts_s={"compute": 0.0185 + 0.001 * number, "tp": 0.0016},
        backward_parts_s={"compute": 0.0285, "recompute": 0.0101, "tp": 0.0016},
        hop_s=0.0004 if number < stages - 1 else 0.0,
        saved_bytes=9.5 * GIB,
        backward_bytes=9.5 * GIB,
        link_bytes={"tp": 64 * 32 * HIDDEN_BYTES, "dp": 3.0 * GIB, "pp": 64 * HIDDEN_BYTES},
    )


def _layouts(tp: int) -> dict[str, Layout]:
    """Megatron's layout of a block; embedding and head over the vocabulary."""
    columns = ("self_attn_q_proj", "self_attn_k_proj", "self_attn_v_proj", "mlp_gate_proj", "mlp_up_proj")
    block = {f"{name}_weight": "S(0)" for name in columns}
    block |= {"self_attn_o_proj_weight": "S(1)", "mlp_down_proj_weight": "S(1)"}
    block |= {"input_layernorm_weight": "R", "post_attention_layernorm_weight": "R"}
    linear = {f"linear{suffix}": "R*,S(0)->S(2)" for suffix in ("", "_1", "_2", "_4", "_5")}
    rules = linear | {"linear_3": "S(2),S(1)->P", "linear_6": "S(2),S(1)->P"}
    kernels = ("flash_attention",)
    return {
        "embed": _layout("embed", tp, {"embed_tokens_weight": "S(0)"}, {"embedding": "S(0),R->P"}, 1, 0),
        "block": _layout("block", tp, block, rules, 2, 2, kernels),
        "head": _layout("head", tp, {"lm_head_weight": "S(0)"}, {"linear": "R*,S(0)->S(2)"}, 0, 1),
    }


def _layout(
    name: str,
    tp: int,
    parameters: dict[str, str],
    rules: dict[str, str],
    forward: int,
    backward: int,
    kernels: Sequence[str] = (),
) -> Layout:
    cut = tp > 1
    return Layout(
        region_class=f"{name}-7f3a",
        axes={"tp": AxisLayout(tp, parameters, rules)} if cut else {},
        collectives_forward={"all_reduce": forward} if cut and forward else {},
        collectives_backward={"all_reduce": backward} if cut and backward else {},
        collective_bytes_forward=forward * HIDDEN_BYTES if cut else 0.0,
        collective_bytes_backward=backward * HIDDEN_BYTES if cut else 0.0,
        kernels=tuple(kernels),
        output_bytes=4.0 if name == "head" else HIDDEN_BYTES,
    )
