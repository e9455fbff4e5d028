"""Writing files so that a crash never leaves half of one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from esper.telemetry.event import plain


def write_atomic(path: Path, content: bytes, previous: Path | None = None) -> None:
    """Write beside ``path`` and rename: readers see the old file or the new one, never a part. An error leaves the old
    one, and nothing beside it. With ``previous`` the old one is kept under that name, and in between it is only there.
    """
    temporary = path.with_name(path.name + ".part")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if previous is not None and path.exists():
            path.replace(previous)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: dict[str, Any]) -> None:
    """As indented JSON; numbers that are not finite, which JSON has not, as strings."""
    write_atomic(path, (json.dumps(plain(value), indent=2, allow_nan=False) + "\n").encode())
