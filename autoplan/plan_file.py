"""The plan's YAML file: a :class:`Plan` in, text that reads well and refuses edits out, and back.

The file ends in two entries that are not for reading: ``fingerprint`` (SHA-256 of the canonical content)
and ``sealed_copy`` (the content, compressed), with which an edited file names the field that differs.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from autoplan.checked_yaml import yaml_complaint
from autoplan.errors import BadPlanError
from autoplan.output_files import write_file
from autoplan.plan import RECOMPUTE, SCHEDULES, Layout, Mesh, Part, Plan, RegionPlan
from autoplan.plan_data import decode, describe, differences, encode
from autoplan.plan_table import plan_table

FORMAT = 1
_FORMAT_KEY = "autoplan_plan"
_SEAL_KEYS = ("fingerprint", "sealed_copy")
_LINE = 110
_UNWRAPPED = 1_000_000
_SEARCH_AGAIN = "The forecast holds for the sealed plan only: search again, with --pin to fix this field."
_MAKE_ONE = "Make a plan with `autoplan search model.py -o plan.yaml`."
_HEADING = "A plan of autoplan. To change it, search again with --pin KEY=VALUE: an edited file is refused."


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write ``plan`` to ``path``.

    Raises BadPlanError for a plan that contradicts itself or cannot come back, BadInputError for a path
    that cannot be written.
    """
    check_plan(plan)
    write_file(path, plan_text(plan), "Give another file with -o.")


def load_plan(path: str | Path) -> Plan:
    """Read what :func:`save_plan` wrote: exactly the same plan, or a BadPlanError naming the field."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise BadPlanError(f"cannot read the plan {path}: {reason}.\n{_MAKE_ONE}") from None
    try:
        return parse_plan(text)
    except BadPlanError as error:
        raise BadPlanError(f"{path}: {error}") from None


def plan_text(plan: Plan) -> str:
    """The whole file: a table in comments, the plan as YAML, the seal."""
    data = encode(plan)
    comments = "\n".join(f"# {line}".rstrip() for line in (_HEADING, "", *plan_table(plan).splitlines()))
    body = _yaml({_FORMAT_KEY: FORMAT, **data})
    return f"{comments}\n{body}# The seal\n{_yaml(_seal(data))}"


def plan_fingerprint(plan: Plan) -> str:
    """SHA-256 (hex) of the plan's canonical content; equal plans have equal fingerprints."""
    return hashlib.sha256(_canonical(encode(plan))).hexdigest()


def parse_plan(text: str) -> Plan:
    """Inverse of :func:`plan_text`."""
    try:
        document = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise BadPlanError(f"{yaml_complaint(error)}\n{_MAKE_ONE}") from None
    return plan_of(document)


def plan_of(document: Any) -> Plan:
    """The plan in an already parsed file; refuses what is not, or no longer, a plan that was saved."""
    if not isinstance(document, dict) or _FORMAT_KEY not in document:
        found = describe(document)
        raise BadPlanError(f"not a plan: expected the entry `{_FORMAT_KEY}`, found {found}.\n{_MAKE_ONE}")
    if type(document[_FORMAT_KEY]) is not int or document[_FORMAT_KEY] != FORMAT:
        raise BadPlanError(
            f"{_FORMAT_KEY}: expected {FORMAT}, found {describe(document[_FORMAT_KEY])}, "
            "a format this autoplan cannot read. Search again to make the plan anew."
        )
    seal = {key: document[key] for key in _SEAL_KEYS if key in document}
    data = {key: item for key, item in document.items() if key != _FORMAT_KEY and key not in seal}
    plan = decode(Plan, data)
    _refuse_edits(plan, data, seal)
    check_plan(plan)
    return plan


def check_plan(plan: Plan) -> None:
    """Refuse a plan that contradicts itself, with the path of the field (what a solver's bug would do)."""
    for i, part in enumerate(plan.parts):
        for path, holds, expected, found in _part_conditions(part, plan.layouts):
            if not holds:
                raise BadPlanError(f"parts[{i}].{path}: expected {expected}, found {describe(found)}.")


_Condition = tuple[str, bool, str, object]  # path, whether it holds, what was expected, what is there


def _part_conditions(part: Part, layouts: Mapping[str, Layout]) -> list[_Condition]:
    """Everything a part must satisfy."""
    mesh, stages = part.mesh, len(part.stages)
    conditions: list[_Condition] = [
        ("mesh.pp", mesh.pp >= 1, "at least 1", mesh.pp),
        ("mesh.dp", mesh.dp >= 1, "at least 1", mesh.dp),
        ("mesh.tp", mesh.tp >= 1, "at least 1", mesh.tp),
        ("mesh.cp", mesh.cp >= 1, "at least 1", mesh.cp),
        ("mesh.ep", mesh.ep >= 1 and mesh.dp % mesh.ep == 0, f"a divisor of {mesh.dp} (mesh.dp)", mesh.ep),
        ("vpp", part.vpp >= 1, "at least 1", part.vpp),
        ("schedule", part.schedule in SCHEDULES, " or ".join(SCHEDULES), part.schedule),
        ("micro_batch", part.micro_batch >= 1, "at least 1", part.micro_batch),
        ("microbatches", part.microbatches >= 1, "at least 1", part.microbatches),
        ("zero", part.zero in (0, 1, 2, 3), "0, 1, 2 or 3", part.zero),
        ("zero_shard", *_zero_shard_condition(part)),
        ("stages", stages == mesh.pp * part.vpp, f"{mesh.pp * part.vpp} stages (mesh.pp x vpp)", stages),
    ]
    for s, stage in enumerate(part.stages):
        for r, region in enumerate(stage.regions):
            path = f"stages[{s}].regions[{r}]"
            conditions += _region_conditions(path, region, mesh, layouts)
    return conditions


def _zero_shard_condition(part: Part) -> tuple[bool, str, object]:
    replicas = part.mesh.replicas
    holds = part.zero_shard >= 0 and replicas % (part.zero_shard or 1) == 0
    return holds, f"0 or a divisor of the {replicas} replicas (mesh.dp x mesh.cp)", part.zero_shard


def _region_conditions(
    path: str, region: RegionPlan, mesh: Mesh, layouts: Mapping[str, Layout]
) -> list[_Condition]:
    layout = layouts.get(region.layout)
    fits = [
        (
            f"{path}.layout",
            layout.on(axis).size in (1, size),
            f"a layout for {axis} {size} (mesh.{axis})",
            region.layout,
        )
        for axis, size in (("cp", mesh.cp), ("ep", mesh.ep), ("tp", mesh.tp))
        if layout is not None
    ]
    return [
        (f"{path}.layout", layout is not None, f"one of {', '.join(layouts)}", region.layout),
        *fits,
        (f"{path}.recompute", region.recompute in RECOMPUTE, " or ".join(RECOMPUTE), region.recompute),
    ]


# ---- the seal ---------------------------------------------------------------------------------------


def _canonical(data: Any) -> bytes:
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def _seal(data: Any) -> dict[str, str]:
    packed = base64.b85encode(zlib.compress(_canonical(data), 9)).decode()
    return {"fingerprint": hashlib.sha256(_canonical(data)).hexdigest(), "sealed_copy": packed}


def _refuse_edits(plan: Plan, data: Any, seal: dict[str, Any]) -> None:
    """Name the field that differs from the sealed copy; a plan written differently but equal passes."""
    for key in _SEAL_KEYS:
        if not isinstance(seal.get(key), str):
            raise BadPlanError(f"{key}: expected text, found {describe(seal.get(key))}.")
    sealed = _open_copy(seal["sealed_copy"])
    if sealed != encode(plan):
        for path, expected, found in differences(sealed, data):
            made, came = describe(expected), describe(found)
            raise BadPlanError(
                f"{path}: edited; the plan was made with {made}, found {came}. {_SEARCH_AGAIN}"
            )
    if seal["fingerprint"] != plan_fingerprint(plan):
        raise BadPlanError(f"fingerprint: edited; it does not belong to this content. {_SEARCH_AGAIN}")


def _open_copy(packed: str) -> Any:
    """The content as it was sealed."""
    try:
        raw = base64.b85decode(packed)
        if base64.b85encode(raw).decode() == packed:
            unpacker = zlib.decompressobj()
            content = unpacker.decompress(raw)
            if unpacker.eof and not unpacker.unused_data:
                return json.loads(content)
    except (ValueError, zlib.error):
        pass
    raise BadPlanError(f"sealed_copy: edited or cut off. {_SEARCH_AGAIN}")


# ---- YAML that reads well ---------------------------------------------------------------------------


class _Dumper(yaml.SafeDumper):
    """Plain data without anchors; long text stays on one line."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _yaml(data: dict[str, Any]) -> str:
    block = yaml.dump(data, Dumper=_Dumper, sort_keys=False, width=_UNWRAPPED, allow_unicode=True)
    node: Any = yaml.compose(block, Loader=yaml.SafeLoader)
    _choose_flow(node, 0)
    return yaml.serialize(node, Dumper=_Dumper, width=_UNWRAPPED, allow_unicode=True)


def _choose_flow(node: Any, indent: int) -> int:
    """Set one-line style where a node of scalars fits a line; returns its one-line width (or a big one)."""
    if isinstance(node, yaml.ScalarNode):
        return len(node.value) + 2
    children: list[Any] = [
        child for item in node.value for child in (item if type(item) is tuple else [item])
    ]
    width = sum(_choose_flow(child, indent + 2) + 2 for child in children)
    node.flow_style = width + indent <= _LINE and all(isinstance(c, yaml.ScalarNode) for c in children)
    return width if node.flow_style else _UNWRAPPED
