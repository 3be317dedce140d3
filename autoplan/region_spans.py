"""A capture comes in; its nodes in consecutive spans (blocks and what lies round them) go out.

Blocks are the children of containers (``ModuleList``, ``Sequential``, ``ModuleDict``) that repeat by
structure; a container whose children themselves hold a longer repeated chain is descended into.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import fx

from autoplan.capture.batch import output_tensors
from autoplan.capture.program import Capture
from autoplan.capture.values import is_getitem

# share of an outer block's nodes that inner blocks must cover to be taken in its stead
INNER_COVER = 0.7
# a child with fewer nodes and no modules of its own is a layer (Linear, GELU), not a block
BLOCK_NODES = 3
# glue without parameters up to this many nodes may join a neighbour
TINY_NODES = 8


@dataclass(frozen=True)
class Span:
    """Consecutive call nodes under one name."""

    name: str
    module_class: str
    nodes: tuple[fx.Node, ...]


@dataclass(frozen=True)
class _Run:
    """Consecutive nodes of one block call (``block`` is its path@call) or of none (empty)."""

    block: str
    nodes: tuple[fx.Node, ...]


def find_spans(capture: Capture) -> tuple[Span, ...]:
    """Every call node in exactly one span, in execution order."""
    calls = [node for node in capture.graph.nodes if node.op == "call_function"]
    paths = _paths(calls)
    containers = _block_containers(capture, calls, paths)
    runs = _runs(calls, paths, containers)
    return tuple(_named(capture, _settle_glue(runs)))


def _paths(calls: Sequence[fx.Node]) -> dict[fx.Node, tuple[str, ...]]:
    """Each node's module calls (``path`` or ``path@call``), outermost first; a getitem has its producer's."""
    paths: dict[fx.Node, tuple[str, ...]] = {}
    for node in calls:
        producer = node.all_input_nodes[0] if is_getitem(node) else None
        paths[node] = paths[producer] if producer in paths else tuple(node.meta.get("nn_module_stack") or ())
    return paths


def _child_of(keys: Iterable[str], container: str) -> str:
    """The child of ``container`` that a node lies in (its path, @call where it was called again), or ""."""
    start = container + "." if container else ""
    for key in keys:
        path, _, call = key.partition("@")
        if path.startswith(start) and path != container:
            child = start + path[len(start) :].partition(".")[0]
            return child + (f"@{call}" if call and path == child else "")
    return ""


def _block_containers(
    capture: Capture, calls: Sequence[fx.Node], paths: dict[fx.Node, tuple[str, ...]]
) -> list[str]:
    """The containers whose children are blocks."""
    touched = {key.partition("@")[0] for keys in paths.values() for key in keys}
    used = [
        c for c in capture.containers if any(t.startswith(c + "." if c else "") for t in touched if t != c)
    ]
    return _choose(
        capture, sorted(used, key=lambda c: (c.count("."), c)), calls, paths, strict=True
    ) or _choose(capture, sorted(used, key=lambda c: (c.count("."), c)), calls, paths, strict=False)


def _choose(
    capture: Capture,
    containers: Sequence[str],
    calls: Sequence[fx.Node],
    paths: dict[fx.Node, tuple[str, ...]],
    strict: bool,
) -> list[str]:
    """Outermost containers whose children repeat, or the better ones inside them.

    Not ``strict``: also a container whose children do not repeat (a plain Sequential).
    """
    chosen: list[str] = []
    done: list[str] = []
    for container in containers:
        if any(_inside(container, other) for other in done):
            continue
        done.append(container)
        children = _children(container, calls, paths)
        inner = [c for c in containers if _inside(c, container)]
        nested = _choose(capture, inner, calls, paths, strict) if inner else []
        repeats = _repeats(capture, children)
        if nested and _inner_is_better(nested, children, repeats, calls, paths):
            chosen += nested
        elif repeats > 1 or _lone_block(capture, container, children) or (not strict and len(children) > 1):
            chosen.append(container)
        else:
            chosen += nested
    return chosen


def _inside(path: str, container: str) -> bool:
    return path != container and path.startswith(container + "." if container else "")


def _children(
    container: str, calls: Sequence[fx.Node], paths: dict[fx.Node, tuple[str, ...]]
) -> dict[str, list[fx.Node]]:
    children: dict[str, list[fx.Node]] = {}
    for node in calls:
        child = _child_of(paths[node], container)
        if child:
            children.setdefault(child, []).append(node)
    return children


def _repeats(capture: Capture, children: dict[str, list[fx.Node]]) -> int:
    """How many children share the commonest structure (parameters, ops and shapes)."""
    whole = {c: n for c, n in children.items() if _is_composite(capture, c) or len(n) >= BLOCK_NODES}
    signatures = Counter(_signature(nodes) for nodes in whole.values() if _parameters(nodes))
    if signatures and max(signatures.values()) > 1:
        return max(signatures.values())
    composite = Counter(_class_of(capture, child) for child in whole if _is_composite(capture, child))
    return max(composite.values(), default=0)


def _signature(nodes: Sequence[fx.Node]) -> str:
    words = [f"{n.target}{[(t.dtype, tuple(t.shape)) for t in output_tensors(n)]}" for n in nodes]
    held = [f"{tuple(p.meta['val'].shape)}" for p in _parameters(nodes)]
    return " ".join(words + held)


def _parameters(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    found = {s: None for n in nodes for s in n.all_input_nodes if s.meta.get("kind") == "parameter"}
    return list(found)


def _class_of(capture: Capture, child: str) -> str:
    return capture.module_classes.get(child.partition("@")[0], "")


def _is_composite(capture: Capture, child: str) -> bool:
    """Whether the child module has modules of its own."""
    start = child.partition("@")[0] + "."
    return any(name.startswith(start) for name in capture.module_classes)


def _lone_block(capture: Capture, container: str, children: dict[str, list[fx.Node]]) -> bool:
    """A ModuleList with a single composite child: a model cut down to one block."""
    lone = len(children) == 1 and capture.module_classes.get(container) == "ModuleList"
    return lone and all(
        _is_composite(capture, child) and _parameters(nodes) for child, nodes in children.items()
    )


def _inner_is_better(
    nested: Sequence[str],
    children: dict[str, list[fx.Node]],
    repeats: int,
    calls: Sequence[fx.Node],
    paths: dict[fx.Node, tuple[str, ...]],
) -> bool:
    """Inner blocks stand for the outer ones when they cover them, chain, and repeat more often."""
    outer = sum(len(nodes) for nodes in children.values())
    inner = [_children(container, calls, paths) for container in nested]
    covered = sum(len(nodes) for blocks in inner for nodes in blocks.values())
    chained = [blocks for blocks in inner if _is_chain(list(blocks.values()))]
    if len(chained) < len(inner) or covered < INNER_COVER * outer:
        return False
    return (
        max(len(blocks) for blocks in inner) > repeats
        or sum(map(len, inner)) >= 2 * len(children) > 2 * repeats
    )


def _is_chain(blocks: Sequence[Sequence[fx.Node]]) -> bool:
    """Whether each block depends on the one before."""
    for before, after in pairwise(blocks):
        reached = set(before)
        first, last = before[0], after[-1]
        node = first
        while node is not last:
            node = node.next
            if any(source in reached for source in node.all_input_nodes):
                reached.add(node)
        if not any(node in reached for node in after):
            return False
    return True


def _runs(
    calls: Sequence[fx.Node], paths: dict[fx.Node, tuple[str, ...]], containers: Sequence[str]
) -> list[_Run]:
    """Consecutive nodes by block; what lies between two pieces of one block belongs to it."""
    labels = [next((c for c in (_child_of(paths[n], k) for k in containers) if c), "") for n in calls]
    last_at = {label: index for index, label in enumerate(labels) if label}
    current, pieces = "", list[tuple[str, list[fx.Node]]]()
    for index, (node, label) in enumerate(zip(calls, labels)):
        if not label and current and last_at[current] > index and _next_label(labels, index) == current:
            label = current
        if not pieces or label != current:
            pieces.append((label, []))
            current = label
        pieces[-1][1].append(node)
    return [_Run(label, tuple(nodes)) for label, nodes in pieces]


def _next_label(labels: Sequence[str], index: int) -> str:
    return next((label for label in labels[index:] if label), "")


def _settle_glue(runs: Sequence[_Run]) -> list[_Run]:
    """Give parameter-free glue between blocks to a neighbour where the neighbours' classes stay equal."""
    bare = [run if _parameters(run.nodes) else _Run("", run.nodes) for run in runs]
    shared = [run for run in _share_glue(_joined(bare)) if run.nodes]
    kinds = Counter(_signature(run.nodes) for run in shared if run.block)
    index = 1
    while index < len(shared) - 1:
        before, glue, after = shared[index - 1 : index + 2]
        small = not glue.block and len(glue.nodes) <= TINY_NODES and not _parameters(glue.nodes)
        if small and after.block and kinds[_signature(after.nodes)] == 1:
            shared[index : index + 2] = [_Run(after.block, (*glue.nodes, *after.nodes))]
        elif small and before.block and kinds[_signature(before.nodes)] == 1:
            shared[index - 1 : index + 1] = [_Run(before.block, (*before.nodes, *glue.nodes))]
        else:
            index += 1
    return shared


def _joined(runs: Sequence[_Run]) -> list[_Run]:
    """Neighbouring runs of no block as one."""
    joined: list[_Run] = []
    for run in runs:
        if joined and not run.block and not joined[-1].block:
            joined[-1] = _Run("", (*joined[-1].nodes, *run.nodes))
        else:
            joined.append(run)
    return joined


def _share_glue(runs: list[_Run]) -> list[_Run]:
    """Glue that lies beside every block of a class joins those blocks, its twin peeled off embed or head."""
    gaps = [i for i in range(1, len(runs) - 1) if not runs[i].block and not _parameters(runs[i].nodes)]
    for ops in dict.fromkeys(_ops(runs[i].nodes) for i in gaps):
        places = [i for i in gaps if _ops(runs[i].nodes) == ops]
        first, last = places[0] - 2, places[-1] + 2
        twin_before = first >= 0 and not runs[first].block and _ops(runs[first].nodes[-len(ops) :]) == ops
        twin_after = last < len(runs) and not runs[last].block and _ops(runs[last].nodes[: len(ops)]) == ops
        after = [(i, i + 1) for i in ([first] if twin_before else []) + places]
        before = [(i, i - 1) for i in places + ([last] if twin_after else [])]
        moves = min((after, before), key=lambda pairs: _left_out(runs, [target for _, target in pairs]))
        if len(places) > 1 or _left_out(runs, [target for _, target in moves]) == 0:
            for source, target in moves:
                _move(runs, source, target, len(ops))
    return runs


def _left_out(runs: Sequence[_Run], targets: Sequence[int]) -> int:
    """Blocks equal to one of the targets that are not themselves targets."""
    signatures = {_signature(runs[t].nodes) for t in targets}
    alike = [i for i, run in enumerate(runs) if run.block and _signature(run.nodes) in signatures]
    return len(alike) - len(targets)


def _move(runs: list[_Run], source: int, target: int, count: int) -> None:
    """Move ``count`` nodes from the glue at ``source`` to the block beside it."""
    glue = runs[source].nodes
    if target > source:
        moved, kept = glue[-count:], glue[:-count]
        runs[target] = _Run(runs[target].block, (*moved, *runs[target].nodes))
    else:
        moved, kept = glue[:count], glue[count:]
        runs[target] = _Run(runs[target].block, (*runs[target].nodes, *moved))
    runs[source] = _Run("", kept)


def _ops(nodes: Sequence[fx.Node]) -> tuple[str, ...]:
    return tuple(str(node.target) for node in nodes)


def _named(capture: Capture, runs: Sequence[_Run]) -> Iterable[Span]:
    """Names for the runs: the block's path (``path@2`` when it runs again), embed, glue.N, head."""
    blocks = [i for i, run in enumerate(runs) if run.block]
    glue, seen = 0, Counter[str]()
    for index, run in enumerate(runs):
        if run.block:
            path = run.block.partition("@")[0]
            seen[path] += 1
            name = path if seen[path] == 1 else f"{path}@{seen[path]}"
            yield Span(name, _class_of(capture, path), run.nodes)
        elif not blocks or index > blocks[-1]:
            yield Span("head", "head", run.nodes)
        elif index < blocks[0]:
            yield Span("embed", "embed", run.nodes)
        else:
            yield Span(f"glue.{glue}", "glue", run.nodes)
            glue += 1
