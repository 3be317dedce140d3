"""Selective recompute: which ops keep their output when the rest of a region is recomputed in the backward.

Comes in: an op. Goes out: whether its output is saved. Products, attention and collectives cost the most
to run again and are saved; norms, activations and pointwise ops are recomputed (the policy of
``torch.utils.checkpoint.create_selective_checkpoint_contexts``). What an all-gather brings together is
gathered again: kept, it would be as many times its piece as there are ranks.
"""

from __future__ import annotations

SAVED_OPS: tuple[str, ...] = (
    "aten.mm.default",
    "aten.addmm.default",
    "aten.bmm.default",
    "aten.baddbmm.default",
    "aten.convolution.default",
    "aten._grouped_mm.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "aten._scaled_dot_product_fused_attention_overrideable.default",
    "_c10d_functional.all_reduce.default",
    "_c10d_functional.reduce_scatter_tensor.default",
    "_c10d_functional.all_to_all_single.default",
)
"""Dispatched ops whose outputs are saved (``linear`` and ``matmul`` arrive as ``mm``, ``addmm``, ``bmm``)."""

SAVED_OWN_OPS = {
    "ring_attention": "autoplan.ring_forward.default",
    "linear_cross_entropy": "autoplan.logit_sums.default",
    "grouped_product": "autoplan.grouped_product.default",
}
"""Ops that the functions of ``autoplan_passes`` define where they are used, saved too."""
