"""Writing files so that a crash never leaves half of one."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from esper.telemetry.event import plain


def write_atomic(path: Path, content: bytes, previous: Path | None = None) -> None:
    """Write beside ``path`` and rename: readers see the old file or the new one, never a part. An error leaves the old
    one, and nothing beside it. With ``previous`` the old one is kept under that name, and in between it is only there.

    Raises OSError that names the file.
    """
    write_together({path: content}, {} if previous is None else {path: previous})


def write_together(contents: Mapping[Path, bytes], kept: Mapping[Path, Path] = MappingProxyType({})) -> None:
    """Files that belong together: as :func:`write_atomic`, and an error leaves all of the old ones. (Only the renames
    are one after the other: for these, there is room on a disk that is full.) Old ones in ``kept`` stay under other
    names."""
    parts = {path: path.with_name(path.name + ".part") for path in contents}
    path = next(iter(parts))
    try:
        for path, content in contents.items():
            with parts[path].open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        for path, part in parts.items():
            if path in kept and path.exists():
                path.replace(kept[path])
            part.replace(path)
    except BaseException as error:
        for part in parts.values():
            _remove(part)
        if isinstance(error, OSError) and error.errno is not None:
            # That a disk is full is told of without the file that did not fit.
            raise type(error)(error.errno, error.strerror, str(path)) from error
        raise


def _remove(file: Path) -> None:
    """As far as that can be done: another error stands in line."""
    with contextlib.suppress(OSError):
        file.unlink()


def write_json(path: Path, value: dict[str, Any]) -> None:
    """As indented JSON; numbers that are not finite, which JSON has not, as strings."""
    write_atomic(path, json_bytes(value))


def json_bytes(value: dict[str, Any]) -> bytes:
    """What :func:`write_json` writes."""
    return (json.dumps(plain(value), indent=2, allow_nan=False) + "\n").encode()
