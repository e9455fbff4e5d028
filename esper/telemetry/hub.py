"""The hub: hands every event of one run to that run's sinks.

A run owns its hub; there is no global one, so two runs in a process never see each other's events.

Thread contract: a hub belongs to the thread that made it, and `emit` and `close` are called there only. Sinks therefore
need no locks, and they see the events in the order they happened.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Self

from esper.telemetry.event import Event
from esper.telemetry.sink import EventsLost
from esper.telemetry.sink import Sink as Sink
from esper.telemetry.sinks.background import BackgroundSink

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class DroppedSink:
    """Why a sink was dropped, and how many events it did not get or write: those it failed on and all after them."""

    error: Exception
    missed: int

    def words(self) -> str:
        """For people: the reason, with the count where it is known."""
        events = "1 event" if self.missed == 1 else f"{self.missed:,} events"
        return f"{self.error}; {events} not written" if self.missed else str(self.error)


class TelemetryHub:
    """Routes events to sinks; a context manager that closes them.

    Telemetry observes a run and never stops it: a sink that raises is dropped, with one logged warning, and the others
    go on. (Logged, not `warnings.warn`: under `-W error` that would raise into the run.)
    """

    def __init__(self, sinks: Iterable[Sink] = ()) -> None:
        self._active = _named(sinks)
        self._dropped: dict[str, DroppedSink] = {}
        self._thread = threading.get_ident()
        self._closed = False

    @property
    def dropped(self) -> Mapping[str, DroppedSink]:
        """The sinks that failed or lost events, by name: the class name, that of the inner sink where one works in the
        background, with ``#2``, ``#3``, ... when there are several."""
        return MappingProxyType(self._dropped)

    def emit(self, event: Event) -> None:
        """Hand ``event`` to every sink, in the order the hub got them.

        Raises:
            RuntimeError: the hub is closed, or this is not the thread that made it.
        """
        self._check_thread()
        if self._closed:
            raise RuntimeError(f"the telemetry hub is closed, {type(event).__name__} came too late")
        for lost in self._dropped.values():
            lost.missed += 1
        for name, sink in list(self._active.items()):
            try:
                sink.handle(event)
            except Exception as error:
                self._drop(name, error, error.missed if isinstance(error, EventsLost) else 1)
                with contextlib.suppress(Exception):  # it is reported already; here it only lets go of its files
                    sink.close()

    def close(self) -> None:
        """Close all sinks; a second call does nothing. A sink that fails here is dropped too, with the events missed
        that it counted itself. Ctrl-C while one is waited for is raised when the others are closed."""
        self._check_thread()
        if self._closed:
            return
        self._closed = True
        interrupt: KeyboardInterrupt | None = None
        for name, sink in list(self._active.items()):
            try:
                sink.close()
            except Exception as error:
                self._drop(name, error, error.missed if isinstance(error, EventsLost) else 0)
            except KeyboardInterrupt as came:
                interrupt = came
        if interrupt is not None:
            raise interrupt

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _drop(self, name: str, error: Exception, missed: int) -> None:
        del self._active[name]
        self._dropped[name] = DroppedSink(error, missed)
        logger.warning("telemetry sink %s failed and is dropped: %s: %s", name, type(error).__name__, error)

    def _check_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise RuntimeError("a telemetry hub is used from the thread that made it, and from no other")


def _named(sinks: Iterable[Sink]) -> dict[str, Sink]:
    """Sinks by class name, numbered from the second of a class on."""
    named: dict[str, Sink] = {}
    seen: Counter[str] = Counter()
    for sink in sinks:
        kind = type(sink.inner if isinstance(sink, BackgroundSink) else sink).__name__
        seen[kind] += 1
        named[kind if seen[kind] == 1 else f"{kind}#{seen[kind]}"] = sink
    return named
