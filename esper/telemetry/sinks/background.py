"""A sink that may be slow, kept away from the run: it works in a thread of its own, behind a queue with an end."""

from __future__ import annotations

import logging
import os
import threading
from queue import SimpleQueue

from esper.telemetry.event import Event
from esper.telemetry.sink import EventsLost, Sink

logger = logging.getLogger(__name__)

CAPACITY = 10_000
PATIENCE = 10.0


class BackgroundSink:
    """Hands events on to ``inner`` from a thread of its own; whoever emits them never waits.

    The queue holds at most ``capacity`` events; what comes while it is full is dropped and counted. An inner sink that
    raises is not asked again. Everything of ``inner`` runs in that one thread, ``close`` too, so that it needs no
    locks. The thread starts at the first event and ends with the process whatever it does.

    After a fork the child has no such thread: there, nothing is written and nothing is waited for.

    Args:
        inner: the sink that may be slow, or stand still.
        capacity: events that wait at most.
        patience: seconds that :meth:`close` waits for what is in the queue.
        wants: the kinds of event that ``inner`` does anything with; None for all. Others do not enter the queue.
    """

    def __init__(
        self,
        inner: Sink,
        capacity: int = CAPACITY,
        patience: float = PATIENCE,
        wants: frozenset[type[Event]] | None = None,
    ) -> None:
        if capacity < 1 or patience < 0:
            raise ValueError(f"capacity is {capacity} and patience {patience}: give at least 1 event and 0 seconds")
        self.inner, self.capacity, self.patience, self.wants = inner, capacity, patience, wants
        self._queue: SimpleQueue[Event | None] = SimpleQueue()  # None: no more will come
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._failure: BaseException | None = None
        self._given = 0
        """Events put in the queue: counted by the run's thread ..."""
        self._written = 0
        """... and those that came through: counted by the worker."""
        self._overflowed = 0
        self._closed = False

    @property
    def unwritten(self) -> int:
        """Events that ``inner`` has not taken yet, those that were dropped among them."""
        return self._given - self._written + self._overflowed

    def handle(self, event: Event) -> None:
        """Put the event in the queue, or count it as dropped. Raises EventsLost once ``inner`` has failed."""
        if self._process != os.getpid() or (self.wants is not None and type(event) not in self.wants):
            return
        if self._failure is not None:
            self._closed = True  # whatever the thread still does, there is nothing to wait for
            raise EventsLost(self._reason(), self.unwritten + 1) from self._failure
        if self._queue.qsize() >= self.capacity:  # only this thread puts events in, so there is room if it says so
            self._overflowed += 1
            if self._overflowed == 1:
                logger.warning("%s is slower than the run: events are dropped", type(self.inner).__name__)
            return
        self._given += 1
        self._queue.put(event)
        if self._thread is None:
            name = f"esper-{type(self.inner).__name__}"
            self._thread = threading.Thread(target=self._work, name=name, daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Wait until everything is written, ``patience`` seconds at most; a second call does nothing.

        Raises:
            EventsLost: ``inner`` failed, was too slow, or some events were dropped; with their number.
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
        told = []
        if self._failure is not None:
            told.append(f"{type(self._failure).__name__}: {self._failure}")
        elif self._closed and self._thread is not None and self._thread.is_alive():
            told.append(f"it was not done {self.patience:g} s after the end")
        if self._overflowed:
            told.append(f"its queue of {self.capacity:,} events was full")
        return ", ".join(told)

    def _work(self) -> None:
        """What the thread does. It uses nothing of the run's but events, which do not change."""
        try:
            while (event := self._queue.get()) is not None:
                self.inner.handle(event)
                self._written += 1
        except BaseException as failure:
            # Also SystemExit: no library's wish to leave may go unheard here.
            self._failure = failure
        try:
            self.inner.close()
        except BaseException as failure:
            self._failure = self._failure or failure
