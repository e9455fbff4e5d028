"""Which parameters of a test are in the default suite; all others are in the slow one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_except(kept: Iterable[Any], every: Iterable[Any]) -> list[Any]:
    """All values of ``every`` as parameters, marked ``slow`` unless they are in ``kept``; a tuple is several arguments.

    Raises:
        ValueError: if a value of ``kept`` is not in ``every``.
    """
    chosen, values = list(kept), list(every)
    if unknown := [value for value in chosen if value not in values]:
        raise ValueError(f"not among the parameters: {unknown}")
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=() if value in chosen else pytest.mark.slow,
        )
        for value in values
    ]
