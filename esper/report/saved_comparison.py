"""The folder of a comparison, as far as its tables can be shown without what made them."""

from __future__ import annotations

import shlex
from pathlib import Path

from esper.config import ConfigError

SETTINGS, TABLE = "comparison.json", "table.txt"
PICTURES = ("pairs", "differences", "cost")
"""Names of its pictures, without their suffix."""


def is_comparison(folder: Path) -> bool:
    """Whether ``folder`` is that of a comparison, and not of a run."""
    return (folder / SETTINGS).is_file()


def saved_tables(folder: Path) -> str:
    """Returns the tables that a comparison has left in its folder. Raises ConfigError if it has no result yet."""
    try:
        return (folder / TABLE).read_text(encoding="utf-8")
    except OSError:
        again = shlex.join(["esper", "compare", "--resume", str(folder)])
        raise ConfigError(
            f"{folder} is a comparison without a result yet, in progress or interrupted; to continue it: {again}"
        ) from None
