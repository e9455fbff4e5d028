"""Atomic file writes: a crash never leaves a partly written file."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from esper.config.files import at_home
from esper.errors import ConfigError
from esper.telemetry.text import plain


def given_path(path: str | Path) -> Path:
    """Returns the path that a user names, with the home folder in the place of a leading tilde.

    Raises ConfigError for an empty one, which would be the current folder, and for the home of nobody.
    """
    if not str(path):
        raise ConfigError("the path is empty; the current folder is .")
    return at_home(path)


def write_atomic(path: Path, content: bytes, previous: Path | None = None) -> None:
    """Writes ``content`` next to ``path``, then renames it, so that readers see either the old file or the new one.

    An error leaves the old file unchanged and removes the temporary one. With ``previous``, the old file is kept under
    that name; between the two renames it exists only there. Raises OSError, which names the file, if it cannot be
    written.
    """
    renamed = {} if previous is None else {path: previous}
    write_together({path: content}, renamed)


def write_together(contents: Mapping[Path, bytes], renamed: Mapping[Path, Path] = MappingProxyType({})) -> None:
    """Writes several files like :func:`write_atomic`; an error while writing leaves all old files unchanged.

    Only the renames happen one after the other; they need no disk space. Old files in ``renamed`` stay under the names
    given there. Raises OSError, which names the file, if one cannot be written.
    """
    parts = {path: path.with_name(path.name + ".part") for path in contents}
    path = next(iter(parts))  # the file at work, which an error names
    try:
        for path, content in contents.items():
            with parts[path].open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        # All contents are on disk; the renames need no space.
        for path, part in parts.items():
            if path in renamed and path.exists():
                path.replace(renamed[path])
            part.replace(path)
    except BaseException as error:
        for part in parts.values():
            with contextlib.suppress(OSError):  # must not mask the original error
                part.unlink()
        if isinstance(error, OSError) and error.errno is not None:
            # The error of a full disk does not name the file.
            raise type(error)(error.errno, error.strerror, str(path)) from error
        raise


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes ``value`` as indented JSON; non-finite numbers, which JSON does not have, become strings."""
    write_atomic(path, json_bytes(value))


def json_bytes(value: dict[str, Any]) -> bytes:
    """Returns the bytes that :func:`write_json` writes."""
    text = json.dumps(plain(value), indent=2, allow_nan=False)
    return f"{text}\n".encode()
