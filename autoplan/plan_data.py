"""A plan as plain data and back, driven by the dataclasses' own type hints: no field is named here.

Comes in: a dataclass, or data read from YAML. Goes out: dicts, lists and scalars, or the dataclass; an
entry that is unknown, missing or of a wrong type is a BadPlanError with its path, such as ``parts[0].zero``.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from autoplan.errors import BadPlanError
from autoplan.plan import RegionPlan
from autoplan.region_runs import RegionRun, expand_range, fold_regions

Record = TypeVar("Record")
_SCALARS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
_MISSING = object()


def encode(value: Any) -> Any:
    """Dataclasses to dicts and tuples to lists, numbers in the type their field declares.

    Consecutive regions that run alike become one entry ``{regions: layers.0-15, ...}``.
    """
    return _encode(value, type(value), "")


def decode(kind: type[Record], data: Any) -> Record:
    """Inverse of :func:`encode`; raises BadPlanError naming the path, what was expected and what came."""
    return _decode(kind, data, "")


def differences(expected: Any, found: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Each leaf of two encoded values that differs, as (path, expected, found); MISSING where absent."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in dict.fromkeys([*expected, *found]):
            inner = key if not path else f"{path}.{key}"
            yield from differences(expected.get(key, _MISSING), found.get(key, _MISSING), inner)
    elif isinstance(expected, list) and isinstance(found, list):
        for i in range(max(len(expected), len(found))):
            one = expected[i] if i < len(expected) else _MISSING
            other = found[i] if i < len(found) else _MISSING
            yield from differences(one, other, f"{path}[{i}]")
    elif expected != found:
        yield path, expected, found


def describe(value: Any) -> str:
    """What came, short enough for one sentence."""
    if value is _MISSING:
        return "nothing"
    if isinstance(value, dict):
        return f"a mapping with {', '.join(map(str, value)) or 'no entries'}"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    text = "null" if value is None else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _fields(kind: Any) -> dict[str, Any]:
    """Field name -> resolved type, in the order of the class."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _refuse(path: str, expected: str, found: Any) -> NoReturn:
    raise BadPlanError(f"{path or 'the plan'}: expected {expected}, found {describe(found)}.")


# ---- data out ---------------------------------------------------------------------------------------


def _encode(value: Any, kind: Any, path: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        (inner,) = [argument for argument in arguments if argument is not type(None)]
        return None if value is None else _encode(value, inner, path)
    if kind == tuple[RegionPlan, ...]:
        return _encode_regions(value)
    if origin is tuple:
        return [_encode(item, arguments[0], f"{path}[{i}]") for i, item in enumerate(value)]
    if origin is Mapping:
        return {str(key): _encode(item, arguments[1], f"{path}.{key}") for key, item in value.items()}
    if dataclasses.is_dataclass(kind):
        return {
            name: _encode(getattr(value, name), hint, f"{path}.{name}".lstrip("."))
            for name, hint in _fields(kind).items()
        }
    return _encode_scalar(value, kind, path)


def _encode_scalar(value: Any, kind: Any, path: str) -> Any:
    """Numbers of other libraries (numpy, torch) become Python's; what would not come back is refused."""
    if kind is str and isinstance(value, str):
        return str(value)
    if kind is bool and isinstance(value, bool):
        return value
    if kind is int and not isinstance(value, bool) and hasattr(value, "__index__"):
        return value.__index__()
    number = kind is float and not isinstance(value, (bool, str)) and hasattr(value, "__float__")
    if number and float(value) == value:  # not so for a NaN, nor for a whole number above 2**53
        return float(value)
    return _refuse(path, _SCALARS.get(kind, str(kind)), value)


def _encode_regions(regions: Sequence[RegionPlan]) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    for run in fold_regions(regions):
        folds = len(run.names) > 1 and expand_range(run.label) == run.names
        named = [("regions", run.label)] if folds else [("region", name) for name in run.names]
        entries += [{key: name, "layout": run.layout, "recompute": run.recompute} for key, name in named]
    return entries


# ---- data in ----------------------------------------------------------------------------------------


def _decode(kind: Any, data: Any, path: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        (inner,) = [argument for argument in arguments if argument is not type(None)]
        return None if data is None else _decode(inner, data, path)
    if kind == tuple[RegionPlan, ...]:
        return _decode_regions(data, path)
    if origin is tuple:
        if not isinstance(data, list):
            _refuse(path, "a list", data)
        return tuple(_decode(arguments[0], item, f"{path}[{i}]") for i, item in enumerate(data))
    if origin is Mapping:
        return _decode_mapping(arguments[1], data, path)
    if dataclasses.is_dataclass(kind):
        return _decode_record(kind, data, path)
    return _decode_scalar(kind, data, path)


def _decode_scalar(kind: Any, data: Any, path: str) -> Any:
    fits = isinstance(data, (int, float)) if kind is float else isinstance(data, kind)
    if not fits or (isinstance(data, bool) and kind is not bool) or data != data:
        _refuse(path, _SCALARS[kind], data)
    return float(data) if kind is float else data


def _decode_mapping(kind: Any, data: Any, path: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        _refuse(path, "a mapping", data)
    for key in data:
        if not isinstance(key, str):
            _refuse(path, "keys that are text", key)
    return {key: _decode(kind, item, f"{path}.{key}") for key, item in data.items()}


def _decode_record(kind: Any, data: Any, path: str) -> Any:
    fields = _fields(kind)
    if not isinstance(data, dict):
        _refuse(path, f"a mapping with {', '.join(fields)}", data)
    _refuse_other_keys(set(fields), data, path)
    return kind(
        **{name: _decode(hint, data[name], f"{path}.{name}".lstrip(".")) for name, hint in fields.items()}
    )


def _refuse_other_keys(expected: set[str], data: Mapping[Any, Any], path: str) -> None:
    """A missing entry and one nobody knows are both refused: a misspelt name is both."""
    where = f"{path}." if path else ""
    missing = sorted(expected - set(data))
    unknown = sorted(map(str, set(data) - expected))
    if missing:
        also = f" (unknown here: {', '.join(unknown)})" if unknown else ""
        raise BadPlanError(f"{where}{missing[0]}: expected an entry, found nothing{also}.")
    if unknown:
        known = ", ".join(sorted(expected))
        raise BadPlanError(f"{where}{unknown[0]}: no such entry; expected one of {known}.")


def _decode_regions(data: Any, path: str) -> tuple[RegionPlan, ...]:
    if not isinstance(data, list):
        _refuse(path, "a list of regions", data)
    return tuple(
        RegionPlan(name, run.layout, run.recompute)
        for i, entry in enumerate(data)
        for run in [_decode_run(entry, f"{path}[{i}]")]
        for name in run.names
    )


def _decode_run(entry: Any, path: str) -> RegionRun:
    if not isinstance(entry, dict):
        _refuse(path, "a mapping with region (or regions), layout, recompute", entry)
    key = "regions" if "regions" in entry else "region"
    _refuse_other_keys({key, "layout", "recompute"}, entry, path)
    label, layout, recompute = (
        _decode_scalar(str, entry[name], f"{path}.{name}") for name in (key, "layout", "recompute")
    )
    names = expand_range(label) if key == "regions" else (label,)
    if names is None:
        _refuse(f"{path}.regions", "one ascending range such as layers.0-15", label)
    return RegionRun(names, layout, recompute)
