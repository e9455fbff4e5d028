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


def read_events(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yields the records of an event log one by one, as written by :func:`esper.telemetry.event.record`.

    Non-finite numbers are returned as the strings ``nan``, ``inf`` and ``-inf``; ``float()`` accepts both forms.

    Raises:
        ValueError: a line is not an event, is incomplete, or has a newer schema; the message has the file and the line
            number.
    """
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                fields = json.loads(line)
            except ValueError as error:
                problem = "not JSON" if line.endswith(b"\n") else "the last line is incomplete"
                raise ValueError(f"{path}:{number}: {problem} ({error})") from error
            if not isinstance(fields, dict) or not {"event", "schema"} <= fields.keys():
                raise ValueError(f"{path}:{number}: not an event: expected an object with the keys event and schema")
            if fields["schema"] > SCHEMA_VERSION:
                raise ValueError(
                    f"{path}:{number}: it has event schema {fields['schema']}, but this version of Esper reads up to "
                    f"{SCHEMA_VERSION}"
                )
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
