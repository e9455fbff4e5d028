"""The event log: one JSON object per line, readable during the run and after a crash."""

from __future__ import annotations

import contextlib
import fcntl
import json
from pathlib import Path

from esper.telemetry.event import Event
from esper.telemetry.record import record
from esper.telemetry.sink import FileSink


class JsonlSink(FileSink):
    """Appends every event to ``path``, one line each; :class:`esper.telemetry.event_log.EventLog` reads them.

    The open file has a shared lock, which ends with the process in any case; :func:`being_written` checks for it.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        with contextlib.suppress(OSError):  # the file system may have no locks; readers detect that themselves
            fcntl.flock(self._file, fcntl.LOCK_SH)

    def handle(self, event: Event) -> None:
        """Writes one line. An event that JSON cannot represent raises before any of it is written."""
        self._file.write(json.dumps(record(event), allow_nan=False) + "\n")


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
