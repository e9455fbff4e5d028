"""Deferring SIGINT (Ctrl-C), SIGTERM and SIGHUP until a critical section is complete."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
    # Signals that are ignored or left to the system's default action (not callable) are not deferred.
    before = {int(number): signal.getsignal(number) for number in SIGNALS} if _on_main_thread() else {}
    held = {number: act for number, act in before.items() if callable(act)}
    came: list[int] = []
    first = 0.0

    def wait(number: int, frame: FrameType | None) -> None:
        nonlocal first
        now = time.monotonic()
        repeats = came == [signal.SIGTERM] and number == signal.SIGTERM and now - first < SAME_SECONDS
        if again and repeats:
            return
        came.append(number)
        if again and len(came) == 1:
            first = now
            if number == signal.SIGINT:  # a SIGTERM has no reader: a launcher sends it, also once another rank is lost
                logger.warning("stopping at the end of this step; a second Ctrl-C stops at once")
        elif again:
            held[number](number, frame)

    try:
        for number in held:
            signal.signal(number, wait)
        yield
    finally:
        for number, act in held.items():
            signal.signal(number, act)
    for number in came[:1] if again else came:  # with `again`, later ones have already acted
        held[number](number, None)


@contextmanager
def termination_interrupts() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP raise KeyboardInterrupt in the block, if they would otherwise end the process silently.

    One that is ignored, as SIGHUP by nohup, stays so.
    """
    ending = ENDS if _on_main_thread() else ()
    silent = [number for number in ending if signal.getsignal(number) is signal.SIG_DFL]
    for number in silent:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in silent:
            signal.signal(number, signal.SIG_DFL)


def _on_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
