"""Deferring SIGINT (Ctrl-C), SIGTERM and SIGHUP until a critical section is complete."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

ENDS = (signal.SIGTERM, signal.SIGHUP)
"""Signals of a batch system, and of a terminal that closes."""
SIGNALS = (signal.SIGINT, *ENDS)
SAME_SECONDS = 5.0
"""Time within which two SIGTERMs are one: the end of a job signals all of its processes, and a launcher repeats it."""

logger = logging.getLogger(__name__)


@contextmanager
def interrupts_wait(again: bool = False) -> Iterator[None]:
    """Defers signals until the end of the block; only the main thread receives them.

    Pending signals are re-raised in order until one of their handlers raises. An exception raised in the block takes
    precedence over them.

    Args:
        again: a second signal acts at once, unless it is a SIGTERM that repeats the first.
    """
    # Handlers of the signals that are deferred.
    held: dict[int, Callable[[int, FrameType | None], object]] = {}
    if _on_main_thread():
        for deferred in SIGNALS:
            handler = signal.getsignal(deferred)
            if callable(handler):  # neither ignored nor left to the system's default action
                held[deferred] = handler
    came: list[int] = []
    first = 0.0

    def wait(number: int, frame: FrameType | None) -> None:
        nonlocal first
        now = time.monotonic()
        repeats = came == [signal.SIGTERM] and number == signal.SIGTERM and now - first < SAME_SECONDS
        if again and repeats:
            return
        came.append(number)
        if not again:
            return
        if len(came) > 1:
            held[number](number, frame)
            return
        first = now
        if number == signal.SIGINT:  # a SIGTERM has no reader: a launcher sends it, also once another rank is lost
            logger.warning("stopping at the end of this step; a second Ctrl-C stops at once")

    try:
        for number in held:
            signal.signal(number, wait)
        yield
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)
    if again:
        came = came[:1]  # later ones have already acted
    for number in came:
        held[number](number, None)


@contextmanager
def termination_interrupts() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP raise KeyboardInterrupt in the block, if they would otherwise end the process silently.

    One that is ignored, as SIGHUP by nohup, stays so.
    """
    silent = []
    if _on_main_thread():
        silent = [number for number in ENDS if signal.getsignal(number) is signal.SIG_DFL]
    for number in silent:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in silent:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def interrupts_end() -> Iterator[None]:
    """Ends the process with exit status 130 and one word if a signal comes in the block, which begins no work.

    An exception in the middle of an import would be printed, or lost. Signals that something else handles, or ignores,
    stay as they are, and those by which a launcher ends a rank.
    """
    defaults = {}
    signals = SIGNALS[:1] if "RANK" in os.environ else SIGNALS
    if _on_main_thread():
        for number in signals:
            handler = signal.getsignal(number)
            if handler in (signal.SIG_DFL, signal.default_int_handler):
                defaults[number] = handler
    for number in defaults:
        signal.signal(number, _end_at_once)
    try:
        yield
    finally:
        for number, handler in defaults.items():
            signal.signal(number, handler)


def _end_at_once(_number: int, _frame: FrameType | None) -> None:
    with suppress(OSError):  # of a closed stream
        os.write(2, b"Interrupted.\n")
    os._exit(130)


def _on_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
