"""A plain single-device training script in, the same script training under a plan out, as a readable diff.

Before --> after::

    optimizer = AdamW(model.parameters())      parallel = autoplan.parallelize(model, Plan.load("plan.yaml"))
                                               optimizer = AdamW(parallel.parameters())
    loss = model(**batch)                      loss = parallel.step(batch)
    loss.backward()
    clip_grad_norm_(model.parameters(), 1.0)   parallel.clip_grad_norm_(1.0)
    optimizer.step()                           optimizer.step()

The script is read, never run. Where its loop is not the usual one nothing is rewritten, and the error holds
the lines to add by hand.
"""

from __future__ import annotations

import ast
import difflib
import json
from dataclasses import dataclass
from pathlib import Path

from autoplan.errors import BadInputError
from autoplan_codegen.script_checkpoints import Kept, insert_checkpoints
from autoplan_codegen.script_loop import TrainingLoop, find_loop
from autoplan_codegen.script_loss import StepRewrite, rewrite_step
from autoplan_codegen.script_model import forward_parameters
from autoplan_codegen.script_names import Function, NotUnderstood, bound_names, is_builtin, read_names
from autoplan_codegen.script_text import ScriptText
from autoplan_codegen.script_uses import (
    edit_clips_of_lists,
    edit_uses,
    guard_prints,
    keep_on_the_host,
    seeds_itself,
)

NOTHING_KEPT = Kept()
_SEED = "torch.manual_seed(0)  # every rank builds the same model and reads the same batches"


@dataclass(frozen=True)
class ScriptRewrite:
    """The new script's text and how it differs, as a unified diff."""

    text: str
    diff: str


def rewrite_script(
    source: str,
    *,
    name: str,
    plan_path: str,
    output_name: str = "",
    folder: Path | None = None,
    kept: Kept = NOTHING_KEPT,
) -> ScriptRewrite:
    """Rewrite ``source``, the text of the file ``name``; ``plan_path`` is written into it as it is.

    ``folder`` is where modules that the script imports are looked for; ``kept`` what is saved, resumed and
    loaded. Raises BadInputError, with the lines
    to add by hand, for a script whose training loop is not recognised.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        raise BadInputError(f"{name}:{line}: not Python: {getattr(error, 'msg', error)}.") from None
    text = ScriptText(source)
    loop: TrainingLoop | None = None
    try:
        loop = find_loop(tree)
        step = rewrite_step(loop, text, lambda: forward_parameters(loop, folder))
        _edit(loop, step, text, plan_path, kept)
    except NotUnderstood as refusal:
        raise BadInputError(_by_hand(refusal, loop, text, name, plan_path)) from None
    edited = text.edited()
    ast.parse(edited)
    return ScriptRewrite(edited, _diff(source, edited, name, output_name or name))


def _diff(before: str, after: str, before_name: str, after_name: str) -> str:
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), before_name, after_name, lineterm="", n=2
    )
    return "\n".join(lines)


# ---- the edits --------------------------------------------------------------------------------------


def _edit(loop: TrainingLoop, step: StepRewrite, text: ScriptText, plan_path: str, kept: Kept) -> None:
    parallel = _free_name(loop)
    if not text.starts_its_line(loop.insert_before):
        raise NotUnderstood(loop.insert_before, "the optimizer is made in the middle of a line")
    keep_on_the_host(loop, text)
    _insert_parallelize(loop, step, text, parallel, plan_path, kept)
    handles = edit_uses(loop, text, parallel, step.removed)
    local = next(
        (h.after for h in handles if h.scope is loop.scope and h.before == loop.local_model), parallel
    )
    edit_clips_of_lists(loop, text, handles)
    if kept.asks_for_checkpoints:
        insert_checkpoints(loop, text, kept, local)
    for statement in step.removed:
        if statement is not step.at:
            text.remove(statement)
    text.replace(step.at, f"{step.loss_name} = {local}.step({step.batch})")
    for expression in step.same_as_loss:
        text.replace(expression, step.loss_name)
    for handle in handles:
        after_line = loop.insert_before.lineno if handle is handles[0] else 0
        guard_prints(loop.names, text, handle, after_line)
    _insert_imports(loop, text)


def _free_name(loop: TrainingLoop) -> str:
    taken = {node.id for node in ast.walk(loop.names.tree) if isinstance(node, ast.Name)}
    return next(name for name in ("parallel", "parallel_model", "autoplan_model") if name not in taken)


def _insert_parallelize(
    loop: TrainingLoop, step: StepRewrite, text: ScriptText, parallel: str, plan_path: str, kept: Kept
) -> None:
    """The loss function, what it needs, and the call, above the optimizer."""
    lines: list[str] = []
    for statement in _moved_up(loop, step):
        lines.append(text.of(statement))
        text.remove(statement)
    options = ""
    if step.loss_function:
        space = [""] if text.indent(loop.insert_before) else ["", ""]
        lines += [*space, *step.loss_function, *space]
        options = ", loss_fn=loss_fn"
    loaded = f"autoplan.Plan.load({json.dumps(plan_path, ensure_ascii=False)})"
    lines.append(f"{parallel} = autoplan.parallelize({loop.model}, {loaded}{options})")
    if kept.weights:
        lines.append(f"{parallel}.load_pretrained({json.dumps(kept.weights, ensure_ascii=False)})")
    text.insert_lines_before(loop.insert_before, lines)


def _moved_up(loop: TrainingLoop, step: StepRewrite) -> list[ast.stmt]:
    """Statements that make what the loss function reads, where they stand below the optimizer."""
    moved: list[ast.stmt] = []
    for name in sorted(step.closure):
        owner, origin = loop.names.origin(loop.scope, name)
        if origin != name or not (isinstance(owner, ast.Module) or owner is loop.owner):
            raise NotUnderstood(
                loop.backward, f"its loss reads `{name}`, which the model's maker does not see"
            )
        bindings = loop.names.bindings(owner, name)
        if not bindings and not is_builtin(name):
            raise NotUnderstood(loop.backward, f"its loss reads `{name}`, which is set nowhere")
        below = [s for s in bindings if s.lineno > loop.insert_before.lineno]
        if not below or isinstance(below[0], Function):
            continue
        if len(bindings) > 1 or _reads_later(loop, below[0]):
            raise NotUnderstood(below[0], f"the loss reads `{name}`, which is set after the optimizer")
        moved.append(below[0])
    return moved


def _reads_later(loop: TrainingLoop, statement: ast.stmt) -> bool:
    """Whether the statement reads what is set below the place it would move to."""
    return any(
        binding.lineno > loop.insert_before.lineno
        for name in read_names(statement)
        for binding in loop.names.bindings(loop.owner, name)
    )


def _insert_imports(loop: TrainingLoop, text: ScriptText) -> None:
    """``import autoplan`` below the script's imports, and a seed where it has none."""
    lines = ["import autoplan"]
    body = loop.names.tree.body
    imports = [s for s in body if isinstance(s, ast.Import | ast.ImportFrom)]
    leading = [s for s in imports if s.lineno < loop.insert_before.lineno or isinstance(loop.owner, Function)]
    if not seeds_itself(loop.names.tree):
        knows_torch = any("torch" in bound_names(s) for s in leading)
        lines += ["", _SEED] if knows_torch else ["import torch", "", _SEED]
    if leading:
        text.insert_lines_after(leading[-1], lines)
    else:
        text.insert_lines_before(body[0], [*lines, ""])


# ---- when the loop is not understood ----------------------------------------------------------------


def _by_hand(
    refusal: NotUnderstood, loop: TrainingLoop | None, text: ScriptText, name: str, plan: str
) -> str:
    """The statement with its line, the reason, and the lines to add filled with the names found."""
    where, shown = name, ""
    if isinstance(refusal.node, ast.stmt | ast.expr):
        where = f"{name}:{refusal.node.lineno}"
        first, *more = text.of(refusal.node).splitlines()
        shown = f"\n    {first}{' ...' if more else ''}"
    model = loop.model if loop else "model"
    optimizer = loop.optimizer if loop else "optimizer"
    made = f" (line {loop.insert_before.lineno})" if loop else ""
    return f"""{where}: not understood: {refusal.reason}.{shown}
Nothing was written. Mend that line, or make these changes by hand:

    import autoplan

    # before {optimizer} is made{made}; the same seed on every rank
    parallel = autoplan.parallelize({model}, autoplan.Plan.load("{plan}"))
    # {optimizer} takes parallel.parameters() in place of {model}.parameters()

    # in the loop, in place of the forward pass and backward; batch: the inputs of {model}, by name
    loss = parallel.step(batch)
    # in place of torch.nn.utils.clip_grad_norm_({model}.parameters(), max_norm)
    parallel.clip_grad_norm_(max_norm)
    {optimizer}.step()
    if parallel.rank == 0:
        print(loss.item())"""
