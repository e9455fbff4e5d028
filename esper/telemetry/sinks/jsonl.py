"""The event log: one JSON object a line, readable while the run goes on and after a crash."""

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
    a torn line is cut off first. While it is open the file has a shared lock, which ends with the process, however that
    ends: :func:`being_written` asks for it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        cut_torn_line(self.path)
        self._file = self.path.open("a", buffering=1, encoding="utf-8", newline="\n")
        with contextlib.suppress(OSError):  # a file system without locks: readers find that out, too
            fcntl.flock(self._file, fcntl.LOCK_SH)

    def handle(self, event: Event) -> None:
        """Write one line. An event that JSON cannot hold raises before anything of it is written."""
        self._file.write(json.dumps(record(event), allow_nan=False) + "\n")

    def close(self) -> None:
        self._file.close()


def read_events(path: str | Path, *, allow_torn_last_line: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the records of an event log, as :func:`esper.telemetry.event.record` wrote them, one by one.

    Non-finite numbers come back as the strings ``nan``, ``inf`` and ``-inf``; ``float()`` takes both forms.

    Args:
        allow_torn_last_line: end quietly at a last line without its line end that does not parse, as a crash, or a run
            that is writing right now, leaves it. A broken line anywhere else is an error all the same.

    Raises:
        ValueError: a line that is no event, or one of a newer schema; the message has the file and the line number.
    """
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                fields = json.loads(line)
            except ValueError as error:
                torn = not line.endswith(b"\n")
                if torn and allow_torn_last_line:
                    return
                what = "the last line is torn" if torn else "not JSON"
                raise ValueError(f"{path}:{number}: {what} ({error})") from error
            _check_record(fields, f"{path}:{number}")
            yield fields


def being_written(path: str | Path) -> bool | None:
    """Whether a :class:`JsonlSink` has the log open, in any process of this machine; None where that cannot be found
    out, because the file cannot be opened or its file system has no locks."""
    try:
        with Path(path).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # let go when the file is closed, at once
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def cut_torn_line(path: Path) -> None:
    """Cut off what stands after the last line end, so that what is appended starts on a line of its own."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        whole = 0
        for line in file:
            if line.endswith(b"\n"):
                whole += len(line)
            else:
                logger.warning("%s: cut off a torn last line of %d bytes", path, len(line))
        file.truncate(whole)


def _check_record(fields: Any, where: str) -> None:
    if not isinstance(fields, dict) or not isinstance(fields.get("event"), str):
        raise ValueError(f"{where}: not an event, an object with the key 'event' was expected")
    schema = fields.get("schema")
    if not isinstance(schema, int):
        raise ValueError(f"{where}: the event has no schema version")
    if schema > SCHEMA_VERSION:
        raise ValueError(
            f"{where}: written with event schema {schema}, this Esper reads up to {SCHEMA_VERSION}; use a newer Esper"
        )
