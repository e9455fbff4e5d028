"""The event log: one JSON object per line, readable during the run and after a crash."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
from pathlib import Path

from esper.telemetry.event import Event, record

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
