"""Stage 1 of 2 of tiny_gpt: blocks.1, head.

Mesh pp 2 x dp 1 x tp 2, micro-batch of 2. Written by autoplan; needs torch alone.
Reads of the batch: labels.
Recomputed in the backward (selective): head.
Recomputed in the backward (full): blocks.1.
"""


import torch
import torch.nn.functional as F
from collections.abc import Callable, Sequence
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from typing import Any


aten = torch.ops.aten
DEVICE = torch.device("cpu")  # set by whoever runs the stage

SAVED = [  # products, attention and collectives are kept, the rest is recomputed
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten.convolution.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default,
    torch.ops._c10d_functional.all_reduce.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.all_to_all_single.default,
]


def save_products():
    return create_selective_checkpoint_contexts(SAVED)


Tensor = torch.Tensor


GROUPS: dict[str, Any] = {}


class DryGroup:
    """A group in which nothing is sent: shapes and memory are those of ``size`` ranks, values are not."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def bind(groups: dict[str, Any]) -> dict[str, Any]:
    """Name the group of each mesh axis; returns the names bound before, for binding them again."""
    before = dict(GROUPS)
    GROUPS.clear()
    GROUPS.update(groups)
    return before


def rank_of(axis: str) -> int:
    return GROUPS[axis].rank()


def size_of(axis: str) -> int:
    return GROUPS[axis].size()


def _all_reduce(x: Tensor, axis: str, how: str = "sum") -> Tensor:
    group = GROUPS[axis]
    if isinstance(group, DryGroup):
        return x.clone()
    comm = torch.ops._c10d_functional
    return comm.wait_tensor(comm.all_reduce(x.contiguous(), how, group.group_name))


def gather_whole(
    x: Tensor, dim: int, axis: str, sections: Sequence[int] = (), zigzag: bool = False
) -> Tensor:
    """The whole of what every rank has a piece of, without gradient."""
    return _joined(_start_gather(x, axis), x, dim, axis, sections, zigzag)


def _start_gather(x: Tensor, axis: str) -> Tensor:
    group, size = GROUPS[axis], size_of(axis)
    if isinstance(group, DryGroup):
        return x
    flat = x.contiguous().reshape(1, *x.shape)
    return torch.ops._c10d_functional.all_gather_into_tensor(flat, size, group.group_name)


def _joined(
    sent: Tensor, x: Tensor, dim: int, axis: str, sections: Sequence[int] = (), zigzag: bool = False
) -> Tensor:
    if isinstance(GROUPS[axis], DryGroup):
        return _join([x] * size_of(axis), dim, sections, zigzag)
    return _join(torch.ops._c10d_functional.wait_tensor(sent).unbind(0), dim, sections, zigzag)


def _cut(
    x: Tensor, dim: int, rank: int, size: int, sections: Sequence[int] = (), zigzag: bool = False
) -> Tensor:
    parts = x.split(list(sections), dim) if sections else [x]
    held = (rank, 2 * size - 1 - rank) if zigzag else (rank,)
    own = [part.chunk(size * len(held), dim)[i] for part in parts for i in held]
    return torch.cat(own, dim) if len(own) > 1 else own[0].contiguous()


def _join(pieces: Sequence[Tensor], dim: int, sections: Sequence[int] = (), zigzag: bool = False) -> Tensor:
    if not sections and not zigzag:
        return torch.cat(list(pieces), dim)
    turns = 2 if zigzag else 1  # the second half of every section comes in reverse order of ranks
    whole = sections or [len(pieces) * pieces[0].shape[dim]]
    by_rank = [
        piece.split([n // len(pieces) // turns for n in whole for _ in range(turns)], dim) for piece in pieces
    ]
    joined = [part[::-1] if i % turns else part for i, part in enumerate(zip(*by_rank))]
    return torch.cat([piece for part in joined for piece in part], dim)


def _slice(x: Tensor, dim: int, axis: str, sections: Sequence[int] = (), zigzag: bool = False) -> Tensor:
    return _cut(x, dim, rank_of(axis), size_of(axis), sections, zigzag)


def _same(x: Tensor, *_: Any) -> Tensor:
    return x.view_as(x)


def _first(x: Tensor, axis: str) -> Tensor:
    return x.clone() if rank_of(axis) == 0 else torch.zeros_like(x)


class _Convert(torch.autograd.Function):
    """``forward(x, *arguments)``, whose gradient is ``backward(gradient, *back_arguments)``."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, forward: Any, arguments: Any, backward: Any, back_arguments: Any
    ) -> Tensor:
        ctx.backward_of, ctx.arguments = backward, back_arguments
        return forward(x, *arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.backward_of(gradients[0], *ctx.arguments), None, None, None, None


def _convert(
    x: Tensor, forward: Callable[..., Tensor], backward: Callable[..., Tensor], *arguments: Any
) -> Tensor:
    return _Convert.apply(x, forward, arguments, backward, arguments)


def copy_to(x: Tensor, axis: str) -> Tensor:
    """Replicated, about to be used on shards: the same value; gradients are summed over ranks."""
    return _convert(x, _same, _all_reduce, axis)


def reduce_from(x: Tensor, axis: str) -> Tensor:
    """Partial sums to their sum on every rank; the gradient passes as it is."""
    return _convert(x, _all_reduce, _same, axis)


def gather_from(x: Tensor, dim: int, axis: str, sections: Sequence[int] = (), zigzag: bool = False) -> Tensor:
    """Pieces of ``dim`` to the whole on every rank; each rank keeps its piece of the gradient."""
    return _convert(x, gather_whole, _slice, dim, axis, sections, zigzag)


def on_first_rank(x: Tensor, axis: str) -> Tensor:
    """Replicated to partial: the value on rank 0, zero elsewhere; every rank has the whole gradient."""
    return _convert(x, _first, _same, axis)


class Block(nn.Module):
    """blocks.1: tp 2: q_weight S(0), k_weight S(0), v_weight S(0), out_weight S(1), up_weight S(0), up_bias S(0), down_weight S(1); forward 2 all_reduce."""

    def __init__(self):
        super().__init__()
        self.norm_1_weight = nn.Parameter(torch.empty(16, dtype=torch.float32))
        self.norm_1_bias = nn.Parameter(torch.empty(16, dtype=torch.float32))
        self.q_weight = nn.Parameter(torch.empty(8, 16, dtype=torch.float32))  # S(0) of [16, 16]
        self.k_weight = nn.Parameter(torch.empty(8, 16, dtype=torch.float32))  # S(0) of [16, 16]
        self.v_weight = nn.Parameter(torch.empty(8, 16, dtype=torch.float32))  # S(0) of [16, 16]
        self.out_weight = nn.Parameter(torch.empty(16, 8, dtype=torch.float32))  # S(1) of [16, 16]
        self.norm_2_weight = nn.Parameter(torch.empty(16, dtype=torch.float32))
        self.norm_2_bias = nn.Parameter(torch.empty(16, dtype=torch.float32))
        self.up_weight = nn.Parameter(torch.empty(16, 16, dtype=torch.float32))  # S(0) of [32, 16]
        self.up_bias = nn.Parameter(torch.empty(16, dtype=torch.float32))  # S(0) of [32]
        self.down_weight = nn.Parameter(torch.empty(16, 16, dtype=torch.float32))  # S(1) of [16, 32]
        self.down_bias = nn.Parameter(torch.empty(16, dtype=torch.float32))

    def forward(self, x_0):
        # x_0: [2, 8, 16] float32
        norm_1 = torch.layer_norm(x_0, [16], self.norm_1_weight, self.norm_1_bias, 1e-05, False)  # [2, 8, 16] float32
        copy_to_out = copy_to(norm_1, "tp"); del norm_1  # [2, 8, 16] float32
        q = F.linear(copy_to_out, self.q_weight)  # [2, 8, 8] float32
        view = q.reshape(2, 8, 2, 4); del q  # [2, 8, 2, 4] float32
        transpose = view.transpose(1, 2); del view  # [2, 2, 8, 4] float32
        k = F.linear(copy_to_out, self.k_weight)  # [2, 8, 8] float32
        view_1 = k.reshape(2, 8, 2, 4); del k  # [2, 8, 2, 4] float32
        transpose_1 = view_1.transpose(1, 2); del view_1  # [2, 2, 8, 4] float32
        v = F.linear(copy_to_out, self.v_weight); del copy_to_out  # [2, 8, 8] float32
        view_2 = v.reshape(2, 8, 2, 4); del v  # [2, 8, 2, 4] float32
        transpose_2 = view_2.transpose(1, 2); del view_2  # [2, 2, 8, 4] float32
        scaled_dot_product_attention = F.scaled_dot_product_attention(transpose, transpose_1, transpose_2, None, 0.1, True); del transpose, transpose_1, transpose_2  # [2, 2, 8, 4] float32
        transpose_3 = scaled_dot_product_attention.transpose(1, 2); del scaled_dot_product_attention  # [2, 8, 2, 4] float32
        clone = aten.clone.default(transpose_3, memory_format=torch.contiguous_format); del transpose_3  # [2, 8, 2, 4] float32
        unsafe_view = clone.reshape(2, 8, 8); del clone  # [2, 8, 8] float32
        out = F.linear(unsafe_view, self.out_weight); del unsafe_view  # [2, 8, 16] float32
        reduce_from_out = reduce_from(out, "tp"); del out  # [2, 8, 16] float32
        native_dropout = aten.native_dropout.default(reduce_from_out, 0.1, True); del reduce_from_out  # ([2, 8, 16] float32, [2, 8, 16] bool)
        getitem = native_dropout[0]; del native_dropout  # [2, 8, 16] float32
        add = x_0 + getitem; del x_0, getitem  # [2, 8, 16] float32
        norm_2 = torch.layer_norm(add, [16], self.norm_2_weight, self.norm_2_bias, 1e-05, False)  # [2, 8, 16] float32
        copy_to_1 = copy_to(norm_2, "tp"); del norm_2  # [2, 8, 16] float32
        up = F.linear(copy_to_1, self.up_weight, self.up_bias); del copy_to_1  # [2, 8, 16] float32
        gelu = F.gelu(up); del up  # [2, 8, 16] float32
        on_first_rank_out = on_first_rank(self.down_bias, "tp")  # [16] float32
        down = F.linear(gelu, self.down_weight, on_first_rank_out); del gelu, on_first_rank_out  # [2, 8, 16] float32
        reduce_from_1 = reduce_from(down, "tp"); del down  # [2, 8, 16] float32
        add_1 = add + reduce_from_1; del add, reduce_from_1  # [2, 8, 16] float32
        return add_1


class Head(nn.Module):
    """head: tp 2: weight S(0); forward 1 all_gather."""

    def __init__(self):
        super().__init__()
        self.norm_weight = nn.Parameter(torch.empty(16, dtype=torch.float32))
        self.norm_bias = nn.Parameter(torch.empty(16, dtype=torch.float32))
        self.weight = nn.Parameter(torch.empty(32, 16, dtype=torch.float32))  # S(0) of [64, 16]

    def forward(self, x_0, x_1):
        # x_0: [2, 8, 16] float32
        # x_1: [2, 8] int64
        norm = torch.layer_norm(x_0, [16], self.norm_weight, self.norm_bias, 1e-05, False); del x_0  # [2, 8, 16] float32
        copy_to_out = copy_to(norm, "tp"); del norm  # [2, 8, 16] float32
        linear = F.linear(copy_to_out, self.weight); del copy_to_out  # [2, 8, 32] float32
        view = linear.reshape(16, 32); del linear  # [16, 32] float32
        view_1 = x_1.reshape(16); del x_1  # [16] int64
        gather_from_out = gather_from(view, 1, "tp"); del view  # [16, 64] float32
        cross_entropy_loss = F.cross_entropy(gather_from_out, view_1); del gather_from_out, view_1  # [] float32
        return cross_entropy_loss


class Stage(nn.Module):
    """Receives received_add_1; returns the loss."""

    def __init__(self):
        super().__init__()
        self.blocks_1 = Block()
        self.head = Head()

    def forward(self, received_add_1, labels):
        blocks_1_out = checkpoint(self.blocks_1, received_add_1, use_reentrant=False); del received_add_1
        loss = checkpoint(self.head, blocks_1_out, labels, use_reentrant=False, context_fn=save_products); del blocks_1_out, labels
        return loss


PARAMETERS = {
    "blocks_1.norm_1_weight": ("blocks.1.norm_1.weight", "R"),
    "blocks_1.norm_1_bias": ("blocks.1.norm_1.bias", "R"),
    "blocks_1.q_weight": ("blocks.1.q.weight", "S(0)"),
    "blocks_1.k_weight": ("blocks.1.k.weight", "S(0)"),
    "blocks_1.v_weight": ("blocks.1.v.weight", "S(0)"),
    "blocks_1.out_weight": ("blocks.1.out.weight", "S(1)"),
    "blocks_1.norm_2_weight": ("blocks.1.norm_2.weight", "R"),
    "blocks_1.norm_2_bias": ("blocks.1.norm_2.bias", "R"),
    "blocks_1.up_weight": ("blocks.1.up.weight", "S(0)"),
    "blocks_1.up_bias": ("blocks.1.up.bias", "S(0)"),
    "blocks_1.down_weight": ("blocks.1.down.weight", "S(1)"),
    "blocks_1.down_bias": ("blocks.1.down.bias", "R"),
    "head.norm_weight": ("norm.weight", "R"),
    "head.norm_bias": ("norm.bias", "R"),
    "head.weight": ("embedding.weight", "S(0)"),
}
BUFFERS = {
}
