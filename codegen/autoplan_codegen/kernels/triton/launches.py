"""One launch of each kernel in (types, tile sizes, warps), what the compiler checks are made of out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import triton.language as tl

from autoplan_codegen.kernels.triton import (
    attention,
    cross_entropy,
    experts,
    gated,
    norms,
    optimizer,
    rotary,
    sparse,
)
from autoplan_codegen.kernels.triton.tiles import Tile, pieces_of_rows, whole_rows

ROW, STRIDES = "*bf16", ("x_stride", "r_stride", "g_stride", "u_stride", "dy_stride", "ds_stride", "columns")


@dataclass(frozen=True)
class Launch:
    """``arguments``: the type of each argument (``*bf16``, ``i32``, ``fp32``), or the value of a constant."""

    kernel: Any
    arguments: Mapping[str, Any]
    warps: int
    stages: int = 2
    multiples: tuple[str, ...] = ()
    """Numbers that are multiples of 16."""
    constants: tuple[str, ...] = ()
    """Constants that are text."""
    amd: tuple[int, int, int, int] | None = None
    """Rows, columns, warps and stages on AMD's chips, whose registers are other."""

    def on_amd(self) -> Launch:
        if self.amd is None:
            return self
        rows, columns, warps, stages = self.amd
        arguments = {**self.arguments, "ROWS": rows, "COLUMNS": columns}
        return replace(self, arguments=arguments, warps=warps, stages=stages, amd=None)


def _rows(kernel: Any, tile: Tile, tensors: str, **arguments: Any) -> Launch:
    """A kernel over rows: bf16 ``tensors``, sizes i32, the tile."""
    given: dict[str, Any] = dict.fromkeys(tensors.split(), ROW)
    given |= arguments
    for name in kernel.arg_names:
        given.setdefault(name, "i32")
    given |= {"ROWS": tile.rows, "BLOCK": tile.columns}
    return Launch(kernel, given, tile.warps, multiples=STRIDES, constants=("KIND",))


def _norm(centred: bool, backward: bool, residual: bool, columns: int = 4096) -> Launch:
    tile, bias = whole_rows(columns), centred
    if backward:
        none = {} if residual else {"DS": None}
        bias_type = {"DB": "*fp32" if bias else None}
        given = {"DW": "*fp32", "eps": "fp32", "CENTRED": centred, **none, **bias_type}
        return _rows(norms.norm_backward_kernel, tile, "DY DS X W DX", **given)
    none = {} if residual else {"R": None, "S": None}
    given = {"eps": "fp32", "CENTRED": centred, **none, **({} if bias else {"B": None})}
    return _rows(norms.norm_forward, tile, "X R W B Y S", **given)


def _adamw(master: bool) -> Launch:
    types = {"GRADIENT": tl.bfloat16, "FIRST": tl.float32, "SECOND": tl.float32, "MASTER": tl.float32}
    numbers = dict.fromkeys(("keep", "size_1", "size_2", "beta1", "beta2", "eps", "scale"), "fp32")
    given = {
        "ADDRESSES": "*i64",
        "BLOCKS": "*i64",
        **numbers,
        **types,
        "ALIGNED": True,
        "BLOCK": optimizer.BLOCK,
    }
    return Launch(optimizer.adamw_kernel, {**given, "PARAMETER": tl.bfloat16 if master else None}, warps=8)


def _rotary(back: bool) -> Launch:
    kernel = rotary.rotary_kernel
    given: dict[str, Any] = dict.fromkeys(kernel.arg_names, "i32")
    given |= dict.fromkeys(("X", "COS", "SIN", "Y"), ROW)
    given |= {"BACK": back, "PLACES": 1, "HEADS": 32, "HALF": 64, "REST": 0}
    numbers = tuple(
        name for name in kernel.arg_names if given[name] == "i32" and name not in ("outer", "rest")
    )
    return Launch(kernel, given, Tile(1, 2048).warps, multiples=numbers)


def _losses(backward: bool) -> Launch:
    kernel = cross_entropy.pieces_backward_kernel if backward else cross_entropy.pieces_kernel
    given: dict[str, Any] = dict.fromkeys(kernel.arg_names, "*fp32")
    given |= {
        "LOGITS": ROW,
        "LABELS": "*i64",
        "stride": "i32",
        "columns": "i32",
        "start": "i32",
        "BLOCK": 4096,
    }
    given |= {"D_LOGITS": ROW, "d_stride": "i32"} if backward else {}
    return Launch(kernel, given, Tile(1, 4096).warps, multiples=("stride", "d_stride", "columns"))


def _attention(kernel: Any, choice: tuple[int, int, int, int], head: int, windowed: bool) -> Launch:
    """Tiles of ``choice`` (rows, columns, warps, stages)."""
    rows, columns, warps, stages = choice
    names = kernel.arg_names
    strides = tuple(n for n in names if n[:2] in ("q_", "k_", "v_", "o_", "g_"))
    given: dict[str, Any] = dict.fromkeys(names, "i32") | {"scale": "fp32", "LENGTH": 8192}
    given |= {n: ROW for n in ("Q", "K", "V", "G", "OUT", "D_Q", "D_K", "D_V") if n in names}
    given |= {n: "*fp32" for n in ("LOG_SUM", "MEANS") if n in names}
    given |= {"CAUSAL": True, "WINDOWED": windowed, "HEAD": head, "EVEN": True, "PRECISION": "tf32"}
    given |= {"ROWS": rows, "COLUMNS": columns}
    return Launch(kernel, given, warps, stages, (*strides, "rows", "columns", "size"), ("PRECISION",))


def _means() -> Launch:
    kernel = attention.means_kernel
    given: dict[str, Any] = dict.fromkeys(kernel.arg_names, "i32") | {
        "OUT": ROW,
        "D_OUT": ROW,
        "MEANS": "*fp32",
    }
    given |= {"ROWS": 16, "HEAD": 128}
    strides = tuple(n for n in kernel.arg_names if n[:2] in ("o_", "d_"))
    return Launch(kernel, given, 4, multiples=(*strides, "size"))


def _products(kernel: Any, choice: tuple[int, int, int, int]) -> Launch:
    rows, columns, warps, stages = choice
    names = kernel.arg_names
    given: dict[str, Any] = dict.fromkeys(names, "i32") | {"LENGTH": 8192, "INNER": 64, "PRECISION": "tf32"}
    given |= {n: ROW for n in ("X", "W", "Y", "D_Y", "D_W") if n in names} | {"AT": "*i64", "ENDS": "*i32"}
    given |= {"ROWS": rows, "COLUMNS": columns}
    given |= {"EXPERTS": 128, "w_outer": 1} if "EXPERTS" in names else {}
    multiples = ("inner", "outer", "x_stride", "y_stride", "w_expert", "w_inner")
    return Launch(kernel, given, warps, stages, multiples, ("PRECISION",))


def _combine(kernel: Any, tile: Tile) -> Launch:
    given: dict[str, Any] = {n: ROW for n in kernel.arg_names if n.isupper()}
    given |= {n: "i32" for n in kernel.arg_names if not n.isupper()} | {"PLACES": "*i64"}
    given |= {"CHOICES": 8, "BLOCK": tile.columns}
    return Launch(kernel, given, tile.warps, multiples=("stride", "g_stride", "columns"))


def _sparse(kernel: Any) -> Launch:
    """16 query heads of 128 on one key-value head."""
    names = kernel.arg_names
    given: dict[str, Any] = {n: "i32" for n in names if not n.isupper()} | {"scale": "fp32"}
    given |= {n: ROW for n in ("Q", "K", "V", "OUT", "G", "D_Q") if n in names} | {"KEYS": "*i32"}
    given |= {n: "*fp32" for n in ("LOG_SUM", "D_K", "D_V") if n in names}
    given |= {"GROUP": 16, "HEAD": 128, "V_HEAD": 128, "PRECISION": "tf32", "N": 32}
    strides = tuple(n for n in names if n[:2] in ("q_", "k_", "v_"))
    return Launch(kernel, given, 8, 2, (*strides, "size", "count"), ("PRECISION",))


def _scores() -> Launch:
    kernel = sparse.scores_kernel
    given: dict[str, Any] = dict.fromkeys(kernel.arg_names, "i32") | {
        "Q": ROW,
        "K": ROW,
        "W": ROW,
        "OUT": "*fp32",
    }
    given |= {"CAUSAL": True, "SIZE": 128, "PRECISION": "tf32", "ROWS": 64, "COLUMNS": 128}
    strides = tuple(n for n in kernel.arg_names if n[:2] in ("q_", "k_", "w_"))
    return Launch(kernel, given, 4, 3, (*strides, "columns", "size"), ("PRECISION",))


_PIECE = pieces_of_rows(14336)
_GELU: dict[str, Any] = {"SEED": "*i64", "p": "fp32", "KIND": "gelu"}
LAUNCHES: dict[str, Launch] = {
    "add_rms_norm": _norm(False, False, True),
    "add_rms_norm backward": _norm(False, True, True),
    "rms_norm of heads": _norm(False, False, False, 128),
    "rms_norm of heads backward": _norm(False, True, False, 128),
    "add_layer_norm": _norm(True, False, True),
    "add_layer_norm backward": _norm(True, True, True),
    "add_rms_norm, wide": _norm(False, False, True, 8192),
    "add_rms_norm backward, wide": _norm(False, True, True, 8192),
    "swiglu": _rows(gated.gated_forward, _PIECE, "G U Y", KIND="silu"),
    "swiglu backward": _rows(gated.gated_backward_kernel, _PIECE, "DY G U DG DU", KIND="silu"),
    "geglu backward": _rows(gated.gated_backward_kernel, _PIECE, "DY G U DG DU", KIND="gelu"),
    "bias_gelu_dropout": _rows(gated.bias_gelu_forward, _PIECE, "X B Y", **_GELU),
    "bias_gelu_dropout backward": _rows(gated.bias_gelu_backward, _PIECE, "DY X B DX", DB="*fp32", **_GELU),
    "rotary": _rotary(False),
    "cross_entropy": _losses(False),
    "cross_entropy backward": _losses(True),
    "adamw, masters": _adamw(True),
    "attention": _attention(attention.attention_forward, attention.FORWARD[1], 64, False),
    "attention backward, rows": _attention(attention.rows_backward, attention.BY_ROWS[0], 64, False),
    "attention backward, columns": replace(
        _attention(attention.columns_backward, attention.BY_COLUMNS[0], 64, False),
        amd=attention.BY_COLUMNS[1],
    ),
    "attention backward, means": _means(),
    "grouped_linear": _products(experts.grouped_product_kernel, experts.PRODUCTS[0]),
    "grouped_linear weight gradient": _products(experts.weight_gradient_kernel, experts.WEIGHTS[0]),
    "combine_experts": _combine(experts.combine_kernel, Tile(1, 2048)),
    "combine_experts backward": _combine(experts.combine_backward_kernel, Tile(1, 4096)),
    "index scores": _scores(),
    "sparse_attention": _sparse(sparse.sparse_forward),
    "sparse_attention backward": _sparse(sparse.sparse_backward),
}
