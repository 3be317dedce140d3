"""A stage program and the local graphs of its regions in, one readable Python file that runs the stage out.

The file imports torch alone. It holds the collectives it uses, one ``nn.Module`` class per region class, a
``Stage`` module that calls its regions in order (under ``checkpoint`` where the plan recomputes), and two
tables that say which parameter and buffer of the user's model goes where:

* ``PARAMETERS``: attribute of ``Stage`` -> (qualified name in the model, placement: see
  :mod:`autoplan_passes.placements`);
* ``BUFFERS``: attribute of ``Stage`` -> qualified name in the model, or of a constant of the trace.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from autoplan_codegen.expressions import KEEPS_WHOLE
from autoplan_codegen.names import free_name
from autoplan_codegen.prelude import companions, prelude_source
from autoplan_codegen.region_class import INDENT, RESERVED, RegionClass, emit_region_class
from autoplan_passes.recompute import SAVED_OPS, SAVED_OWN_OPS
from autoplan_passes.stages import RegionCall, StageProgram

GraphKey = tuple[str, str]


@dataclass(frozen=True)
class StageFacts:
    """What the opening docstring of a stage file says beyond its program.

    ``mesh`` is ``pp x dp x tp``; ``layouts`` maps a layout's key to one line about it; ``input_keywords``
    names the user inputs (capture placeholder -> the keyword the model takes it by); ``frozen`` are the
    parameters that are not trained.
    """

    model: str
    mesh: str
    micro_batch: int
    layouts: Mapping[str, str]
    input_keywords: Mapping[str, str]
    frozen: frozenset[str] = frozenset()


@dataclass(frozen=True)
class ParameterRow:
    """One row of ``PARAMETERS``: attribute path in ``Stage``, qualified name, placement."""

    path: str
    name: str
    placement: str


@dataclass(frozen=True)
class StageSource:
    """A stage file and the tables in it; ``tied_paths`` are further paths of parameters in the table."""

    text: str
    parameters: tuple[ParameterRow, ...]
    tied_paths: Mapping[str, str]
    buffers: Mapping[str, str]


def emit_stage(
    program: StageProgram, graphs: Mapping[GraphKey, fx.GraphModule], facts: StageFacts
) -> StageSource:
    """Write ``stage_K.py``. ``graphs`` holds the local graph of every call's ``graph_key``."""
    classes = _classes(program, graphs, facts)
    used = {name for region_class in classes.values() for name in region_class.functions}
    imports, prelude = prelude_source([*used, *companions(used)])
    recompute = {call.recompute for call in program.calls}
    parameters, tied_paths = _parameter_rows(program, classes)
    buffers = _buffer_rows(program, classes, graphs)
    sections = [
        f'"""{_opening(program, facts)}\n"""',
        _imports(recompute, imports),
        _header(
            recompute,
            any("_grouped_mm(" in one.source or "grouped_mm_later" in one.source for one in classes.values()),
        ),
        prelude,
        _own_saved_ops(used, recompute),
        *(region_class.source for region_class in classes.values()),
        _stage_class(program, classes, facts, tied_paths),
        _tables(parameters, buffers),
    ]
    text = "\n\n\n".join(section for section in sections if section) + "\n"
    return StageSource(text, parameters, tied_paths, buffers)


def call_attribute(call: RegionCall) -> str:
    """The attribute of ``Stage`` that holds a region: ``model.layers.0 -> model_layers_0``."""
    name = re.sub(r"\W", "_", call.region.name)
    return f"region_{name}" if name in RESERVED or not name.isidentifier() else name


def _classes(
    program: StageProgram, graphs: Mapping[GraphKey, fx.GraphModule], facts: StageFacts
) -> dict[GraphKey, RegionClass]:
    """One class per graph key, named after the user's module class."""
    classes: dict[GraphKey, RegionClass] = {}
    taken: set[str] = {"Stage"}
    for call in program.calls:
        if call.graph_key in classes:
            continue
        regions = [other.region.name for other in program.calls if other.graph_key == call.graph_key]
        name = _class_name(call, taken)
        layout = facts.layouts.get(call.layout, "")
        summary = f"{runs_text(regions)}{f': {layout}' if layout else ''}."
        summary = "Masks and tables that depend on no parameter." if call.is_side else summary
        classes[call.graph_key] = emit_region_class(graphs[call.graph_key], name, summary, facts.frozen)
    return classes


def _class_name(call: RegionCall, taken: set[str]) -> str:
    words = re.split(r"\W+|_", call.region.module_class.split(".")[-1] or call.region.name)
    plain = "".join(word[:1].upper() + word[1:] for word in words if word) or "Region"
    name = free_name(plain if plain.isidentifier() else f"Region{plain}", taken)
    taken.add(name)
    return name


def runs_text(names: Sequence[str]) -> str:
    """``a.0, a.1, a.2, head -> a.0 to a.2, head``: consecutive numbers drawn together."""
    runs: list[list[str]] = []
    for name in names:
        if runs and _follows(runs[-1][-1], name):
            runs[-1].append(name)
        else:
            runs.append([name])
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


def _follows(before: str, after: str) -> bool:
    stem, _, number = before.rpartition(".")
    return number.isdigit() and after == f"{stem}.{int(number) + 1}"


def _opening(program: StageProgram, facts: StageFacts) -> str:
    names = [call.region.name for call in program.calls if not call.is_side]
    made = [name for call in program.calls if call.is_side for name in call.region.outputs]
    recomputed = {
        kind: [call.region.name for call in program.calls if call.recompute == kind]
        for kind in ("selective", "full")
    }
    keywords = [facts.input_keywords.get(name, name) for name in program.user_inputs]
    lines = [
        f"Stage {program.index} of {program.count} of {facts.model}: {runs_text(names)}.",
        "",
        f"Mesh {facts.mesh}, micro-batch of {facts.micro_batch}. Written by autoplan; needs torch alone.",
        f"Reads of the batch: {', '.join(keywords) or 'nothing'}.",
    ]
    lines += [f"Made here, not received: {', '.join(made)}."] if made else []
    lines += [
        f"Recomputed in the backward ({kind}): {runs_text(who)}." for kind, who in recomputed.items() if who
    ]
    return "\n".join(lines)


def _imports(recompute: set[str], imports: Sequence[str]) -> str:
    lines = {"import torch", "import torch.nn.functional as F", "from torch import nn", *imports}
    if recompute & {"full", "selective"}:
        names = [
            "checkpoint",
            *(["create_selective_checkpoint_contexts"] if "selective" in recompute else []),
        ]
        lines.add(f"from torch.utils.checkpoint import {', '.join(names)}")
    return "\n".join(sorted(lines, key=lambda line: (line.startswith("from"), line)))


def _header(recompute: set[str], groups: bool) -> str:
    """``groups``: the stage has torch's grouped products, which older releases do not know."""
    lines = ["aten = torch.ops.aten", 'DEVICE = torch.device("cpu")  # set by whoever runs the stage']
    if "selective" in recompute:
        ops = "".join(
            f"\n{INDENT}torch.ops.{name}," for name in SAVED_OPS if groups or "_grouped_mm" not in name
        )
        lines += [
            "",
            f"SAVED = [  # products, attention and collectives are kept, the rest is recomputed{ops}\n]",
            "",
            "",
            "def save_products():",
            f"{INDENT}return create_selective_checkpoint_contexts(SAVED)",
        ]
    return "\n".join(lines)


def _own_saved_ops(used: set[str], recompute: set[str]) -> str:
    """Ops that the prelude defines join those that are kept."""
    names = [f"torch.ops.{op}" for function, op in SAVED_OWN_OPS.items() if function in used]
    return f"SAVED += [{', '.join(names)}]" if names and "selective" in recompute else ""


def _stage_class(
    program: StageProgram,
    classes: Mapping[GraphKey, RegionClass],
    facts: StageFacts,
    tied_paths: Mapping[str, str],
) -> str:
    names = _value_names(program, facts)
    arguments = [names[name] for name in (*program.receives, *program.user_inputs)]
    built = [f"{INDENT * 2}self.{call_attribute(c)} = {classes[c.graph_key].name}()" for c in program.calls]
    lines = [
        "class Stage(nn.Module):",
        f'{INDENT}"""{_flow(program, names)}"""',
        "",
        f"{INDENT}def __init__(self):",
        f"{INDENT * 2}super().__init__()",
        *built,
        *_keeps_whole(program, classes),
        *(f"{INDENT * 2}self.{path} = self.{home}  # tied" for path, home in tied_paths.items()),
        "",
        f"{INDENT}def forward({', '.join(('self', *arguments))}):",
        *(f"{INDENT * 2}{line}" for line in _calls(program, names)),
        f"{INDENT * 2}return {_returned(program, names)}",
    ]
    return "\n".join(lines)


def _keeps_whole(program: StageProgram, classes: Mapping[GraphKey, RegionClass]) -> list[str]:
    """A region that runs again in the backward gathers there; its own backward need not."""
    again = [c for c in program.calls if c.recompute != "none" and classes[c.graph_key].keeps_whole]
    return [f"{INDENT * 2}self.{call_attribute(call)}.{KEEPS_WHOLE} = True  # recomputed" for call in again]


def _flow(program: StageProgram, names: Mapping[str, str]) -> str:
    receives = ", ".join(names[name] for name in program.receives)
    sends = ", ".join(names[name] for name in program.sends)
    taken = f"Receives {receives}" if receives else "Starts the model"
    return f"{taken}; {f'sends {sends}' if sends else 'returns the loss'}."


def _value_names(program: StageProgram, facts: StageFacts) -> dict[str, str]:
    """Python names of every value the stage's forward handles."""
    names: dict[str, str] = {}
    taken = set(RESERVED)

    def claim(value: str, wanted: str) -> None:
        names[value] = free_name(wanted, taken)
        taken.add(names[value])

    for value in program.user_inputs:
        claim(value, facts.input_keywords.get(value, value))
    for value in program.receives:
        claim(value, f"received_{value}")
    for call in program.calls:
        outputs = call.region.outputs
        for value in outputs:
            if value not in names:
                last = value == program.loss
                claim(
                    value,
                    "loss" if last else call_attribute(call) + ("_out" if len(outputs) == 1 else f"_{value}"),
                )
    return names


def _calls(program: StageProgram, names: Mapping[str, str]) -> list[str]:
    last_use = {value: index for index, call in enumerate(program.calls) for value in call.region.inputs}
    kept = {*program.sends, program.loss}
    lines: list[str] = []
    for index, call in enumerate(program.calls):
        inputs = ", ".join(names[value] for value in call.region.inputs)
        outputs = ", ".join(names[value] for value in call.region.outputs)
        freed = [
            names[value]
            for value in dict.fromkeys(call.region.inputs)
            if last_use[value] == index and value not in kept
        ]
        lines.append(
            f"{outputs} = {_call_text(call, inputs)}" + (f"; del {', '.join(freed)}" if freed else "")
        )
    return lines


def _call_text(call: RegionCall, inputs: str) -> str:
    module = f"self.{call_attribute(call)}"
    if call.recompute == "none":
        return f"{module}({inputs})"
    context = ", context_fn=save_products" if call.recompute == "selective" else ""
    return f"checkpoint({module}, {inputs}, use_reentrant=False{context})"


def _returned(program: StageProgram, names: Mapping[str, str]) -> str:
    if program.loss:
        return names[program.loss]
    sent = ", ".join(names[value] for value in program.sends)
    return f"{sent}," if len(program.sends) == 1 else sent


def _parameter_rows(
    program: StageProgram, classes: Mapping[GraphKey, RegionClass]
) -> tuple[tuple[ParameterRow, ...], dict[str, str]]:
    """The stage's parameters, each once, and the paths tied to them (one storage, read twice)."""
    rows: dict[tuple[str, str], ParameterRow] = {}
    tied: dict[str, str] = {}
    for call in program.calls:
        region_class = classes[call.graph_key]
        for attribute, name, state in zip(
            region_class.parameters, call.region.parameters, region_class.placements
        ):
            row = ParameterRow(f"{call_attribute(call)}.{attribute}", name, state)
            home = rows.setdefault((name, state), row)
            if home is not row:
                tied[row.path] = home.path
    return tuple(rows.values()), tied


def _buffer_rows(
    program: StageProgram, classes: Mapping[GraphKey, RegionClass], graphs: Mapping[GraphKey, fx.GraphModule]
) -> dict[str, str]:
    return {
        f"{call_attribute(call)}.{attribute}": name
        for call in program.calls
        for attribute, name in zip(
            classes[call.graph_key].buffers, buffer_sources(call, graphs[call.graph_key])
        )
    }


def _tables(parameters: Sequence[ParameterRow], buffers: Mapping[str, str]) -> str:
    rows = [f'{INDENT}"{row.path}": ("{row.name}", "{row.placement}"),' for row in parameters]
    buffer_rows = [f'{INDENT}"{path}": "{name}",' for path, name in buffers.items()]
    return "\n".join(["PARAMETERS = {", *rows, "}", "BUFFERS = {", *buffer_rows, "}"])


def buffer_sources(call: RegionCall, graph: fx.GraphModule) -> list[str]:
    """The model's names of the buffers and constants of a call, in the order of the graph's placeholders."""
    kinds = ("buffer", "constant")
    sources = [
        str(node.meta["source"])
        for kind in kinds
        for node in graph.graph.nodes
        if node.meta.get("kind") == kind
    ]
    own = call.region.buffers
    return list(own) if len(own) == len(sources) else sources
