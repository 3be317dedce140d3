"""Rules of ops that move, split, merge, repeat or take dims: all by the one dimension mapping.

Each line names how the output's dims arise from the input's; the sizes an op is called with become local.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autoplan_passes.calls import PIECES, Call, op_name
from autoplan_passes.dims import ADDEND, OUTPUT, Form, Parts, match_views
from autoplan_passes.patterns import FormOf, along, form_from_names, parts_form
from autoplan_passes.rows import Local, Row

Kept = Sequence["int | None"]


def view_form(call: Call) -> Form:
    """Split and merged dims: row-major order is kept."""
    source, target, sizes, blocked = match_views(call.shapes[0], call.output)
    return Form((source,), target, sizes, ADDEND, blocked)


def _moved(order: Callable[[Call], Kept]) -> FormOf:
    """Output dim i is input dim ``order[i]``, or a new dim of size 1 (None); dims left out are not cut."""

    def form_of(call: Call) -> Form:
        kept = set(order(call))
        names = [f"d{i}" + "!" * (i not in kept) for i in range(len(call.shapes[0]))]
        output = [f"new{i}" if d is None else names[d] for i, d in enumerate(order(call))]
        return form_from_names(call, [names], output, ADDEND)

    return form_of


def _transposed(call: Call) -> Kept:
    order = list(range(len(call.output)))
    i, j = call.dim("dim0"), call.dim("dim1")
    order[i], order[j] = order[j], order[i]
    return order


def _matrix_transposed(call: Call) -> Kept:
    return list(reversed(range(len(call.output))))


def _unsqueezed(call: Call) -> Kept:
    order: list[int | None] = list(range(len(call.shapes[0])))
    order.insert(call.dim(rank=len(call.output)), None)
    return order


def _squeezed(call: Call) -> Kept:
    gone = {d for d in call.dims() if call.shapes[0][d] == 1}
    return [d for d in range(len(call.shapes[0])) if d not in gone]


def _selected(call: Call) -> Kept:
    return [d for d in range(len(call.shapes[0])) if d != call.dim()]


def _moved_dims(call: Call) -> Kept:
    rank = len(call.output)
    sources = [d % rank for d in _listed(call.arguments["source"])]
    targets = [d % rank for d in _listed(call.arguments["destination"])]
    rest = iter(d for d in range(rank) if d not in sources)
    placed = dict(zip(targets, sources))
    return [placed[i] if i in placed else next(rest) for i in range(rank)]


def _listed(value: int | Sequence[int]) -> Sequence[int]:
    return [value] if isinstance(value, int) else value


def expand_form(call: Call) -> Form:
    """New and widened dims are atoms that the input lacks."""
    rank, shift = len(call.output), len(call.output) - len(call.shapes[0])
    names = [f"d{i}" for i in range(rank)]
    return form_from_names(call, [names[shift:]], names, ADDEND)


def _repeat_form(call: Call) -> Form:
    """Output dim i is (repeats, input dim): the repeats are the outer atom."""
    shift = len(call.output) - len(call.shapes[0])
    sizes: dict[str, int] = {}
    source: list[tuple[str, ...]] = []
    target: list[tuple[str, ...]] = []
    for i, n in enumerate(call.output):
        own = call.shapes[0][i - shift] if i >= shift else 1
        sizes |= {f"r{i}": n // own, f"d{i}": own}
        target.append(tuple(atom for atom in (f"r{i}", f"d{i}") if sizes[atom] > 1))
        if i >= shift:
            source.append((f"d{i}",) if own > 1 else ())
    return Form((tuple(source),), tuple(target), sizes, ADDEND)


def _local_repeats(local: Local) -> dict[str, Any]:
    given = local.shapes[0]
    padded = (1,) * (len(local.output_shape) - len(given)) + given
    return {"repeats": [n // own for n, own in zip(local.output_shape, padded)]}


def _interleave_form(call: Call) -> Form | None:
    """Output dim is (input dim, repeats): the repeats are the inner atom."""
    if call.arguments.get("dim") is None:
        return None
    dim, repeats = call.dim(), int(call.arguments["repeats"])
    names: list[tuple[str, ...]] = [(f"d{i}",) if n > 1 else () for i, n in enumerate(call.shapes[0])]
    sizes = {f"d{i}": n for i, n in enumerate(call.shapes[0])} | {"repeats": repeats}
    target = [(*dims, "repeats") if i == dim and repeats > 1 else dims for i, dims in enumerate(names)]
    return Form((tuple(names),), tuple(target), sizes, ADDEND)


def _local_interleave(local: Local) -> dict[str, Any]:
    dim = local.call.dim()
    size = local.output_shape[dim]
    return {"repeats": size // local.shapes[0][dim], "output_size": size}


def piece_of_slice(call: Call) -> tuple[int, int] | None:
    """Start and length of a slice; None where it steps."""
    size, step = call.shapes[0][call.dim(default=0)], call.arguments.get("step", 1)
    start, stop = call.arguments.get("start"), call.arguments.get("end")
    first, last, stride = slice(start, stop, step).indices(size)
    return (first, last - first) if stride == 1 else None


def _slice_form(call: Call) -> Form | None:
    dim, bounds = call.dim(default=0), piece_of_slice(call)
    if bounds == (0, call.shapes[0][dim]):
        return along(lambda _: [], ADDEND)(call)
    if bounds is None:
        return along(lambda _: [dim], ADDEND)(call)
    return parts_form(call, Parts(0, dim, ((OUTPUT, *bounds),)), ADDEND)


def _local_slice(local: Local) -> dict[str, Any]:
    dim, bounds = local.call.dim(default=0), piece_of_slice(local.call)
    if bounds is None or not (local.inputs[0].is_shard and local.inputs[0].dim == dim):
        return {}
    return {"start": bounds[0] // local.ways, "end": sum(bounds) // local.ways}


def piece_bounds(pieces: Call, index: int) -> tuple[int, int]:
    """Start and length, along the split dim, of piece ``index`` of a split, chunk or unbind."""
    dim, values = pieces.dim(default=0), pieces.node.meta["val"]
    if pieces.name == "aten.unbind":
        return index, 1
    lengths = [int(value.shape[dim]) for value in values]
    return sum(lengths[:index]), lengths[index]


def _item_form(call: Call) -> Form | None:
    """One of several results: a piece of a split, or a result whose dims are all of the op's own."""
    if op_name(call.tensors[0]) not in PIECES:
        return along(lambda _: [], ADDEND)(call)
    pieces = Call(call.tensors[0])
    dim = pieces.dim(default=0)
    bounds = piece_bounds(pieces, int(call.arguments["index"]))
    if pieces.name == "aten.unbind":
        order = [d for d in range(len(call.shapes[0])) if d != dim]
        return _moved(lambda _: order)(call)
    return parts_form(call, Parts(0, dim, ((OUTPUT, *bounds),)), ADDEND)


def _local_split(local: Local) -> dict[str, Any]:
    name = "split_sizes" if local.call.name == "aten.split_with_sizes" else "split_size"
    cut = local.inputs[0].is_shard and local.inputs[0].dim == local.call.dim(default=0)
    if not cut or name not in local.call.arguments:
        return {}
    value = local.call.arguments[name]
    return {name: value // local.ways if isinstance(value, int) else [n // local.ways for n in value]}


def _unbind_form(call: Call) -> Form | None:
    return along(lambda c: [c.dim(default=0)], ADDEND)(call)


def _split_form(call: Call) -> Form | None:
    """The list of pieces stands for the whole, in the whole's own state."""
    return along(lambda _: [], ADDEND)(call)


def _cat_form(call: Call) -> Form | None:
    """Pieces side by side: the joined dim is cut by sections."""
    dim, start = call.dim(default=0, rank=len(call.output)), 0
    pieces: list[tuple[int, int, int]] = []
    for i, shape in enumerate(call.shapes):
        if len(shape) != len(call.output):
            return None
        pieces.append((i, start, shape[dim]))
        start += shape[dim]
    return parts_form(call, Parts(OUTPUT, dim, tuple(pieces)), ADDEND * len(call.shapes))


def _stack_form(call: Call) -> Form:
    new = call.dim(default=0, rank=len(call.output))
    names = [f"d{i}" for i in range(len(call.shapes[0]))]
    return form_from_names(
        call, [names] * len(call.shapes), [*names[:new], "new!", *names[new:]], ADDEND * len(call.shapes)
    )


def _pad_form(call: Call) -> Form | None:
    """Padded dims are not cut; only zeros may be added to a partial sum."""
    pads = list(call.arguments["pad"])
    padded = [-1 - i for i in range(len(pads) // 2) if pads[2 * i] or pads[2 * i + 1]]
    zeros = not call.arguments.get("value") and call.arguments.get("mode", "constant") == "constant"
    return along(lambda _: padded, ADDEND if zeros else "n")(call)


def _local_output(name: str) -> Callable[[Local], dict[str, Any]]:
    return lambda local: {name: list(local.output_shape)}


def _unflatten_sizes(local: Local) -> dict[str, Any]:
    dim = local.call.dim()
    return {"sizes": list(local.output_shape[dim : dim + len(local.call.arguments["sizes"])])}


ROWS: Mapping[str, Row] = {
    "aten.view": Row(view_form, _local_output("size")),
    "aten._unsafe_view": Row(view_form, _local_output("size")),
    "aten.reshape": Row(view_form, _local_output("shape")),
    "aten.flatten": Row(view_form),
    "aten.unflatten": Row(view_form, _unflatten_sizes),
    "aten.expand": Row(expand_form, _local_output("size")),
    "aten.repeat": Row(_repeat_form, _local_repeats),
    "aten.repeat_interleave.self_int": Row(_interleave_form, _local_interleave),
    "aten.transpose": Row(_moved(_transposed)),
    "aten.t": Row(_moved(_matrix_transposed)),
    "aten.permute": Row(_moved(lambda call: call.dims("dims"))),
    "aten.movedim": Row(_moved(_moved_dims)),
    "aten.unsqueeze": Row(_moved(_unsqueezed)),
    "aten.squeeze": Row(_moved(_squeezed)),
    "aten.select": Row(_moved(_selected)),
    "aten.slice": Row(_slice_form, _local_slice),
    "getitem": Row(_item_form),
    "aten.split": Row(_split_form, _local_split),
    "aten.split_with_sizes": Row(_split_form, _local_split),
    "aten.chunk": Row(_split_form),
    "aten.unbind": Row(_unbind_form),
    "aten.cat": Row(_cat_form),
    "aten.stack": Row(_stack_form),
    "aten.pad": Row(_pad_form),
    "aten.constant_pad_nd": Row(_pad_form),
}
