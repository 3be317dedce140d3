"""The errors a user can meet: each says what was expected, what came, where, and what to type next.

Every message is one or a few plain sentences; the command line prints it without a traceback and
exits with ``exit_code`` (2: bad input, 1: the answer is no).
"""

from __future__ import annotations


class AutoplanError(Exception):
    """Base of every error that is the user's to mend; ``str(error)`` is the whole message."""

    exit_code: int = 2


class BadInputError(AutoplanError):
    """A file, option or value that cannot be used as given."""


class CaptureError(AutoplanError):
    """A model that cannot be traced: names the user's file and line, the op and the rewrite."""


class UnsupportedOpError(AutoplanError):
    """An op that a pass cannot handle and cannot leave alone."""


class BadProfileError(AutoplanError):
    """A hardware profile with a missing, mistyped or unsourced entry."""


class BadPlanError(AutoplanError):
    """A plan that was edited, is stale, or belongs to another model; names the field that differs."""


class InfeasibleError(AutoplanError):
    """Nothing fits: names the binding limit, the top contributors and changes that do fit."""

    exit_code = 1


class VerifyError(AutoplanError):
    """A plan whose rewritten graph does not type-check; names region, op and what was expected there."""

    exit_code = 1


class ParityError(AutoplanError):
    """A parallel run whose loss or gradients differ from one process."""

    exit_code = 1
