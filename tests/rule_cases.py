"""Sample calls for every row of the rule tables: an op's name in, small double-precision calls of it out."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from autoplan_passes import collectives, dispatch, fused_loss, fused_ops, grouped, ring

aten = torch.ops.aten
D = torch.float64


@dataclass(frozen=True)
class Case:
    """One call; ``cuts`` are section cuts to try besides plain ones: (index of the tensor, dim, sections)."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    cuts: tuple[tuple[int, int, tuple[int, ...]], ...] = ()
    item: int | None = None


def r(*shape: int) -> torch.Tensor:
    """Values in (0.1, 0.9): legal for logarithms, roots and inverse cosines."""
    return torch.rand(*shape, dtype=D) * 0.8 + 0.1


def ids(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape)


def mask(*shape: int) -> torch.Tensor:
    return torch.rand(*shape) > 0.5


def heads() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return r(2, 4, 4, 2), r(2, 4, 4, 2), r(2, 4, 4, 2)


OUT = -2

CASES: tuple[Case, ...] = (
    # contractions
    Case(aten.linear.default, (r(2, 3, 4), r(6, 4))),
    Case(aten.linear.default, (r(2, 3, 4), r(6, 4), r(6)), cuts=((1, 0, (2, 4)),)),
    Case(aten.mm.default, (r(2, 4), r(4, 6))),
    Case(aten.mv.default, (r(2, 4), r(4))),
    Case(aten.dot.default, (r(4), r(4))),
    Case(aten.outer.default, (r(4), r(2))),
    Case(aten.bmm.default, (r(2, 4, 6), r(2, 6, 4))),
    Case(aten.addmm.default, (r(4), r(2, 6), r(6, 4))),
    Case(aten.addmm.default, (r(2, 4), r(2, 6), r(6, 4))),
    Case(aten.addmm.default, (r(2, 4), r(2, 6), r(6, 4)), {"beta": 2}),
    Case(aten.baddbmm.default, (r(2, 4, 2), r(2, 4, 6), r(2, 6, 2))),
    Case(aten.matmul.default, (r(2, 4, 6), r(6, 4))),
    Case(aten.matmul.default, (r(2, 1, 4, 6), r(4, 6, 2))),
    Case(aten.matmul.default, (r(6), r(6, 4))),
    Case(aten.matmul.default, (r(2, 4, 6), r(6))),
    Case(aten.einsum.default, ("bchn,bshn->bcsh", [r(2, 3, 4, 2), r(2, 5, 4, 2)])),
    Case(aten.einsum.default, ("ab,bc,cd->ad", [r(2, 4), r(4, 6), r(6, 2)])),
    Case(aten.einsum.default, ("...ab,...bc->...ac", [r(2, 2, 4), r(2, 4, 2)])),
    Case(aten.scaled_dot_product_attention.default, (r(2, 4, 3, 2), r(2, 4, 5, 2), r(2, 4, 5, 2))),
    Case(
        aten.scaled_dot_product_attention.default,
        (r(2, 4, 4, 2), r(2, 4, 4, 2), r(2, 4, 4, 2), mask(2, 1, 4, 4)),
    ),
    Case(aten.scaled_dot_product_attention.default, (r(2, 4, 4, 2), r(2, 4, 4, 2), r(2, 4, 4, 2), r(4, 4))),
    Case(
        aten.scaled_dot_product_attention.default,
        (r(2, 4, 4, 2), r(2, 4, 4, 2), r(2, 4, 4, 2), None, 0.0, True),
    ),
    Case(
        aten.scaled_dot_product_attention.default,
        (r(1, 8, 4, 2), r(1, 2, 4, 2), r(1, 2, 4, 2), None, 0.0, True),
        {"enable_gqa": True},
    ),
    Case(
        aten.scaled_dot_product_attention.default,
        (r(2, 12, 4, 2), r(2, 3, 4, 2), r(2, 3, 4, 2)),
        {"enable_gqa": True},
        cuts=((0, 1, (4, 4, 4)),),
    ),
    Case(aten.conv1d.default, (r(2, 4, 5), r(6, 4, 3), r(6), [1], [1])),
    Case(aten.conv1d.default, (r(2, 4, 5), r(4, 1, 3), r(4), [1], [1], [1], 4), cuts=((0, 1, (2, 2)),)),
    Case(aten.conv1d.default, (r(2, 4, 5), r(8, 2, 3), None, [1], [1], [1], 2)),
    Case(aten.conv2d.default, (r(2, 4, 4, 4), r(6, 4, 2, 2), r(6), [2, 2])),
    Case(aten.conv3d.default, (r(1, 2, 4, 4, 4), r(4, 2, 2, 2, 2), r(4), [2, 2, 2])),
    Case(
        aten.convolution.default,
        (r(2, 4, 4, 4), r(6, 4, 2, 2), r(6), [2, 2], [0, 0], [1, 1], False, [0, 0], 1),
    ),
    Case(aten.embedding.default, (r(8, 4), ids(8, 2, 4), 1)),
    Case(aten.embedding.default, (r(8, 4), ids(8, 2, 4), -1)),
    Case(aten.cross_entropy_loss.default, (r(4, 6), torch.tensor([1, 5, -100, 0]))),
    Case(aten.cross_entropy_loss.default, (r(4, 6), ids(6, 4), None, 2, -100, 0.1)),
    Case(aten.cross_entropy_loss.default, (r(4, 6), torch.tensor([1, 5, 3, 0]), None, 0, 3, 0.0)),
    Case(aten.mse_loss.default, (r(4, 6), r(4, 6))),
    Case(aten.mse_loss.default, (r(4, 6), r(4, 6), 2)),
    Case(aten.mse_loss.default, (r(4, 6), r(4, 6), 0)),
    Case(aten.l1_loss.default, (r(4, 6), r(4, 6))),
    # arithmetic with roles
    Case(aten.add.Tensor, (r(2, 4), r(4))),
    Case(aten.add.Tensor, (r(2, 4), 1.5)),
    Case(aten.add.Tensor, (r(2, 1, 4), r(2, 4)), {"alpha": 2}),
    Case(aten.sub.Tensor, (r(2, 4), r(2, 4))),
    Case(aten.mul.Tensor, (r(2, 4), r(2, 1))),
    Case(aten.mul.Tensor, (r(2, 4), 3)),
    Case(aten.mul.Scalar, (r(2, 4), 3)),
    Case(aten.div.Tensor, (r(2, 4), r(4))),
    Case(aten.div.Tensor, (r(2, 4), 3)),
    Case(aten.div.Tensor_mode, (r(2, 4), r(2, 4)), {"rounding_mode": "floor"}),
    Case(aten.where.self, (mask(2, 4), r(2, 4), r(4))),
    Case(aten.where.ScalarOther, (mask(2, 4), r(2, 4), 0)),
    Case(aten.where.ScalarOther, (mask(2, 4), r(2, 4), 1)),
    Case(aten.where.ScalarSelf, (mask(2, 4), 1, r(2, 4))),
    Case(aten.masked_fill.Scalar, (r(2, 4), mask(4), 0)),
    Case(aten.masked_fill.Scalar, (r(2, 4), mask(4), 7)),
    Case(aten.masked_fill.Tensor, (r(2, 4), mask(4), torch.tensor(7.0, dtype=D))),
    Case(aten.min.other, (r(2, 4), r(2, 4))),
    Case(aten.max.other, (r(2, 4), r(2, 4))),
    Case(aten._to_copy.default, (r(2, 4),), {"dtype": torch.float64}),
    Case(aten._to_copy.default, (r(2, 4),), {"dtype": torch.float32}),
    Case(aten.dropout.default, (r(2, 4), 0.5, True)),
    Case(aten.dropout.default, (r(2, 4), 0.5, False)),
    Case(aten.native_dropout.default, (r(4, 4), 0.5, True), item=0),
    Case(aten.broadcast_tensors.default, ([r(2, 4), r(4)],), item=1),
    Case(aten.to.dtype, (r(2, 4), torch.float64)),
    Case(aten.copy.default, (r(2, 4), r(4))),
    Case(aten.clamp.default, (r(2, 4), 0.3)),
    Case(aten.clip.default, (r(2, 4), 0.3, 0.6)),
    Case(aten.lerp.Tensor, (r(2, 4), r(2, 4), r(2, 4))),
    Case(aten.addcmul.default, (r(2, 4), r(2, 4), r(4))),
    # reductions
    Case(aten.sum.default, (r(2, 4),)),
    Case(aten.sum.dim_IntList, (r(2, 4, 6), [1])),
    Case(aten.sum.dim_IntList, (r(2, 4, 6), [-1, 0], True)),
    Case(aten.mean.default, (r(2, 4),)),
    Case(aten.mean.dim, (r(2, 4, 6), [-1], True)),
    Case(aten.amax.default, (r(2, 4), [1])),
    Case(aten.amin.default, (r(2, 4), [1], True)),
    Case(aten.max.default, (r(2, 4),)),
    Case(aten.max.dim, (r(2, 4), 1), item=0),
    Case(aten.min.dim, (r(2, 4), 0), item=0),
    Case(aten.argmax.default, (r(2, 4), 1)),
    Case(aten.argmin.default, (r(2, 4), 1)),
    Case(aten.any.dim, (mask(2, 4), 1)),
    Case(aten.all.dim, (mask(2, 4), 1)),
    Case(aten.prod.dim_int, (r(2, 4), 1)),
    Case(aten.logsumexp.default, (r(2, 4), [1])),
    Case(aten.var.correction, (r(2, 4), [1])),
    Case(aten.std.correction, (r(2, 4), [1])),
    Case(aten.var_mean.correction, (r(2, 4), [1]), item=1),
    Case(aten.norm.ScalarOpt_dim, (r(2, 4), 2, [1])),
    Case(aten.linalg_vector_norm.default, (r(2, 4), 2, [1])),
    Case(aten.min.default, (r(2, 4),)),
    # along one dim
    Case(aten.softmax.int, (r(2, 4, 6), -1)),
    Case(aten.log_softmax.int, (r(2, 4, 6), 1)),
    Case(aten._softmax.default, (r(2, 4), 1, False)),
    Case(aten._log_softmax.default, (r(2, 4), 1, False)),
    Case(aten.cumsum.default, (r(2, 4), 1)),
    Case(aten.cumprod.default, (r(2, 4), 1)),
    Case(aten.cummax.default, (r(2, 4), 1), item=0),
    Case(aten.logcumsumexp.default, (r(2, 4), 1)),
    Case(aten.sort.default, (r(2, 4),), item=0),
    Case(aten.sort.default, (r(2, 4), 0), item=1),
    Case(aten.argsort.default, (r(2, 4),)),
    Case(aten.topk.default, (r(2, 4), 2), item=0),
    Case(aten.glu.default, (r(2, 4),)),
    Case(aten.flip.default, (r(2, 4), [1])),
    Case(aten.roll.default, (r(2, 4), [1], [1])),
    Case(aten.tril.default, (r(2, 4, 4),)),
    Case(aten.triu.default, (r(2, 4, 4), 1)),
    Case(aten.prelu.default, (r(2, 4, 6) - 0.5, r(4))),
    # normalisation
    Case(aten.layer_norm.default, (r(2, 4, 6), [6], r(6), r(6))),
    Case(aten.layer_norm.default, (r(2, 4, 6), [4, 6])),
    Case(aten.rms_norm.default, (r(2, 4, 6), [6], r(6))),
    Case(aten.group_norm.default, (r(2, 8, 3), 4, r(8), r(8))),
    # factories
    Case(aten.zeros_like.default, (r(2, 4),)),
    Case(aten.ones_like.default, (r(2, 4),)),
    Case(aten.full_like.default, (r(2, 4), 3)),
    Case(aten.empty_like.default, (r(2, 4),)),
    Case(aten.new_zeros.default, (r(2, 4), [4, 6])),
    Case(aten.new_ones.default, (r(2, 4), [4, 6])),
    Case(aten.new_full.default, (r(2, 4), [4, 6], 3)),
    Case(aten.new_empty.default, (r(2, 4), [4, 6])),
    # views and moved dims
    Case(aten.view.default, (r(2, 6, 8), [2, 6, 4, 2]), cuts=((0, 2, (4, 4)), (0, 2, (2, 2, 2, 2)))),
    Case(aten.view.default, (r(2, 4, 2, 6), [-1, 6])),
    Case(aten.view.default, (r(6, 4), [4, 6])),
    Case(aten._unsafe_view.default, (r(2, 4, 6), [8, 6]), cuts=((OUT, 0, (4, 4)),)),
    Case(aten.reshape.default, (r(2, 6, 12), [2, 6, 3, 4]), cuts=((0, 2, (4, 4, 4)), (0, 2, (4, 8)))),
    Case(aten.flatten.using_ints, (r(2, 4, 6), 1), cuts=((0, 2, (2, 4)),)),
    Case(aten.unflatten.int, (r(2, 12), 1, [3, 4]), cuts=((0, 1, (4, 4, 4)),)),
    Case(aten.expand.default, (r(2, 1, 4), [2, 6, 4])),
    Case(aten.expand.default, (r(2, 1), [4, -1, 6])),
    Case(aten.repeat.default, (r(2, 4), [2, 1, 3]), cuts=((OUT, 2, (4, 4, 4)),)),
    Case(
        aten.repeat_interleave.self_int, (r(2, 4), 2, 1), {"output_size": 8}, cuts=((OUT, 1, (2, 2, 2, 2)),)
    ),
    Case(aten.repeat_interleave.self_int, (r(2, 4), 2)),
    Case(aten.transpose.int, (r(2, 4, 6), 1, -1)),
    Case(aten.t.default, (r(4, 6),)),
    Case(aten.permute.default, (r(2, 4, 6), [2, 0, 1])),
    Case(aten.movedim.int, (r(2, 4, 6), 0, 2)),
    Case(aten.unsqueeze.default, (r(2, 4), -1)),
    Case(aten.unsqueeze.default, (r(2, 4), 0)),
    Case(aten.squeeze.dim, (r(2, 1, 4), 1)),
    Case(aten.squeeze.dims, (r(1, 2, 1, 4), [0, 2])),
    Case(aten.squeeze.default, (r(1, 2, 1, 4),)),
    Case(aten.select.int, (r(2, 4, 6), 1, -1)),
    # pieces of a dim
    Case(aten.slice.Tensor, (r(2, 12), 1, 4, 8), cuts=((0, 1, (4, 4, 4)), (0, 1, (4, 2, 2, 4)))),
    Case(aten.slice.Tensor, (r(2, 12), 1, 0, 9223372036854775807)),
    Case(aten.slice.Tensor, (r(2, 12), 1, 1, 12, 2)),
    Case(aten.slice.Tensor, (r(2, 12),)),
    Case(aten.split.Tensor, (r(2, 12), 4, 1), cuts=((0, 1, (4, 4, 4)),), item=1),
    Case(aten.split_with_sizes.default, (r(2, 12), [2, 10], 1), cuts=((0, 1, (2, 4, 6)),), item=1),
    Case(aten.chunk.default, (r(2, 12), 3, 1), cuts=((0, 1, (4, 4, 4)),), item=2),
    Case(aten.unbind.int, (r(2, 4, 6), 1), item=2),
    Case(
        aten.cat.default,
        ([r(2, 4), r(2, 8)], 1),
        cuts=((OUT, 1, (4, 8)), (OUT, 1, (4, 2, 6)), (1, 1, (2, 6))),
    ),
    Case(aten.stack.default, ([r(2, 4), r(2, 4)], 1)),
    Case(aten.pad.default, (r(2, 4), [1, 0])),
    Case(aten.pad.default, (r(2, 4), [1, 0], "constant", 3.0)),
    Case(aten.constant_pad_nd.default, (r(2, 4), [0, 0, 1, 1])),
    # by index
    Case(aten.index.Tensor, (r(6, 4), [ids(6, 8)])),
    Case(aten.index.Tensor, (r(4, 6, 2), [None, ids(6, 4)])),
    Case(aten.index.Tensor, (r(4, 6, 2), [ids(4, 2, 1), ids(6, 4)])),
    Case(aten.index.Tensor, (r(4, 6, 2), [ids(4, 2), None, ids(2, 2)])),
    Case(aten.index.Tensor, (r(6, 4), [torch.tensor([True, False, True, False, True, True])])),
    Case(aten.index_put.default, (r(6, 4), [torch.tensor([1, 3])], r(2, 4))),
    Case(aten.index_put.default, (r(6, 4), [torch.tensor([1, 1])], r(4), True)),
    Case(aten.index_select.default, (r(2, 6), 1, ids(6, 4))),
    Case(aten.gather.default, (r(2, 6), 1, ids(6, 2, 4))),
    Case(aten.gather.default, (r(4, 6), 1, ids(6, 2, 4))),
    Case(aten.scatter.value, (r(2, 6), 1, ids(6, 2, 4), 1.0)),
    Case(aten.scatter.src, (r(2, 4), 1, torch.tensor([[0, 1, 3], [2, 0, 1]]), r(2, 3))),
    Case(aten.scatter_add.default, (r(2, 6), 1, ids(6, 2, 4), r(2, 4))),
    Case(aten.slice_scatter.default, (r(2, 6, 4), r(2, 2, 4), 1, 0, 2)),
    # collectives of an earlier axis
    Case(collectives.copy_to, (r(2, 4), "cp")),
    Case(collectives.reduce_from, (r(2, 4), "cp")),
    Case(collectives.once, (r(2, 4), "cp")),
    Case(collectives.first_of, (r(2, 4), "cp")),
    Case(collectives.on_first_rank, (r(2, 4), "cp")),
    Case(collectives.gather_from, (r(2, 4), 1, "cp")),
    Case(collectives.gather_reduce, (r(2, 4, 6), 1, "cp", (4, 4))),
    Case(collectives.reduce_scatter, (r(2, 4, 6), 1, "cp")),
    Case(collectives.scatter_to, (r(2, 4, 6), 0, "cp")),
    Case(collectives.slice_of, (r(2, 8, 6), 1, "cp", (4, 4))),
    Case(collectives.embed_piece, (r(2, 4), 1, "cp")),
    Case(collectives.all_to_all, (r(2, 4, 8, 6), 1, 2, "cp"), cuts=((0, 2, (4, 4)),)),
    Case(collectives.all_to_all, (r(2, 8, 4, 6), 2, 1, "cp"), cuts=((0, 1, (4, 4)), (OUT, 2, (4, 4)))),
    Case(collectives.position_cross_entropy, (r(4, 6), ids(6, 4), -100, 0.1, "cp")),
    Case(ring.ring_attention, (*heads(), None, True, 0.5, True, "cp")),
    Case(ring.ring_attention, (*heads(), mask(2, 4, 4, 8), False, 0.5, False, "cp")),
    Case(ring.ring_attention, (r(2, 8, 4, 2), r(2, 4, 4, 2), r(2, 4, 4, 2), None, True, 0.5, True, "cp")),
    Case(ring.ring_attention, (r(2, 8, 4, 2), r(2, 1, 4, 2), r(2, 1, 4, 2), None, False, 0.5, True, "cp")),
    Case(grouped.grouped_product, (r(6, 4), r(3, 4, 8), torch.tensor([2, 2, 6], dtype=torch.int32))),
    # fused
    Case(fused_ops.fused_rms_norm, (r(2, 4, 6), r(6), 1e-3)),
    Case(fused_ops.fused_layer_norm, (r(2, 4, 6), r(6), r(6), 1e-3)),
    Case(fused_ops.fused_add_rms_norm, (r(2, 4, 6), r(2, 4, 6), r(6), 1e-3), item=0),
    Case(fused_ops.fused_add_rms_norm, (r(2, 4, 6), r(2, 4, 6), r(6), 1e-3), item=1),
    Case(fused_ops.fused_add_layer_norm, (r(2, 4, 6), r(2, 4, 6), r(6), r(6), 1e-3), item=0),
    Case(fused_ops.fused_swiglu, (r(2, 4, 6), r(2, 4, 6))),
    Case(fused_ops.fused_geglu, (r(2, 4, 6), r(2, 4, 6), "tanh")),
    Case(fused_ops.fused_rotary, (r(2, 4, 6, 8), r(1, 1, 6, 8), r(2, 1, 6, 8))),
    Case(fused_loss.linear_cross_entropy, (r(4, 6), r(8, 6), torch.tensor([1, 7, -100, 0]), -100, 0.1, 1, 3)),
    Case(fused_loss.linear_cross_entropy, (r(4, 6), r(8, 6), ids(8, 4), -100, 0.0, 0, 2)),
    Case(fused_loss.linear_cross_entropy, (r(4, 6), r(8, 6), ids(8, 4), -100, 0.0, 2, 9)),
    Case(fused_loss.linear_cross_entropy, (r(4, 6), r(8, 6), ids(8, 4), -100, 0.1, 1, 2, "cp")),
    Case(fused_loss.linear_cross_entropy, (r(4, 6), r(8, 6), ids(8, 4), -100, 0.1, 1, 2, "", "cp")),
    Case(fused_loss.linear_cross_entropy, (r(4, 6), r(8, 6), ids(7, 4), -100, 0.0, 1, 2, "", "", 7)),
    # to the experts and back
    Case(dispatch.route, (torch.tensor([2, 2, 6]), r(6, 4), "ep")),
    Case(dispatch.dispatch, (r(4, 6), torch.tensor([[4], [4]]), torch.tensor([2, 0, 3, 1]), "ep")),
    Case(dispatch.combine, (r(4, 2, 6), torch.tensor([[4], [4]]), torch.tensor([2, 0, 3, 1]), "ep")),
)


def elementwise_cases(name: str) -> Iterator[Case]:
    """Calls of every overload of an elementwise op that takes the samples: floats, else integers, bools."""
    packet = getattr(aten, name, None)
    if packet is None:
        return
    for overload in packet.overloads():
        op = getattr(packet, overload)
        schema = op._schema
        if schema.is_mutable or str(schema.returns[0].type) != "Tensor" or "out" in overload:
            continue
        for tensor in (r(2, 4), ids(3, 2, 4), mask(2, 4)):
            required = [a for a in schema.arguments if not a.has_default_value() and not a.kwarg_only]
            kinds = [str(a.type) for a in required]
            if kinds.count("Tensor") == 0:
                continue
            sample = {"Tensor": tensor, "number": 0.5, "int": 1, "bool": False, "float": 0.5}
            args = tuple(sample.get(kind, 0.5) for kind in kinds)
            try:
                if isinstance(op(*args), torch.Tensor):
                    yield Case(op, args)
                    break
            except (RuntimeError, TypeError, NotImplementedError):
                continue


def item_of(value: Any, index: int | None) -> Any:
    return value if index is None else operator.getitem(value, index)
