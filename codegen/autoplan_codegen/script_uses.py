"""What a script does with its model besides training it: the tree in, one edit or refusal a use out.

Before ``parallelize`` the model is the script's own; after it, what reads or changes parameters must go
through the parallel model, or the script would work with weights that are never updated.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from autoplan_codegen.script_loop import TrainingLoop
from autoplan_codegen.script_names import (
    Function,
    Names,
    NotUnderstood,
    Scope,
    bound_names,
    dotted,
    moves_to_device,
    parameters,
)
from autoplan_codegen.script_text import ScriptText

SAME_METHODS = ("parameters", "named_parameters", "state_dict", "load_state_dict", "train", "zero_grad")
_SEEDS = ("manual_seed", "seed_everything", "set_seed", "fixed_seed")


@dataclass(frozen=True)
class Handle:
    """A variable that holds the parallel model: its scope, its name before and after the rewrite."""

    scope: Scope
    before: str
    after: str


def edit_uses(loop: TrainingLoop, text: ScriptText, parallel: str, done: Iterable[ast.stmt]) -> list[Handle]:
    """Rename or rewrite each use of the model after ``parallelize``; statements in ``done`` are left alone.

    Returns the variables that hold the parallel model: the script's own, and parameters it is passed for.
    """
    first = Handle(loop.owner, loop.model, parallel)
    handles, skipped = [first], {node for statement in done for node in ast.walk(statement)}
    for handle in handles:
        later = [n for n in loop.names.loads(handle.scope, handle.before) if n not in skipped]
        for name in later:
            if handle is first and _earlier(loop, name):
                continue
            handles += [new for new in _edit_use(loop.names, text, handle, name) if new not in handles]
    for statement in loop.names.bindings(loop.owner, loop.model):
        if statement.lineno > loop.insert_before.lineno:
            raise NotUnderstood(statement, f"`{loop.model}` is replaced after the optimizer is made")
    return handles


def _earlier(loop: TrainingLoop, name: ast.Name) -> bool:
    """Whether the use runs before parallelize: in the same scope and above it."""
    return loop.names.scope(name) is loop.owner and name.lineno < loop.insert_before.lineno


def _edit_use(names: Names, text: ScriptText, handle: Handle, name: ast.Name) -> Iterator[Handle]:
    """Rewrite one use; yields the parameter that holds the model in a function it is passed to."""
    parent = names.parent[name]
    if isinstance(parent, ast.Attribute) and parent.attr in SAME_METHODS:
        call = names.parent[parent]
        if isinstance(call, ast.Call) and _is_clip(names, call):
            _edit_clip(names, text, handle, call)
        elif isinstance(call, ast.Call) and parent.attr == "state_dict" and _is_save(names, call):
            _edit_save(names, text, handle, call)
        elif handle.before != handle.after:
            text.replace(name, handle.after)
        return
    if isinstance(parent, ast.Call | ast.keyword):
        call = parent if isinstance(parent, ast.Call) else names.parent[parent]
        function = names.functions.get(dotted(call.func)) if isinstance(call, ast.Call) else None
        if isinstance(call, ast.Call) and function is not None and name is not call.func:
            if handle.before != handle.after:
                text.replace(name, handle.after)
            inside = _parameter(function, call, name)
            yield Handle(function, inside, inside)
            return
        if isinstance(call, ast.Call) and dotted(call.func) == "print":
            return  # shows the architecture
    used = names.parent[name]
    shown = text.of(used) if isinstance(used, ast.expr) else text.of(name)
    raise NotUnderstood(
        names.statement(name),
        f"`{shown}` would use the single-device model, whose weights are not trained any more",
    )


def _parameter(function: Function, call: ast.Call, name: ast.Name) -> str:
    for keyword in call.keywords:
        if keyword.value is name and keyword.arg:
            return keyword.arg
    if name in call.args and call.args.index(name) < len(parameters(function)):
        return parameters(function)[call.args.index(name)]
    raise NotUnderstood(call, f"cannot tell which parameter of `{function.name}` is the model")


# ---- clipping, saving, moving, printing -------------------------------------------------------------


def _is_clip(names: Names, call: ast.Call) -> bool:
    outer = names.parent[call]
    return (
        isinstance(outer, ast.Call) and dotted(outer.func).endswith("clip_grad_norm_") and call in outer.args
    )


def _edit_clip(names: Names, text: ScriptText, handle: Handle, call: ast.Call) -> None:
    """``clip_grad_norm_(model.parameters(), 1.0) --> parallel.clip_grad_norm_(1.0)``."""
    outer = names.parent[call]
    assert isinstance(outer, ast.Call)  # _is_clip
    _clip_all(names, text, handle, outer)


def edit_clips_of_lists(loop: TrainingLoop, text: ScriptText, handles: list[Handle]) -> None:
    """``clip_grad_norm_(weights, 1.0)``, where ``weights`` lists the parameters that the optimizer takes."""
    names = loop.names
    lists = {name for statement in loop.made_from for name in bound_names(statement)} - {loop.optimizer}
    for call in ast.walk(names.tree):
        if not isinstance(call, ast.Call) or not dotted(call.func).endswith("clip_grad_norm_"):
            continue
        given = call.args[0] if call.args else None
        if isinstance(given, ast.Call) and dotted(given.func).rpartition(".")[2] in SAME_METHODS:
            continue  # a model's parameters: edited with the model's uses
        local = [h for h in handles if names.owner(names.scope(call), h.before) is h.scope]
        if isinstance(given, ast.Name) and lists == {given.id} and local:
            _clip_all(names, text, local[0], call)
            continue
        shown = text.of(given) if given is not None else ""
        what = f"clips `{shown}`, expected all of the model's parameters"
        raise NotUnderstood(names.statement(call), what)


def _clip_all(names: Names, text: ScriptText, handle: Handle, outer: ast.Call) -> None:
    other = {k.arg: k.value for k in outer.keywords if k.arg not in ("max_norm", "foreach")}
    norm = next(iter(outer.args[2:3]), other.pop("norm_type", None))
    if other or len(outer.args) > 3 or not (norm is None or _is_two(norm)):
        raise NotUnderstood(names.statement(outer), "gradient clipping other than by the 2-norm")
    limit = [*outer.args[1:2], *(k.value for k in outer.keywords if k.arg == "max_norm")]
    if len(limit) != 1:
        raise NotUnderstood(names.statement(outer), "expected the largest norm in clip_grad_norm_")
    text.replace(outer, f"{handle.after}.clip_grad_norm_({text.of(limit[0])})")


def _is_two(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value in (2, 2.0)


def _is_save(names: Names, call: ast.Call) -> bool:
    """Whether the state goes to ``torch.save``."""
    return any(isinstance(a, ast.Call) and dotted(a.func) == "torch.save" for a in names.ancestors(call))


def _edit_save(names: Names, text: ScriptText, handle: Handle, call: ast.Call) -> None:
    """All ranks gather the state, one writes it."""
    statement = names.statement(call)
    others = [n for n in ast.walk(statement) if isinstance(n, ast.Attribute) and n.attr == "state_dict"]
    save = statement.value if isinstance(statement, ast.Expr) else None
    if (
        not isinstance(save, ast.Call)
        or dotted(save.func) != "torch.save"
        or not text.starts_its_line(statement)
    ):
        raise NotUnderstood(
            statement, "expected `torch.save(model.state_dict(), ...)` as a statement of its own"
        )
    if len(others) > 1:
        raise NotUnderstood(
            statement,
            "an optimizer's state is this rank's piece only and cannot be saved whole; take it out and give "
            "--save DIR, which writes checkpoints that any plan resumes from",
        )
    state = f"{handle.before}_state"
    text.insert_lines_before(statement, [f"{state} = {handle.after}.state_dict()  # all ranks take part"])
    text.replace(call, state)
    text.guard(statement, f"{handle.after}.rank == 0")


def keep_on_the_host(loop: TrainingLoop, text: ScriptText) -> None:
    """Take ``.to(device)`` off the model before it is cut: each rank moves its own piece."""
    for statement in loop.names.bindings(loop.owner, loop.model):
        value = getattr(statement, "value", None)
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and moves_to_device(value):
            inner = value.func.value
            if dotted(inner) == loop.model:
                text.remove(statement)
            else:
                text.replace(value, text.of(inner))
    for name in loop.names.loads(loop.owner, loop.model):
        statement = loop.names.statement(name)
        value = statement.value if isinstance(statement, ast.Expr) else None
        if (
            isinstance(value, ast.Call)
            and moves_to_device(value)
            and dotted(value.func).partition(".")[0] == name.id
        ):
            text.remove(statement)


def guard_prints(names: Names, text: ScriptText, handle: Handle, after_line: int) -> None:
    """``print(...)`` in the handle's scope, below ``after_line``, on rank 0 only."""
    condition = f"{handle.after}.rank == 0"
    for node in ast.walk(handle.scope):
        if (
            not isinstance(node, ast.Expr)
            or names.scope(node) is not handle.scope
            or node.lineno <= after_line
        ):
            continue
        if not isinstance(node.value, ast.Call) or dotted(node.value.func) != "print":
            continue
        parent = names.parent[node]
        if isinstance(parent, ast.If) and parent.body == [node] and not parent.orelse:
            test = text.of(parent.test)
            loose = isinstance(parent.test, ast.BoolOp | ast.IfExp | ast.Lambda | ast.NamedExpr)
            whole = isinstance(parent.test, ast.BoolOp) and isinstance(parent.test.op, ast.And)
            text.replace(parent.test, f"{f'({test})' if loose and not whole else test} and {condition}")
        elif text.starts_its_line(node):
            text.guard(node, condition)


def seeds_itself(tree: ast.Module) -> bool:
    """Whether the script fixes a random seed, so that all ranks build the same model."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return any(dotted(call.func).rpartition(".")[2] in _SEEDS for call in calls)
