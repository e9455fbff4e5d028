"""Interface of sinks, and how a sink reports lost events."""

from __future__ import annotations

from typing import Protocol

from esper.telemetry.event import Event


class Sink(Protocol):
    """Receives events. It must not change them, because all sinks share the same object."""

    def handle(self, event: Event) -> None:
        """Takes one event; irrelevant ones are ignored."""

    def close(self) -> None:
        """Writes pending data and releases files; called once."""


class EventsLost(Exception):
    """Raised by a sink that knows how many events it did not write (``missed``), including the current one."""

    def __init__(self, reason: str, missed: int) -> None:
        super().__init__(reason)
        self.missed = missed
