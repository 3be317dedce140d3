"""A recognised training loop and where to save and resume in, the lines that do it put into the script.

Before --> after::

    for batch in loader:            checkpoints = parallel.checkpoints(optimizer, scheduler, save="runs/a")
        loss = model(**batch)       for batch in loader:
        ...                             if checkpoints.passed():  # trained on before the run was resumed
                                            continue
                                        loss = parallel.step(batch)
                                        ...
                                        checkpoints.after_step()
                                    checkpoints.finish()
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import dataclass

from autoplan_codegen.script_loop import TrainingLoop
from autoplan_codegen.script_names import NotUnderstood, dotted, read_names
from autoplan_codegen.script_text import ScriptText


@dataclass(frozen=True)
class Kept:
    """Folders as the user gave them: where to write checkpoints, what to resume from, weights to begin with;
    empty where there is none. A checkpoint is written every ``every`` batches."""

    save: str = ""
    every: int = 100
    resume: str = ""
    weights: str = ""

    @property
    def asks_for_checkpoints(self) -> bool:
        return bool(self.save or self.resume)


def insert_checkpoints(loop: TrainingLoop, text: ScriptText, kept: Kept, parallel: str) -> None:
    """Put the lines into the script; ``parallel`` is the parallel model's name where the loop is."""
    names = loop.names
    outermost, inner = names.loop(loop.backward), _innermost(loop)
    last = inner.body[-1]
    optimizer = next(
        (name for name in _stepping(loop.scope) if names.known_origin(loop.scope, name) == _made(loop)), ""
    )
    assert isinstance(outermost, ast.stmt) and optimizer  # as find_loop has seen
    for statement in (outermost, loop.forward, last):
        if not text.starts_its_line(statement):
            raise NotUnderstood(statement, "saving needs the loop's statements on lines of their own")
    name = _free(loop, "checkpoints")
    given = [optimizer, *_schedulers(loop)]
    given += [f"save={json.dumps(kept.save)}", f"every={kept.every}"] if kept.save else []
    given += [f"resume={json.dumps(kept.resume)}"] if kept.resume else []
    text.insert_lines_before(outermost, [f"{name} = {parallel}.checkpoints({', '.join(given)})"])
    passed = [f"if {name}.passed():  # trained on before the run was resumed", "    continue"]
    text.insert_lines_before(loop.forward, passed)
    text.insert_lines_after(last, [f"{name}.after_step()"])
    text.insert_lines_after(outermost, [f"{name}.finish()"])


def _innermost(loop: TrainingLoop) -> ast.For:
    """The loop round the forward pass: a ``for``, since a ``while`` would not end where batches pass by."""
    for ancestor in loop.names.ancestors(loop.forward):
        if isinstance(ancestor, ast.For):
            return ancestor
        if isinstance(ancestor, ast.While):
            raise NotUnderstood(ancestor, "saving and resuming need a `for` loop over the batches")
    raise NotUnderstood(loop.forward, "saving and resuming need a `for` loop over the batches")


def _made(loop: TrainingLoop) -> tuple[ast.AST, str]:
    return loop.owner, loop.optimizer


def _stepping(tree: ast.AST) -> Iterator[str]:
    """Variables whose ``step`` is called, each once."""
    found: dict[str, None] = {}
    for node in ast.walk(tree):
        called = dotted(node.func) if isinstance(node, ast.Call) else ""
        name, _, method = called.rpartition(".")
        if method == "step" and name.isidentifier():
            found[name] = None
    yield from found


def _schedulers(loop: TrainingLoop) -> list[str]:
    """The variable, in the loop's scope, that was made from the optimizer and steps; none, or one."""
    names = loop.names
    made: dict[str, None] = {}
    for call in ast.walk(names.tree):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        if call.func.attr != "step" or not isinstance(call.func.value, ast.Name):
            continue
        origin = names.known_origin(names.scope(call), call.func.value.id)
        if origin is None or origin == _made(loop):
            continue
        owner, name = origin
        read = {n for s in names.bindings(owner, name) for n in read_names(getattr(s, "value", s))}
        if loop.optimizer not in read:
            continue
        here = [n for n in _visible(loop) if names.known_origin(loop.scope, n) == origin]
        if not here:
            raise NotUnderstood(call, f"the loop to be saved does not see the scheduler `{name}`")
        made[here[0]] = None
    if len(made) > 1:
        raise NotUnderstood(loop.backward, f"saving knows one scheduler, this script has {', '.join(made)}")
    return list(made)


def _visible(loop: TrainingLoop) -> list[str]:
    """Names of variables that the loop's scope can read."""
    scopes = [loop.scope, loop.names.tree]
    found = {n.id for scope in scopes for n in ast.walk(scope) if isinstance(n, ast.Name)}
    found |= {n.arg for n in ast.walk(loop.scope) if isinstance(n, ast.arg)}
    return sorted(found)


def _free(loop: TrainingLoop, wanted: str) -> str:
    taken = {node.id for node in ast.walk(loop.names.tree) if isinstance(node, ast.Name)}
    return wanted if wanted not in taken else f"autoplan_{wanted}"
