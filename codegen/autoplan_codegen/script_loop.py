"""The training loop inside a script: its tree in, where model, optimizer, forward and backward are out.

Nothing is executed. What is not the usual loop raises :class:`NotUnderstood` with the statement.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from autoplan_codegen.script_names import (
    Names,
    NotUnderstood,
    Scope,
    bound_names,
    dotted,
    parameters,
    read_names,
)

_PARAMETER_METHODS = ("parameters", "named_parameters")
FOREIGN = {  # last name of a call or import -> what to do instead
    "GradScaler": "gradient scaling: take it out, a plan's dtype (bf16 with fp32 master weights) needs none",
    "autocast": "autocast: take it out, the dtype is the plan's (`autoplan search --dtype bf16`)",
    "DistributedDataParallel": "a model already made parallel: start from the single-device script",
    "DataParallel": "a model already made parallel: start from the single-device script",
    "FullyShardedDataParallel": "a model already made parallel: start from the single-device script",
    "fully_shard": "a model already made parallel: start from the single-device script",
    "init_process_group": "process groups of your own: autoplan brings them up itself",
    "Accelerator": "Accelerate's own loop: start from a plain PyTorch loop",
    "LBFGS": "an optimizer that calls the model itself",
    "compile": "torch.compile: take it out, the plan runs generated code",
}


@dataclass(frozen=True)
class TrainingLoop:
    """What the rewrite must know; ``model`` and ``optimizer`` are names in the scope ``owner``.

    ``local_model`` is the model's name where the loop is (another one where it came in as a parameter);
    ``forward`` is the statement that calls the model in ``call``; ``insert_before`` is the first statement
    that hands the model's parameters to the optimizer; ``made_from`` are all of those.
    """

    names: Names
    owner: Scope
    model: str
    optimizer: str
    insert_before: ast.stmt
    made_from: tuple[ast.stmt, ...]
    scope: Scope
    local_model: str
    call: ast.Call
    forward: ast.stmt
    backward: ast.stmt
    loss: ast.expr


def find_loop(tree: ast.Module) -> TrainingLoop:
    """Recognise the loop, or raise NotUnderstood."""
    names = Names(tree)
    _refuse_foreign(names)
    backward, receiver = _backward(names)
    scope = names.scope(backward)
    optimizer_owner, optimizer, model = _optimizer(names, scope, backward)
    forward, call = _forward(names, backward, model)
    owner, name = model
    made = _feeding(names, optimizer_owner, optimizer, name)
    if optimizer_owner is not owner:
        raise NotUnderstood(made[0], f"the optimizer and its model `{name}` are made in different functions")
    return TrainingLoop(
        names=names,
        owner=owner,
        model=name,
        optimizer=optimizer,
        insert_before=_common_ancestor(names, made),
        made_from=tuple(made),
        scope=scope,
        local_model=dotted(call.func),
        call=call,
        forward=forward,
        backward=backward,
        loss=receiver,
    )


def _refuse_foreign(names: Names) -> None:
    for node in ast.walk(names.tree):
        name = dotted(node.func) if isinstance(node, ast.Call) else ""
        last = name.rpartition(".")[2]
        if last in FOREIGN and (last != "compile" or name == "torch.compile"):
            raise NotUnderstood(names.statement(node), FOREIGN[last])
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if any(module.partition(".")[0] == "autoplan" for module in modules):
            raise NotUnderstood(node, "the script uses autoplan already")


def _backward(names: Names) -> tuple[ast.Expr, ast.expr]:
    """The one statement ``LOSS.backward()``, and LOSS."""
    calls = [
        call for call in ast.walk(names.tree) if isinstance(call, ast.Call) and _method(call) == "backward"
    ]
    if not calls:
        raise NotUnderstood(None, "found no call of `.backward()`")
    statements = sorted({names.statement(call): None for call in calls}, key=lambda s: s.lineno)
    if len(statements) > 1:
        raise NotUnderstood(statements[1], "a second backward pass: expected one in the script")
    (statement,) = statements
    (call, *_) = calls
    if call.args or call.keywords:
        raise NotUnderstood(statement, "backward with arguments: expected `loss.backward()`")
    if not isinstance(statement, ast.Expr) or statement.value is not call:
        raise NotUnderstood(statement, "expected `loss.backward()` as a statement of its own")
    assert isinstance(call.func, ast.Attribute)  # _method
    return statement, call.func.value


def _method(call: ast.Call) -> str:
    """The name of the method that is called; empty for a function."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


_Variable = tuple[Scope, str]


def _optimizer(names: Names, scope: Scope, backward: ast.stmt) -> tuple[Scope, str, _Variable]:
    """The variable that ``.step()`` is called on and that was made from a model's parameters."""
    origins = ((names.known_origin(scope, name), call) for name, call in _steps(scope))
    stepping = {variable: call for variable, call in origins if variable is not None}
    found = {
        variable: models
        for variable in stepping
        if (models := _models(names, variable)) and not _made_from_others(names, variable, stepping)
    }
    if not found:
        raise NotUnderstood(backward, "found no optimizer made from `model.parameters()` that steps after it")
    if len(found) > 1:
        others = ", ".join(f"`{name}`" for _, name in found)
        raise NotUnderstood(backward, f"several optimizers step here ({others}): expected one")
    (((owner, optimizer), models),) = found.items()
    call = stepping[owner, optimizer]
    if call.args or call.keywords:
        raise NotUnderstood(names.statement(call), "an optimizer step with a closure")
    called = {names.known_origin(scope, c) for c in _called(names.loop(backward))}
    fitting = [name for name in models if (names.owner(owner, name), name) in called] or models
    if len(fitting) != 1:
        raise NotUnderstood(names.bindings(owner, optimizer)[0], "cannot tell which model it trains")
    return owner, optimizer, (names.owner(owner, fitting[0]), fitting[0])


def _steps(scope: Scope) -> Iterator[tuple[str, ast.Call]]:
    """Every ``NAME.step(...)`` in the scope, with NAME."""
    for node in ast.walk(scope):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr == "step" and isinstance(node.func.value, ast.Name):
            yield node.func.value.id, node


def _made_from_others(names: Names, variable: _Variable, others: Iterable[_Variable]) -> bool:
    """Whether another stepping variable went into this one: a scheduler is made from its optimizer."""
    owner, name = variable
    read = {n for s in names.bindings(owner, name) for n in read_names(getattr(s, "value", s))}
    return any(other != variable and other[1] in read for other in others)


def _called(node: ast.AST) -> set[str]:
    return {n.func.id for n in ast.walk(node) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}


def _models(names: Names, variable: _Variable) -> list[str]:
    """Names whose ``.parameters()`` went into the variable, directly or inside a function of the script."""
    owner, name = variable
    models: dict[str, None] = {}
    for statement in _feeding(names, owner, name, None):
        for node in ast.walk(statement):
            if not isinstance(node, ast.Call):
                continue
            if isinstance(node.func, ast.Attribute) and node.func.attr in _PARAMETER_METHODS:
                models |= {dotted(node.func.value): None}
            elif isinstance(node.func, ast.Name) and node.func.id in names.functions:
                models |= dict.fromkeys(_handed_over(names, node))
    return [model for model in models if model.isidentifier()]


def _handed_over(names: Names, call: ast.Call) -> list[str]:
    """Arguments of a call of the script's own function whose ``.parameters()`` that function uses."""
    function = names.functions[dotted(call.func)]
    inside = {
        node.func.value.id
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in _PARAMETER_METHODS
        and isinstance(node.func.value, ast.Name)
    }
    given = dict(zip(parameters(function), call.args)) | {k.arg or "": k.value for k in call.keywords}
    return [value.id for name, value in given.items() if name in inside and isinstance(value, ast.Name)]


def _feeding(names: Names, owner: Scope, name: str, model: str | None) -> list[ast.stmt]:
    """The statements that make ``name``, and those that make what goes into it, up to the model itself.

    With ``model`` only those that read the model (or hand it to a function), in the order of the text.
    """
    wanted, seen = [name], {name, model or ""}
    statements: dict[ast.stmt, None] = {}
    while wanted:
        for statement in names.bindings(owner, wanted.pop()):
            value = getattr(statement, "value", None)
            if value is None or isinstance(statement, ast.For):
                continue
            if _reads_parameters(names, value, model):
                statements[statement] = None
            else:
                fresh = read_names(value) - seen
                seen |= fresh
                wanted += sorted(fresh)
    made = sorted(statements, key=lambda statement: statement.lineno)
    if model is not None and not made:
        raise NotUnderstood(names.bindings(owner, name)[0], f"found no use of `{model}.parameters()` in it")
    return made


def _reads_parameters(names: Names, value: ast.AST, model: str | None) -> bool:
    for node in ast.walk(value):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in _PARAMETER_METHODS and model in (None, dotted(node.func.value)):
                return True
        elif isinstance(node, ast.Call) and dotted(node.func) in names.functions:
            handed = _handed_over(names, node)
            if handed and model in (None, *handed):
                return True
    return False


def _common_ancestor(names: Names, statements: list[ast.stmt]) -> ast.stmt:
    """The statement to insert before: the first one, or the branch that holds them all."""
    candidates = [statements[0], *names.ancestors(statements[0])]
    for candidate in candidates:
        if not isinstance(candidate, ast.stmt):
            continue
        parent = names.parent[candidate]
        if all(parent in names.ancestors(s) for s in statements) and _in_one_block(
            names, candidate, statements
        ):
            return candidate
    return statements[0]


def _in_one_block(names: Names, candidate: ast.stmt, statements: list[ast.stmt]) -> bool:
    """Whether each of ``statements`` stands in, or below, the block of ``candidate``."""
    block = names.block(candidate)
    return all(any(s is one or one in names.ancestors(s) for one in block) for s in statements)


def _forward(names: Names, backward: ast.stmt, model: _Variable) -> tuple[ast.stmt, ast.Call]:
    """The statement before backward, in the same block, that calls the model once."""
    scope, block = names.scope(backward), names.block(backward)
    before = block[: block.index(backward) + 1]
    found = [
        (statement, node)
        for statement in before
        for node in ast.walk(statement)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and names.scope(node) is scope
        and names.known_origin(scope, node.func.id) == model
    ]
    if not found:
        raise NotUnderstood(backward, f"found no call of the model `{model[1]}` before it in the same block")
    (statement, call), *more = found
    if more:
        raise NotUnderstood(more[0][0], f"the model `{model[1]}` is called twice before one backward pass")
    if not isinstance(statement, ast.Assign | ast.AnnAssign) and statement is not backward:
        kind = type(statement).__name__.lower()
        raise NotUnderstood(
            statement, f"the forward pass stands inside a `{kind}`, the backward pass outside"
        )
    return statement, call


def names_after(loop: TrainingLoop) -> set[str]:
    """Names bound inside the loop (or, without one, the scope): they change from step to step."""
    region = loop.names.loop(loop.backward)
    return bound_names(region)
