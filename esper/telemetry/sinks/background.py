"""A wrapper that runs a slow sink in its own thread, behind a bounded queue."""

from __future__ import annotations

import logging
import os
import threading
from queue import SimpleQueue

from esper.telemetry.event import Event
from esper.telemetry.sink import EventsLost, Sink

logger = logging.getLogger(__name__)

CAPACITY = 10_000
"""Default max events in the queue."""
PATIENCE = 10.0
"""Default max seconds that closing waits."""


class BackgroundSink:
    """Passes events to ``inner`` from its own thread, so that emitting never blocks.

    The queue holds at most ``capacity`` events; events that arrive while it is full are dropped and counted. Once
    ``inner`` raises, it receives no more events and is only closed. All calls to ``inner``, including ``close``, happen
    in that one thread, so it needs no locks; only if no event ever came, ``close`` runs in the caller's thread. The
    thread starts at the first event and never keeps the process alive.

    A forked child has no such thread: there, nothing is written and nothing waits.

    Args:
        inner: the sink that may be slow or hang.
        capacity: max events in the queue.
        patience: max seconds that :meth:`close` waits for the queue to empty.
        wants: event classes that ``inner`` uses; None: all. Others do not enter the queue.

    Raises:
        ValueError: ``capacity`` is less than 1, or ``patience`` is negative.
    """

    def __init__(
        self,
        inner: Sink,
        capacity: int = CAPACITY,
        patience: float = PATIENCE,
        wants: frozenset[type[Event]] | None = None,
    ) -> None:
        if capacity < 1 or patience < 0:
            raise ValueError(f"capacity must be at least 1 and patience at least 0, got {capacity} and {patience}")
        self.inner = inner
        self.capacity = capacity
        self.patience = patience
        self.wants = wants
        self._queue: SimpleQueue[Event | None] = SimpleQueue()  # None marks the end
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._failure: BaseException | None = None
        self._given = 0
        """Number of events put into the queue; written only by the run's thread."""
        self._written = 0
        """Number of events that ``inner`` has taken; written only by the worker."""
        self._overflowed = 0
        self._closed = False

    @property
    def unwritten(self) -> int:
        """Number of events that ``inner`` has not taken, including dropped ones."""
        return self._given - self._written + self._overflowed

    def handle(self, event: Event) -> None:
        """Queues the event, or counts it as dropped. Raises EventsLost once ``inner`` has failed."""
        if self._process != os.getpid():
            return
        if self.wants is not None and type(event) not in self.wants:
            return
        if self._failure is not None:
            self._closed = True  # nothing is left to wait for
            raise EventsLost(self._reason(), self.unwritten + 1) from self._failure
        if self._queue.qsize() >= self.capacity:  # only this thread adds events, so the check is safe
            self._overflowed += 1
            if self._overflowed == 1:
                logger.warning("%s cannot keep up with the run: events are being dropped", type(self.inner).__name__)
            return
        self._given += 1
        self._queue.put(event)
        if self._thread is None:
            name = f"esper-{type(self.inner).__name__}"
            self._thread = threading.Thread(target=self._work, name=name, daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Waits at most ``patience`` seconds until everything is written; a second call does nothing.

        Raises:
            EventsLost: ``inner`` failed or was too slow, or events were dropped; has their number.
        """
        if self._closed or self._process != os.getpid():
            return
        self._closed = True
        if self._thread is None:
            self.inner.close()
            return
        self._queue.put(None)
        self._thread.join(self.patience)
        if self._failure is not None or self._thread.is_alive() or self._overflowed:
            raise EventsLost(self._reason(), self.unwritten) from self._failure

    def _reason(self) -> str:
        reasons = []
        if self._failure is not None:
            reasons.append(f"{type(self._failure).__name__}: {self._failure}")
        elif self._closed and self._thread is not None and self._thread.is_alive():
            reasons.append(f"it had not finished {self.patience:g} s after the end of the run")
        if self._overflowed:
            reasons.append(f"its queue of {self.capacity:,} events was full")
        return ", ".join(reasons)

    def _work(self) -> None:
        """Body of the thread. It shares nothing with the run except events, which are immutable."""
        try:
            while (event := self._queue.get()) is not None:
                self.inner.handle(event)
                self._written += 1
        except BaseException as failure:
            # Also catches SystemExit: a library that exits must be reported as a failure.
            self._failure = failure
        try:
            self.inner.close()
        except BaseException as failure:
            self._failure = self._failure or failure
