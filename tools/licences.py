"""What autoplan depends on in, every package's licence out; fails for one that is unknown or not allowed.

    python tools/licences.py [--extra dev --extra transformers ...]

Reads the metadata of what is installed here: dependencies of dependencies included, those of extras that are
not installed left out. Strong copyleft (GPL, AGPL) is not allowed; weak copyleft (MPL, EPL, LGPL) is named.
"""

from __future__ import annotations

import argparse
import importlib.metadata as metadata
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

DISTRIBUTION = "autoplan-fx"
PERMISSIVE = (
    *("0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0", "CNRI-Python", "ISC"),
    *("MIT", "MIT-0", "MIT-CMU", "OFL-1.1", "PSF-2.0", "Python-2.0", "Unlicense", "Zlib"),
)
WEAK = ("MPL-2.0", "EPL-2.0", "LGPL-2.1-only", "LGPL-2.1-or-later", "LGPL-3.0-only", "LGPL-3.0-or-later")
EXCEPTIONS = ("LLVM-exception",)
# What comes with a CUDA build of torch has NVIDIA's own terms and no other; a CPU build has none of it.
CUDA_PARTS = re.compile(r"(nvidia|cuda)-[a-z0-9-]+")
# Free texts and classifiers, as packages write them -> the identifier of SPDX; the first that fits is taken.
WRITTEN: tuple[tuple[str, str], ...] = (
    (r"\b(affero|agpl)", "AGPL-3.0"),
    (r"\b(lesser general public|lgpl)", "LGPL-3.0-or-later"),
    (r"\b(general public licen[sc]e|gnu gpl|gpl)", "GPL-3.0"),
    (r"mozilla public license 2|mpl.?2", "MPL-2.0"),
    (r"apache", "Apache-2.0"),
    (r"\bmit\b", "MIT"),
    (r"\bisc\b", "ISC"),
    (r"2.clause bsd|bsd.2.clause", "BSD-2-Clause"),
    (r"\bbsd\b", "BSD-3-Clause"),
    (r"python software foundation|\bpsf", "PSF-2.0"),
)


@dataclass(frozen=True)
class Licence:
    """A package, its licence as an SPDX expression (empty: none found), and whether that is allowed."""

    package: str
    version: str
    expression: str
    allowed: bool
    weak: bool


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--extra", action="append", default=[], help="an extra of the project; repeatable")
    extras = parser.parse_args(arguments).extra
    found = [licence_of(metadata.distribution(name)) for name in dependencies(DISTRIBUTION, extras)]
    if not found:
        print(f"{DISTRIBUTION} is not installed here: type `pip install -e .` first", file=sys.stderr)
        return 2
    width = max(len(f"{one.package} {one.version}") for one in found)
    for one in found:
        verdict = "" if one.allowed else "  NOT ALLOWED"
        note = "  (weak copyleft)" if one.allowed and one.weak else ""
        print(f"{f'{one.package} {one.version}':{width}}  {one.expression or 'unknown'}{note}{verdict}")
    refused = [one for one in found if not one.allowed]
    print(f"\n{len(found)} packages, {len(refused)} with a licence that is unknown or not allowed")
    return 1 if refused else 0


def dependencies(root: str, extras: Iterable[str] = ()) -> list[str]:
    """Names of installed packages that ``root`` needs, with what those need, sorted."""
    found: set[str] = set()
    wanted = [(root, frozenset(extras))]
    seen = set(wanted)
    while wanted:
        name, with_extras = wanted.pop()
        try:
            required = metadata.distribution(name).requires or []
        except metadata.PackageNotFoundError:
            continue  # an extra that is not installed
        found.add(canonicalize_name(name))
        for requirement in map(Requirement, required):
            chosen = [{"extra": extra} for extra in ("", *with_extras)]
            if requirement.marker is None or any(requirement.marker.evaluate(one) for one in chosen):
                entry = (requirement.name, frozenset(requirement.extras))
                if entry not in seen:
                    seen.add(entry)
                    wanted.append(entry)
    return sorted(found - {canonicalize_name(root)})


def licence_of(package: metadata.Distribution) -> Licence:
    """The licence that a package's metadata states: its expression, else its text, else its classifiers."""
    told = package.metadata
    name = canonicalize_name(told["Name"])
    classifiers = [c.rpartition("::")[2] for c in told.get_all("Classifier") or [] if c.startswith("License")]
    expression = told.get("License-Expression") or ""
    text = (told.get("License") or "").strip().partition("\n")[0]
    if not expression and re.fullmatch(r"[\w.+-]+( (AND|OR|WITH) [\w.+-]+)*", text):
        expression = text if _parts(text) <= {*PERMISSIVE, *WEAK} else ""
    expression = expression or _spdx(text) or " AND ".join(dict.fromkeys(map(_spdx, classifiers)))
    if not expression and CUDA_PARTS.fullmatch(name):
        return Licence(name, package.version, "LicenseRef-NVIDIA", True, False)
    weak = any(part in WEAK for part in _parts(expression))
    return Licence(name, package.version, expression, is_allowed(expression), weak)


def is_allowed(expression: str) -> bool:
    """Whether all that an SPDX expression asks for is on the list; of alternatives one is enough."""
    if not expression.strip():
        return False
    text = expression.replace("(", " ( ").replace(")", " ) ")
    # Alternatives inside brackets are rare; taken apart they only ask for more than they must.
    if "(" in text:
        return all(part in {*PERMISSIVE, *WEAK} for part in _parts(expression))
    return any(
        all(_is_known(part) for part in alternative.split(" AND ")) for alternative in text.split(" OR ")
    )


def _is_known(part: str) -> bool:
    licence, _, exception = part.strip().partition(" WITH ")
    return licence in (*PERMISSIVE, *WEAK) and (not exception or exception in EXCEPTIONS)


def _parts(expression: str) -> set[str]:
    joining = ("AND", "OR", "WITH", "", *EXCEPTIONS)
    return {one for one in re.split(r"[ ()]+", expression) if one not in joining}


def _spdx(text: str) -> str:
    return next((spdx for pattern, spdx in WRITTEN if re.search(pattern, text.lower())), "")


if __name__ == "__main__":
    sys.exit(main())
