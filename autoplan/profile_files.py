"""Where hardware profiles lie: a name, an alias or a path in, the path of one YAML file out."""

from __future__ import annotations

import difflib
import functools
import os
from importlib.metadata import entry_points
from pathlib import Path
from typing import cast

import yaml

from autoplan.errors import BadInputError, BadProfileError

ENTRY_POINTS = "autoplan.hw_profiles"


def find_profile(name_or_path: str | None) -> Path:
    """The file of a name (``kunlun-p800``), an alias (``kunlun``) or a path; ``None`` reads AUTOPLAN_HW.

    Raises :class:`BadInputError` with the known names (and the nearest) when none is named or found.
    """
    wanted = (name_or_path or os.environ.get("AUTOPLAN_HW", "")).strip()
    known = ", ".join(profile_names())
    if not wanted:
        raise BadInputError(
            f"Expected a chip, got none.\nAdd `--hw NAME` or set AUTOPLAN_HW=NAME; known: {known}."
        )
    if wanted.endswith((".yaml", ".yml")) or os.sep in wanted:
        return Path(wanted).expanduser()
    aliases = _aliases()
    if wanted.lower() not in aliases:
        said = wanted if name_or_path else f"AUTOPLAN_HW={wanted}"
        near = difflib.get_close_matches(wanted.lower(), aliases, 1, 0.4)
        advice = f" Did you mean `--hw {near[0]}`?" if near else ""
        raise BadInputError(
            f"Expected a known chip or the path of a .yaml file, got `{said}`.{advice}\nKnown: {known}."
        )
    return aliases[wanted.lower()]


def profile_names() -> tuple[str, ...]:
    """The names ``--hw`` takes (aliases not listed), sorted; `autoplan hw list` shows more."""
    return tuple(sorted(path.stem for path in find_profile_files()))


def find_profile_files() -> tuple[Path, ...]:
    """The YAML files of all known profiles: the ones that ship with autoplan, then other packages'.

    Ours lie in the installed package (``autoplan/hw_profiles``) or beside it (a checkout). Other packages
    name a file or a folder under the entry point group ``autoplan.hw_profiles``.
    """
    here = Path(__file__).resolve().parent
    folders = [folder for folder in (here / "hw_profiles", here.parent / "hw_profiles") if folder.is_dir()]
    places = folders[:1] + [Path(str(point.load())) for point in entry_points(group=ENTRY_POINTS)]
    found: dict[str, Path] = {}
    for place in places:
        for path in sorted(place.glob("*.yaml")) if place.is_dir() else [place]:
            if path.stem in found:
                taken = found[path.stem]
                raise BadProfileError(f"{path}: expected a name of its own, got the one of {taken}.")
            found[path.stem] = path
    return tuple(found.values())


def _aliases() -> dict[str, Path]:
    """Name or alias, in lower case, to file; a name wins over another profile's alias."""
    files = find_profile_files()
    known = {path.stem.lower(): path for path in files}
    for path in files:
        for alias in _aliases_in(path, path.stat().st_mtime_ns):
            known.setdefault(alias.lower(), path)
    return known


@functools.lru_cache(maxsize=256)
def _aliases_in(path: Path, _modified_ns: int) -> tuple[str, ...]:
    """The ``aliases`` line alone: a broken profile must not stop the others from loading."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("aliases:"):
            try:
                value: object = yaml.safe_load(line)["aliases"]
            except yaml.YAMLError:
                return ()
            return tuple(str(item) for item in cast(list[object], value)) if isinstance(value, list) else ()
    return ()
