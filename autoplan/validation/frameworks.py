"""How the frameworks of published runs execute a step: a :class:`Point` in, an :class:`Execution` out.

Facts about programs, not numbers fitted to their speed: which attention kernel runs, what is fused, what
the loss reads and writes, how gradients are added up and when they are reduced. Each has its source.
"""

from __future__ import annotations

from dataclasses import replace

from autoplan.validation.points import Point
from autoplan_cost_models.execution import Execution, Keeping

# Bytes per logit of Megatron-LM's vocabulary-parallel cross-entropy on fp32 logits (NVIDIA/Megatron-LM
# @core_r0.8.0:megatron/core/tensor_parallel/cross_entropy.py): cast 2 + 4, maximum 4, subtract in place
# 8, exp 8, sum 4, divide 8 forward; scale 8 and cast 4 + 2 back to 16 bits.
MEGATRON_LOSS = (38.0, 14.0)
# F.cross_entropy on logits.float() (pytorch/torchtitan@b5bcd76c66:torchtitan/components/loss.py): cast 2 + 4,
# log-softmax 4 + 4 (read twice: + 4); back read 4, write 4, cast 4 + 2.
FLOAT_LOSS = (18.0, 18.0)
# Compiled, the loss reads 16-bit logits twice and writes 16-bit gradients once more than it reads them.
FUSED_LOSS = (4.0, 4.0)
# The weight gradient's product adds into an fp32 buffer (gradient_accumulation_fusion): 8 bytes read and
# written instead of 2 written, of which 0.6 shows: measured on the linear shapes of training with and without
# (MooreThreads/SimuMax@4dcaae5: 0.54 on an A100, 0.66 on a B200; tools/fit_gemm.py prints it).
FUSED_ACCUMULATION = 3.6

# Megatron-LM's fused softmax of up to 16384 keys reads and writes each score once (megatron/fused_kernels).
MEGATRON_PASSES = {
    "cross_entropy_loss": MEGATRON_LOSS,
    "vocab_cross_entropy": MEGATRON_LOSS,
    "softmax": (4.0, 6.0),
}
# Memory of Megatron-LM: fused activations save their input alone; the loss saves an fp32 softmax in whose
# place it writes the gradient, of which autograd makes a 16-bit copy (the file above); selective recompute is
# that of core attention (arXiv 2205.05198).
MEGATRON_KEEPS = Keeping(selective="all but core attention", chains=True, loss_bytes=(4.0, 2.0))
MEGATRON = Execution(
    attention="flash2",
    fuses_pointwise=True,
    passes=MEGATRON_PASSES,
    gradient_bytes_per_parameter=FUSED_ACCUMULATION,
    reduced_bytes_per_parameter=2.0,
    overlaps_gradients=False,
    keeping=MEGATRON_KEEPS,
)
# Transformer Engine: gradients are reduced and weights gathered beside compute; 8-bit layers save 8-bit
# inputs (NVIDIA/TransformerEngine:transformer_engine/pytorch/module/linear.py).
TRANSFORMER_ENGINE = Execution(
    attention="cudnn",
    fuses_pointwise=True,
    passes=MEGATRON_PASSES,
    gradient_bytes_per_parameter=FUSED_ACCUMULATION,
    keeping=replace(MEGATRON_KEEPS, eight_bit_inputs=True),
)
# scripts/train/benchmarking/submit_benchmarks.py of mosaicml/llm-foundry: attn_impl triton. FSDP with flat
# parameters: views, so nothing is copied out of the gathered buffer; gradients are joined and cast to the
# fp32 in which DEFAULT mixed precision reduces them (composer/trainer/mosaic_fsdp_utils.py): 2 + 2 + 2 + 4
# bytes.
# Its fused cross-entropy writes the gradient in place of the logits (inplace_backward of flash-attn's
# losses/cross_entropy.py, llmfoundry/models/mpt/modeling_mpt.py).
# DecoupledAdamW updates tensor by tensor: three times the traffic of a fused pass.
COMPOSER = Execution(
    attention="triton",
    gathered_copies=0.0,
    gradient_bytes_per_parameter=10.0,
    reduced_bytes_per_parameter=4.0,
    optimizer_passes=3.0,
    overlaps_gradients=False,
    keeping=Keeping(loss_bytes=(2.0, 0.0), frees_gradients=True),
)
# Its selective recompute keeps every second product (torchtitan/parallelisms/parallelize_llama.py); the
# 16-bit logits are deleted before the backward, in which fp32 log-probabilities, their gradient and that of
# the logits are alive (torchtitan/train.py); gradients are let go after each step.
TORCHTITAN_KEEPS = Keeping(selective="every second product", loss_bytes=(4.0, 8.0), frees_gradients=True)
TORCHTITAN = Execution(
    attention="flash2", passes={"cross_entropy_loss": FLOAT_LOSS}, keeping=TORCHTITAN_KEEPS
)
FRAMEWORKS: dict[str, Execution] = {
    "Megatron-DeepSpeed": MEGATRON,
    "Megatron-LM": MEGATRON,
    "MindSpeed": MEGATRON,
    "NeMo": TRANSFORMER_ENGINE,
    "Megatron-Bridge": TRANSFORMER_ENGINE,
    # flash attention, all else eager (InternLM/InternEvo@c628a8c874:internlm/model/modeling_internlm.py)
    # gradients stay in 16 bits, and the loss writes its own in place (internlm/model/ops/cross_entropy.py)
    "InternEvo": Execution(
        attention="flash2",
        reduced_bytes_per_parameter=2.0,
        keeping=Keeping(loss_bytes=(2.0, 0.0), gradient_bytes=2),
    ),
    "LLM Foundry": COMPOSER,
    "torchtitan": TORCHTITAN,
    "DeepSpeed": Execution(attention="flash3", overlaps_gradients=False),
}
# A compiler drops what nobody reads and keeps what enters chains; its loss never writes fp32 logits.
COMPILED = replace(
    TORCHTITAN,
    fuses_pointwise=True,
    passes={"cross_entropy_loss": FUSED_LOSS},
    keeping=replace(TORCHTITAN_KEEPS, only_read=True, chains=True, loss_bytes=(2.0, 2.0)),
)


def execution_of(point: Point) -> Execution:
    """The framework whose name the source's begins with; this project's own runtime for an unknown one."""
    found = _framework(point)
    if "TP overlap" in point.text.get("overlap", "") or "Megatron-Bridge" in point.framework:
        found = replace(found, overlaps_tp=True)
    if point.precision == "fp16":  # gradients are added up as they are made (megatron/model/distributed.py)
        found = replace(found, keeping=replace(found.keeping, gradient_bytes=2))
    if point.precision.startswith("fp8"):
        return replace(found, linear_dtype="fp8")
    return replace(found, keeping=replace(found.keeping, eight_bit_inputs=False))


def _framework(point: Point) -> Execution:
    notes = point.text.get("notes", "").replace("compile state not stated", "")
    if "torchtitan" in point.framework and ("compile" in notes or point.precision != "bf16"):
        return COMPILED
    return next((found for name, found in FRAMEWORKS.items() if name in point.framework), Execution())


# Megatron-LM's default, which these sources' scripts keep (examples/sc21 of NVIDIA/Megatron-LM; train/
# tr11-176B-ml/tr11-176B-ml.slurm of bigscience; the formulas of arXiv 2205.05198 count its masks).
DROPOUT = {"megatron_sc21_table1": 0.1, "megatron_korthikanti_table5": 0.1, "bigscience_a100_sweep": 0.1}


def dropout_of(point: Point) -> float:
    """Megatron-LM's test cases keep its default too; those with context parallelism turn it off."""
    if point.subset.startswith("mcore_") and point.cp == 1:
        return 0.1
    return DROPOUT.get(point.subset, 0.0)
