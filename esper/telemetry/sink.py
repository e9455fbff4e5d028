"""What a sink is, and how it says that events were lost."""

from __future__ import annotations

from typing import Protocol

from esper.telemetry.event import Event


class Sink(Protocol):
    """Where events end. A sink reads events, and never changes one: the other sinks get the same object."""

    def handle(self, event: Event) -> None:
        """Take one event; kinds that mean nothing to the sink are ignored."""

    def close(self) -> None:
        """Write what is pending and release files; called once."""


class EventsLost(Exception):
    """Raised by a sink that knows how many events it did not write, ``missed``, up to and with the one it was given."""

    def __init__(self, reason: str, missed: int) -> None:
        super().__init__(reason)
        self.missed = missed
