"""A check that a command refuses its input."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

Esper = Callable[..., Any]


def refused(esper: Esper, arguments: tuple[str, ...], *wanted: str) -> str:
    """The command is refused with a message that has every text in ``wanted``, and the folder is as it was.

    Returns the message.
    """
    before = sorted(Path().rglob("*"))
    found = esper(*arguments)
    assert found.code == 2, found
    assert "Traceback" not in found.err
    assert found.err.count("Error: ") == 1
    assert len(found.err.splitlines()) <= 4
    for text in wanted:
        assert text in found.err
    assert found.out == ""
    assert sorted(Path().rglob("*")) == before
    return str(found.err)
