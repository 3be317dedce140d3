"""The work read off a graph: FLOPs against PyTorch's own counter, and what must never cost nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cost_fixture import LlamaBlock, fake_region, region_graph_of
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from autoplan.errors import UnsupportedOpError
from autoplan_cost_models import Operation, operations
from autoplan_cost_models.contractions import CONTRACTION_WORDS, NOT_CONTRACTIONS

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")


class Function(nn.Module):
    """``function`` of the inputs, as a module."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.function(*inputs)


def x(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


CONTRACTIONS: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "linear": (F.linear, (x(2, 5, 8), x(6, 8))),
    "linear with bias": (F.linear, (x(2, 5, 8), x(6, 8), x(6))),
    "mm": (torch.mm, (x(5, 8), x(8, 6))),
    "bmm": (torch.bmm, (x(3, 5, 8), x(3, 8, 6))),
    "addmm": (torch.addmm, (x(6), x(5, 8), x(8, 6))),
    "baddbmm": (torch.baddbmm, (x(3, 5, 6), x(3, 5, 8), x(3, 8, 6))),
    "matmul batched": (torch.matmul, (x(2, 3, 5, 8), x(2, 3, 8, 6))),
    "matmul by a matrix": (torch.matmul, (x(2, 3, 5, 8), x(8, 6))),
    "einsum": (lambda a, b: torch.einsum("bsi,oi->bso", a, b), (x(2, 5, 8), x(6, 8))),
    "einsum with a batch": (
        lambda a, b: torch.einsum("bhqd,bhkd->bhqk", a, b),
        (x(2, 3, 5, 8), x(2, 3, 7, 8)),
    ),
    "conv1d": (F.conv1d, (x(2, 4, 16), x(6, 4, 3))),
    "conv2d": (lambda a, w: F.conv2d(a, w, stride=2), (x(2, 3, 8, 8), x(6, 3, 2, 2))),
    "conv2d grouped": (lambda a, w: F.conv2d(a, w, groups=2), (x(2, 4, 8, 8), x(6, 2, 3, 3))),
    "conv2d unbatched": (F.conv2d, (x(3, 8, 8), x(6, 3, 2, 2))),
    "conv3d": (F.conv3d, (x(1, 2, 6, 6, 6), x(4, 2, 2, 2, 2))),
    "conv transposed": (lambda a, w: F.conv_transpose2d(a, w, stride=2), (x(2, 4, 5, 5), x(4, 6, 2, 2))),
}


def contractions(found: tuple[Operation, ...]) -> list[Operation]:
    return [operation for operation in found if operation.kind in ("gemm", "grouped_gemm", "attention")]


@pytest.mark.parametrize("name", CONTRACTIONS)
def test_contraction_flops_equal_pytorchs_counter(name: str) -> None:
    """Forward and both backward products: a linear traced before dispatch once priced at 0."""
    function, inputs = CONTRACTIONS[name]
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    forward, backward = FlopCounterMode(display=False), FlopCounterMode(display=False)
    with forward:
        output = function(*leaves)
    with backward:
        output.sum().backward()
    (operation,) = contractions(operations(region_graph_of(Function(function), *inputs)))
    assert operation.forward_flops == forward.get_total_flops()
    if name == "conv2d grouped":  # torch's counter multiplies the weight gradient by the groups
        assert operation.backward_flops == 2 * operation.forward_flops
    else:
        assert operation.backward_flops == backward.get_total_flops()


@pytest.mark.parametrize("causal", [False, True])
def test_attention_flops(causal: bool) -> None:
    """Two products forward, five backward (2.5x), half of it when causal."""
    q, k = x(2, 4, 16, 8), x(2, 4, 16, 8)
    graph = region_graph_of(
        Function(lambda a, b, c: F.scaled_dot_product_attention(a, b, c, is_causal=causal)), q, k, k
    )
    (operation,) = contractions(operations(graph))
    full = 4 * 2 * 4 * 16 * 16 * 8
    assert operation.forward_flops == full * (0.5 if causal else 1)
    assert operation.backward_flops == 2.5 * operation.forward_flops
    assert operation.forward[0].causal is causal


def test_grouped_products_share_rows_evenly() -> None:
    """A mixture-of-experts product has the FLOPs of its tokens, not of tokens times experts."""
    tokens, experts = torch.randn(64, 16, dtype=torch.bfloat16), torch.randn(4, 16, 32, dtype=torch.bfloat16)
    ends = torch.tensor([16, 32, 48, 64], dtype=torch.int32)

    def grouped(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm(a, b, offs=offs)

    graph = region_graph_of(Function(grouped), tokens, experts, ends)
    (operation,) = contractions(operations(graph))
    assert operation.kind == "grouped_gemm"
    assert operation.forward_flops == 2 * 64 * 16 * 32
    assert operation.backward_flops == 2 * operation.forward_flops
    assert operation.forward[0].m == 16


@pytest.mark.filterwarnings("ignore:The tensor attributes:UserWarning")
def test_recurrent_layers_multiply_every_weight_at_every_step() -> None:
    """A 2-layer LSTM once had no formula at all."""
    graph = region_graph_of(nn.LSTM(8, 16, num_layers=2, batch_first=True), x(3, 5, 8))
    (operation,) = contractions(operations(graph))
    assert operation.forward_flops == 2 * 3 * 5 * 4 * 16 * (8 + 16 + 16 + 16)
    assert operation.backward_flops == 2 * operation.forward_flops


def test_frozen_operands_cost_no_gradient() -> None:
    """A frozen weight needs no weight gradient; an input without gradient needs no input gradient."""
    layer = nn.Linear(8, 6, bias=False)
    both = operations(region_graph_of(layer, x(5, 8)))[0]
    no_input = operations(region_graph_of(layer, x(5, 8), gradients=(False,)))[0]
    layer.weight.requires_grad_(False)
    frozen = operations(region_graph_of(layer, x(5, 8)))[0]
    neither = operations(region_graph_of(layer, x(5, 8), gradients=(False,)))[0]
    assert [len(o.backward) for o in (both, no_input, frozen, neither)] == [2, 1, 1, 0]
    assert both.backward_flops == 2 * frozen.backward_flops


@torch.library.custom_op("costtest::strange_mm", mutates_args=())
def strange_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


@strange_mm.register_fake
def _(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


def test_unknown_contraction_is_refused_then_priced_by_meta() -> None:
    """A custom product without a formula must stop the plan; with FLOPs in its meta it is priced."""
    graph = region_graph_of(Function(strange_mm), x(4, 8), x(8, 6))
    with pytest.raises(UnsupportedOpError, match=r"strange_mm.*no FLOPs formula.*--opaque"):
        operations(graph)
    node = next(n for n in graph.graph.nodes if n.op == "call_function")
    node.meta["flops"] = 384.0
    assert operations(graph)[0].forward_flops == 384.0


NAMES = {
    True: (
        "strange_mm",
        "my_bmm",
        "int_matmul",
        "depthwise_conv2d",
        "ring_attention",
        "linear_fp8",
        "gru_cell",
    ),
    False: ("lgamma", "cummax", "convert_element_type", "upsample_bilinear2d", "hamming_window", "comm_hook"),
}


@pytest.mark.parametrize(("product", "name"), [(p, name) for p, names in NAMES.items() for name in names])
def test_which_names_look_like_products(product: bool, name: str) -> None:
    """lgamma has an mm in it and is no product; a new attention function must not run for free."""
    found = CONTRACTION_WORDS.search(name) is not None and not name.startswith(NOT_CONTRACTIONS)
    assert found is product


FREE = {
    "view": lambda a: a.view(-1),
    "transpose": lambda a: a.transpose(0, 1),
    "reshape of contiguous": lambda a: a.reshape(2, -1),
    "unsqueeze": lambda a: a.unsqueeze(0),
    "same dtype": lambda a: a.to(torch.float32),
}
MOVING = {
    "reshape of transposed": lambda a: a.transpose(0, 1).reshape(-1),
    "contiguous of transposed": lambda a: a.transpose(0, 1).contiguous(),
    "cast": lambda a: a.to(torch.bfloat16),
    "add": lambda a: a + 1,
    "cat": lambda a: torch.cat([a, a]),
}


@pytest.mark.parametrize("name", [*FREE, *MOVING])
def test_views_are_free_and_copies_are_not(name: str) -> None:
    """A reshape after a transpose moves every byte, a reshape of a contiguous tensor none."""
    function = {**FREE, **MOVING}[name]
    found = operations(region_graph_of(Function(function), x(4, 6)))
    moved = sum(operation.forward_bytes for operation in found)
    assert (moved == 0) == (name in FREE)


def test_llama_3_8b_block_flops() -> None:
    """6 x parameters x tokens, plus attention: 3 (forward, backward) x 2 products x 2 x S^2/2 x width."""
    sequence, width = 4096, 4096
    graphs = fake_region(
        lambda: LlamaBlock(width, 32, 8, 14336),
        lambda batch: (torch.empty(batch, sequence, width, dtype=torch.bfloat16),),
    )
    found = operations(graphs[1])
    parameters = width * (2 * width + 2 * width // 4 + 3 * 14336)
    attention_forward = 2 * 2 * sequence * sequence / 2 * width
    forward = sum(operation.forward_flops for operation in found)
    backward = sum(operation.backward_flops for operation in found)
    assert 3 * forward == 6 * parameters * sequence + 3 * attention_forward
    assert backward == 4 * parameters * sequence + 2.5 * attention_forward
