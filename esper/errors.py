"""The error for input that cannot be used, and the question that helps with a misspelt name."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class ConfigError(ValueError):
    """Raised for a configuration that cannot be used; the message says what would be right."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns a question that names the most similar of the ``known`` names, to be put after an unknown one, or ""."""
    similar = get_close_matches(name, list(known), n=1)
    return f" (did you mean {similar[0]!r}?)" if similar else ""
