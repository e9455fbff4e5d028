"""The event log: one JSON object per line, readable during the run and after a crash."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from esper.telemetry.event import SCHEMA_VERSION, Event, record

logger = logging.getLogger(__name__)


class JsonlSink:
    """Appends every event to ``path``, one line each; the folder must exist.

    The file is line-buffered, so a crash of the process loses at most the line being written. When a run resumes, such
    a torn line is removed first. The open file has a shared lock, which ends with the process in any case;
    :func:`being_written` checks for it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        cut_torn_line(self.path)
        self._file = self.path.open("a", buffering=1, encoding="utf-8", newline="\n")
        with contextlib.suppress(OSError):  # the file system may have no locks; readers detect that themselves
            fcntl.flock(self._file, fcntl.LOCK_SH)

    def handle(self, event: Event) -> None:
        """Writes one line. An event that JSON cannot represent raises before any of it is written."""
        self._file.write(json.dumps(record(event), allow_nan=False) + "\n")

    def close(self) -> None:
        self._file.close()


def read_events(path: str | Path, *, allow_torn_last_line: bool = False) -> Iterator[dict[str, Any]]:
    """Yields the records of an event log one by one, as written by :func:`esper.telemetry.event.record`.

    Non-finite numbers are returned as the strings ``nan``, ``inf`` and ``-inf``; ``float()`` accepts both forms.

    Args:
        allow_torn_last_line: stop silently at a last line without a line end that does not parse. A crash or a run in
            progress leaves such a line. A broken line anywhere else is still an error.

    Raises:
        ValueError: a line is not an event, or has a newer schema; the message has the file and the line number.
    """
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                fields = json.loads(line)
            except ValueError as error:
                torn = not line.endswith(b"\n")
                if torn and allow_torn_last_line:
                    return
                what = "the last line is incomplete" if torn else "not JSON"
                raise ValueError(f"{path}:{number}: {what} ({error})") from error
            _check_record(fields, f"{path}:{number}")
            yield fields


def being_written(path: str | Path) -> bool | None:
    """Whether a :class:`JsonlSink` of any process on this machine has the log open.

    None if that is unknown, because the file cannot be opened or its file system has no locks.
    """
    try:
        with Path(path).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released at once, when the file is closed
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def cut_torn_line(path: Path) -> None:
    """Removes everything after the last line end, so that appended text starts on a new line."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        whole = 0
        for line in file:
            if line.endswith(b"\n"):
                whole += len(line)
            else:
                logger.warning("%s: removed an incomplete last line of %d bytes", path, len(line))
        file.truncate(whole)


def _check_record(fields: Any, where: str) -> None:
    if not isinstance(fields, dict) or not isinstance(fields.get("event"), str):
        raise ValueError(f"{where}: not an event: expected an object with the key 'event'")
    schema = fields.get("schema")
    if not isinstance(schema, int):
        raise ValueError(f"{where}: the event has no schema version")
    if schema > SCHEMA_VERSION:
        raise ValueError(
            f"{where}: it has event schema {schema}, but this version of Esper reads up to {SCHEMA_VERSION}"
        )
