"""Rules of contractions, convolutions, attention, embedding and cross-entropy, one line an op.

Patterns are as in :mod:`autoplan_passes.patterns`: cutting a letter that the output lacks gives a partial
sum; an input marked ``+`` is then added on one rank only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from autoplan_passes.calls import Call
from autoplan_passes.dims import ADDEND, FACTOR, NONLINEAR, Dims, Form
from autoplan_passes.patterns import form_from_names, letters
from autoplan_passes.rows import Choice, Local, Row
from autoplan_passes.states import PARTIAL, REPLICATE, REPLICATE_PARTIAL_GRADIENT, shard

PATTERNS = {
    "aten.linear": "... i, o i, +o -> ... o",
    "aten.mm": "m k, k n -> m n",
    "aten.mv": "m k, k -> m",
    "aten.dot": "k, k ->",
    "aten.bmm": "b m k, b k n -> b m n",
    "aten.addmm": "+m n, m k, k n -> m n",
    "aten.baddbmm": "+b m n, b m k, b k n -> b m n",
    "aten.outer": "m, n -> m n",
}
RING = "ring_attention"
# Tokens m stay with their expert's rows, so they are not cut: experts are cut inside (columns, then rows).
GROUPED = Row(letters("m! k, e! k n, e! -> m! n"))


def _matmul_form(call: Call) -> Form | None:
    """``... m k, ... k n``; a 1-dim operand is a row or a column."""
    left, right = (len(shape) for shape in call.shapes)
    first = "k" if left == 1 else "... m k"
    second = "k" if right == 1 else "... k n"
    result = "... " + " ".join(["m"] * (left > 1) + ["n"] * (right > 1))
    if max(left, right) <= 2:
        first, second, result = (text.replace("...", "") for text in (first, second, result))
    return letters(f"{first}, {second} -> {result}")(call)


def _addmm_form(call: Call) -> Form | None:
    """Scaled sums are left alone."""
    plain = call.arguments.get("alpha", 1) == 1 and call.arguments.get("beta", 1) == 1
    shapes_match = len(call.shapes[0]) == len(call.output)
    pattern = PATTERNS[call.name]
    return letters(pattern if shapes_match else pattern.replace("+m n", "+n"))(call) if plain else None


def _einsum_form(call: Call) -> Form | None:
    """The equation itself is the pattern; diagonals and implicit outputs are left alone."""
    equation = str(call.arguments["equation"]).replace(" ", "")
    if "->" not in equation or "." in equation:
        return None
    left, right = equation.split("->")
    inputs = [list(term) for term in left.split(",")]
    if any(len(set(term)) < len(term) for term in inputs):
        return None
    return form_from_names(call, inputs, list(right), FACTOR * len(inputs))


def _attention_form(call: Call) -> Form | None:
    """Batch and heads may be cut, and queries where no causal mask counts them; keys and values may not."""
    query, causal = call.shapes[0], bool(call.arguments.get("is_causal"))
    grouped = len(query) > 3 and bool(call.arguments.get("enable_gqa"))
    return _heads_form(call, grouped, {"q"} if causal or query[len(query) - 2] == 1 else set[str]())


def _ring_form(call: Call) -> Form | None:
    """Attention whose sequence another axis cuts: batch and heads may be cut."""
    return _heads_form(call, True, {"q"})


def _heads_form(call: Call, grouped: bool, blocked: set[str]) -> Form:
    """Attention of fewer kv heads than query heads (``grouped``): the query heads are groups of the kv heads.

    Whole groups may be cut, or the inside of every group, with keys and values replicated.
    """
    query, key = call.shapes[0], call.shapes[1]
    rank, grouped = len(query), grouped and query[-3] != key[-3]
    sizes = {f"b{i}": n for i, n in enumerate(query[:-2])} | {"q": query[-2]}
    if grouped:
        del sizes[f"b{rank - 3}"]
        sizes |= {"kv": key[-3], "group": query[-3] // key[-3]}

    def dims(shape: tuple[int, ...], last: tuple[str, ...]) -> Dims:
        shift = rank - len(shape)
        named: list[tuple[str, ...]] = []
        for i, n in enumerate(shape[:-2]):
            heads = ("kv", "group") if n == query[-3] else ("kv",)
            names = heads if grouped and i + shift == rank - 3 else (f"b{i + shift}",)
            named.append(names if n > 1 and n in (query[i + shift], key[i + shift]) else ())
        return (*named, last if shape[-2] > 1 and last else (), ())

    inputs = [dims(call.shapes[0], ("q",)), dims(key, ()), dims(call.shapes[2], ())]
    inputs += [
        dims(shape, ("q",) if len(shape) > 1 and shape[-2] == query[-2] else ()) for shape in call.shapes[3:]
    ]
    return Form(tuple(inputs), dims(call.output, ("q",)), sizes, NONLINEAR * len(inputs), frozenset(blocked))


def _attention_on_sequences(call: Call, size: int) -> Iterable[Choice]:
    """Queries, keys and values cut along the sequence: keys and values pass round a ring, or come to the
    ranks by heads, after fewer kv heads than ranks are repeated."""
    query, key = call.shapes[0], call.shapes[1]
    if len(query) != 4 or len(key) != 4 or call.arguments.get("dropout_p"):
        return
    for zigzag in (False, True):
        pieces = [shard(2, zigzag=zigzag)] * 3
        masks = [
            shard(len(shape) - 2, zigzag=zigzag) if len(shape) > 1 and shape[-2:-1] != (1,) else REPLICATE
            for shape in call.shapes[3:]
        ]
        yield Choice((*pieces, *masks), shard(2, zigzag=zigzag), RING)
    fewer = size > key[1] and size % key[1] == 0 and query[1] % size == 0
    whole_masks = all(shape[-3:-2] in ((), (1,)) for shape in call.shapes[3:])
    if fewer and whole_masks and call.arguments.get("enable_gqa"):
        masks = [REPLICATE] * len(call.shapes[3:])
        yield Choice((shard(1), shard(2), shard(2), *masks), shard(1), "repeated_heads")


def few_heads(call: Call, size: int) -> Iterable[Choice]:
    """Fewer kv heads than ranks: each is held by the neighbours whose query heads use it."""
    query, key = call.shapes[0], call.shapes[1]
    grouped = call.name == "ring_attention" or call.arguments.get("enable_gqa")
    if len(query) != 4 or len(key) != 4 or not grouped or call.arguments.get("dropout_p"):
        return
    fits = 1 < key[1] < size and size % key[1] == 0 and query[1] % size == 0
    if fits and all(shape[-3:-2] in ((), (1,)) for shape in call.shapes[3:]):
        held = shard(1, copies=size // key[1])
        yield Choice((shard(1), held, held, *[REPLICATE] * len(call.shapes[3:])), shard(1))


def _attention_choices(call: Call, size: int) -> Iterable[Choice]:
    yield from _attention_on_sequences(call, size)
    yield from few_heads(call, size)


def _conv_form(call: Call) -> Form | None:
    """Output channels, or groups, may be cut; input channels give a partial sum; space may not."""
    image, weight = call.shapes[0], call.shapes[1]
    groups, spatial = int(call.arguments["groups"]), len(weight) - 2
    if len(image) != spatial + 2 or call.arguments.get("transposed", False):
        return None
    sizes = {"n": image[0], "g": groups, "c": image[1] // groups, "m": weight[0] // groups}
    tail: Dims = ((),) * spatial
    samples: Dims = (("n",) if image[0] > 1 else (),)
    dims = [
        samples + _present(sizes, "g", "c") + tail,
        _present(sizes, "g", "m") + _present(sizes, "c") + tail,
        _present(sizes, "g", "m"),
    ]
    blocked = {"c", "m"} if groups > 1 else set[str]()
    roles = (FACTOR + FACTOR + ADDEND)[: len(call.shapes)]
    return Form(
        tuple(dims[: len(call.shapes)]),
        samples + _present(sizes, "g", "m") + tail,
        sizes,
        roles,
        frozenset(blocked),
    )


def _present(sizes: Mapping[str, int], *names: str) -> Dims:
    return (tuple(name for name in names if sizes[name] > 1),)


def _local_conv_groups(local: Local) -> dict[str, Any]:
    groups = int(local.call.arguments["groups"])
    channels = local.shapes[0][1]
    return {"groups": groups * channels // local.call.shapes[0][1] if groups > 1 else groups}


def _vocabulary_rows(call: Call, _size: int) -> Iterable[Choice]:
    """Each rank looks up the rows it has: a partial sum."""
    return [Choice((shard(0), REPLICATE), PARTIAL, "vocab_embedding")]


def _cross_entropy_form(call: Call) -> Form | None:
    """Positions may be cut: each rank sums over its own."""
    if len(call.shapes) != 2 or len(call.shapes[0]) != 2 or len(call.shapes[1]) != 1:
        return None
    return letters(f"n c!, n -> {'n' if call.output else ''}", NONLINEAR)(call)


def _cross_entropy_parts(call: Call) -> str:
    """A mean over positions is over those of all ranks that count."""
    return "position_cross_entropy" if call.arguments.get("reduction") == 1 else "local"


def _cut_classes(call: Call, _size: int) -> Iterable[Choice]:
    """Logits [positions, classes] cut along the classes, targets whole: the loss on every rank."""
    plain = len(call.shapes) == 2 and len(call.shapes[0]) == 2 and len(call.shapes[1]) == 1
    return [Choice((shard(1), REPLICATE), REPLICATE, "vocab_cross_entropy")] if plain else []


def _cut_classes_of_positions(_call: Call, _size: int) -> Iterable[Choice]:
    """A loss over positions that an earlier axis cuts: logits cut along the classes."""
    return [Choice((shard(1), REPLICATE), REPLICATE, "vocab_position_cross_entropy")]


def _logits_inside_form(call: Call) -> Form | None:
    """Rows may be cut, once: each rank sums over its own."""
    if call.arguments.get("positions"):
        return None
    return letters(f"n h!, c! h!, n -> {'n' if call.output else ''}", NONLINEAR)(call)


def _rows_of_loss(call: Call) -> str:
    return "position_linear_cross_entropy" if call.arguments["reduction"] == 1 else "local"


def _cut_vocabulary(call: Call, _size: int) -> Iterable[Choice]:
    """Each rank has the logits of its classes, once; rows meet all of them, so their gradient is partial."""
    if call.arguments.get("vocabulary"):
        return []
    inputs = (REPLICATE_PARTIAL_GRADIENT, shard(0), REPLICATE)
    return [Choice(inputs, REPLICATE, "vocab_linear_cross_entropy")]


def _mean_square_form(call: Call) -> Form | None:
    """A loss over all elements: averaged, summed, or left elementwise."""
    if call.shapes[0] != call.shapes[1]:
        return None
    names = [f"d{i}" for i in range(len(call.shapes[0]))]
    return form_from_names(call, [names, names], names if call.output else [], NONLINEAR * 2)


def _mean_loss(call: Call) -> str:
    return "local" if call.output or call.arguments.get("reduction") == 2 else "average_of_parts"


ROWS: Mapping[str, Row] = {
    **{name: Row(letters(pattern)) for name, pattern in PATTERNS.items()},
    "aten.addmm": Row(_addmm_form),
    "aten.baddbmm": Row(_addmm_form),
    "aten.matmul": Row(_matmul_form),
    "aten.einsum": Row(_einsum_form),
    "aten._grouped_mm": GROUPED,
    "transformers.grouped_mm_fallback": GROUPED,
    "grouped_product": GROUPED,
    "aten.scaled_dot_product_attention": Row(_attention_form, special=_attention_choices),
    "ring_attention": Row(_ring_form, special=few_heads),
    **{
        f"aten.{name}": Row(_conv_form, _local_conv_groups)
        for name in ("conv1d", "conv2d", "conv3d", "convolution")
    },
    "aten.embedding": Row(letters("v! h, ... -> ... h"), special=_vocabulary_rows),
    "aten.cross_entropy_loss": Row(
        _cross_entropy_form, special=_cut_classes, cut_implementation=_cross_entropy_parts
    ),
    "position_cross_entropy": Row(None, special=_cut_classes_of_positions),
    "linear_cross_entropy": Row(
        _logits_inside_form, special=_cut_vocabulary, cut_implementation=_rows_of_loss
    ),
    "aten.mse_loss": Row(_mean_square_form, cut_implementation=_mean_loss),
    "aten.l1_loss": Row(_mean_square_form, cut_implementation=_mean_loss),
}
