"""Incremental reading of an event log that may be growing, truncated or damaged."""

from __future__ import annotations

import json
from pathlib import Path

from esper.telemetry.event import Event
from esper.telemetry.records import event_of
from esper.telemetry.text import count

SEAL = 256
"""Number of bytes before the read position that are compared to detect whether the log was rewritten."""


class EventLog:
    """An event log, read from where the last reading ended. Broken lines are counted and skipped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begin()

    def _begin(self) -> None:
        self._offset = 0
        self._lines = 0
        self._seal = b""
        """The last bytes before the offset: if they differ in the file, it was rewritten."""
        self._torn = False
        """Whether the last line is incomplete."""
        self._broken: list[str] = []

    def read(self) -> tuple[list[Event], bool]:
        """Returns the events written since the last call, and whether all events returned before are void.

        They are void if the log was rewritten or deleted: a resumed run removes what it logged after its checkpoint.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(max(0, self._offset - len(self._seal)))
                rewritten = file.read(len(self._seal)) != self._seal
                if rewritten:
                    self._begin()
                    file.seek(0)
                return self._parse(file.read()), rewritten
        except FileNotFoundError:
            existed = self._offset > 0
            self._begin()
            return [], existed

    def _parse(self, content: bytes) -> list[Event]:
        complete = content[: content.rfind(b"\n") + 1]
        self._torn = len(complete) < len(content)
        self._offset += len(complete)
        self._seal = (self._seal + complete)[-SEAL:]
        events = []
        for line in complete.split(b"\n")[:-1]:
            self._lines += 1
            try:
                events.append(event_of(json.loads(line)))
            except (ValueError, RecursionError) as error:
                self._broken.append(f"line {self._lines}: {type(error).__name__}: {str(error)[:120]}")
        return events

    def problems(self) -> list[str]:
        """Describes what could not be read."""
        problems = []
        if self._broken:
            lines = count(len(self._broken), "line")
            examples = "; ".join(self._broken[:3])
            problems.append(f"left out {lines} that could not be read ({examples})")
        if self._torn:
            problems.append("the last line is incomplete (so far) and was left out")
        return [f"{self.path.name}: {problem}" for problem in problems]
