"""Errors of input that cannot be used, and the question that helps with a misspelt name."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from difflib import get_close_matches

PATH_ERRORS = (errno.ENAMETOOLONG, errno.EACCES, errno.ENOTDIR, errno.ELOOP)
"""Errors of paths that cannot be looked up: too long a name, or a folder that may not be entered."""

MISFITS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors of loading a state, or weights, of the wrong form."""


class ConfigError(ValueError):
    """Raised for a configuration that cannot be used; the message says what would be right."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns a question that names the most similar of the ``known`` names, to be put after an unknown one, or ""."""
    similar = get_close_matches(name, list(known), n=1)
    return f" (did you mean {similar[0]!r}?)" if similar else ""


def is_of_a_path(error: BaseException) -> bool:
    """Returns whether a path that was given cannot be looked up."""
    return isinstance(error, OSError) and error.errno in PATH_ERRORS and error.filename is not None
