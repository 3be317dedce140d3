"""A wanted name and the names taken in, a free Python name out."""

from __future__ import annotations

import itertools
import keyword
import re
from collections.abc import Container


def free_name(wanted: str, taken: Container[str], *others: str) -> str:
    """``wanted``, else the first of ``others``, else ``wanted_1``, ``wanted_2``...: what is not taken."""
    plain = re.sub(r"\W", "_", wanted)
    plain = plain if plain.isidentifier() else f"v_{plain}"
    choices = itertools.chain((plain, *others), (f"{plain}_{i}" for i in itertools.count(1)))
    return next(name for name in choices if name not in taken and not keyword.iskeyword(name))
