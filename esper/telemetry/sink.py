"""Interface of sinks, and the base of those that write files."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Protocol

from esper.config.files import at_home
from esper.telemetry.event import Event

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """Receives events. It must not change them, because all sinks share the same object."""

    def handle(self, event: Event) -> None:
        """Takes one event; irrelevant ones are ignored."""

    def close(self) -> None:
        """Writes pending data and releases files; called once. Sinks that have neither inherit this."""
        return


class FileSink(Sink):
    """A sink that appends lines to ``path``; each is on disk before the next event. The folder must exist.

    A crash of the process loses at most the line being written. When a run resumes, such a torn line is removed first.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = at_home(path)
        cut_torn_line(self.path)
        self._file = self.path.open("a+", buffering=1, encoding="utf-8", newline="")

    def close(self) -> None:
        self._file.close()


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
