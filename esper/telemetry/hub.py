"""The hub: passes every event of one run to that run's sinks.

Each run owns its hub; there is no global one, so two runs in a process never see each other's events.

Thread contract: a hub belongs to the thread that created it, and `emit` and `close` must be called only there. Sinks
therefore need no locks, and receive the events in order.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Self

from esper.telemetry.event import Event
from esper.telemetry.sink import Sink as Sink

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class DroppedSink:
    """The reason that a sink was dropped, and the number of events that it missed: those that it failed on and all
    later ones."""

    error: Exception
    missed: int

    def words(self) -> str:
        """Returns the reason for display, with the number of missed events if it is known."""
        if not self.missed:
            return str(self.error)
        events = "1 event" if self.missed == 1 else f"{self.missed:,} events"
        return f"{self.error}; {events} not written"


class TelemetryHub:
    """Routes events to sinks; as a context manager, closes them on exit.

    Telemetry observes a run and never stops it: a sink that raises is dropped with one logged warning, and the others
    continue. (The warning is logged: with `warnings.warn` under `-W error`, it would raise into the run.)
    """

    def __init__(self, sinks: Iterable[Sink] = ()) -> None:
        self._active = _named(sinks)
        self._dropped: dict[str, DroppedSink] = {}
        self._thread = threading.get_ident()
        self._closed = False

    @property
    def dropped(self) -> Mapping[str, DroppedSink]:
        """Sinks that failed or lost events, by name.

        The name is the class name; further sinks of the same class are called ``NAME#2``, ``NAME#3``, ...
        """
        return MappingProxyType(self._dropped)

    def emit(self, event: Event) -> None:
        """Passes ``event`` to every sink, in the order in which they were given.

        Raises:
            RuntimeError: the hub is closed, or another thread created it.
        """
        self._check_thread()
        if self._closed:
            raise RuntimeError(f"the telemetry hub is closed: {type(event).__name__} cannot be emitted any more")
        # A sink that was dropped misses this event, too.
        for lost in self._dropped.values():
            lost.missed += 1
        for name, sink in list(self._active.items()):  # a copy, because a sink may be dropped
            try:
                sink.handle(event)
            except Exception as error:
                self._drop(name, error, missed=1)
                with contextlib.suppress(Exception):  # already reported; this only releases its files
                    sink.close()

    def close(self) -> None:
        """Closes all sinks; a second call does nothing.

        A sink that fails here is dropped too. Ctrl-C while waiting for a sink is raised after the others are closed.

        Raises:
            RuntimeError: another thread created the hub.
        """
        self._check_thread()
        if self._closed:
            return
        self._closed = True
        interrupt: KeyboardInterrupt | None = None
        for name, sink in list(self._active.items()):
            try:
                sink.close()
            except Exception as error:
                self._drop(name, error, missed=0)
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _drop(self, name: str, error: Exception, missed: int) -> None:
        del self._active[name]
        self._dropped[name] = DroppedSink(error, missed)
        logger.warning("telemetry sink %s failed and was dropped: %s: %s", name, type(error).__name__, error)

    def _check_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise RuntimeError("a telemetry hub may only be used from the thread that created it")


def _named(sinks: Iterable[Sink]) -> dict[str, Sink]:
    """Returns the sinks by class name, numbered from the second sink of a class."""
    named: dict[str, Sink] = {}
    seen: Counter[str] = Counter()
    for sink in sinks:
        name = type(sink).__name__
        seen[name] += 1
        if seen[name] > 1:
            name = f"{name}#{seen[name]}"
        named[name] = sink
    return named
