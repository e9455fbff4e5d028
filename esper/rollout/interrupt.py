"""Ctrl-C, and the SIGTERM of a machine that wants its time back, that wait for what must not be left half done."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)

logger = logging.getLogger(__name__)


@contextmanager
def interrupts_wait(again: bool = False) -> Iterator[None]:
    """A signal inside acts at the end, so that what is done in there is whole; only the main thread receives it.

    Args:
        again: a second signal acts at once.

    All that came act, in their order, until one of them raises. An error inside is raised in their place.
    """
    # A signal that the process ignores or that ends it at once is nobody's to hold back.
    before = {int(number): signal.getsignal(number) for number in SIGNALS} if _on_main_thread() else {}
    held = {number: act for number, act in before.items() if callable(act)}
    came: list[int] = []

    def wait(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if again and len(came) == 1:
            logger.warning("stopping at the end of this step; a second signal stops at once")
        elif again:
            held[number](number, frame)

    try:
        for number in held:
            signal.signal(number, wait)
        yield
    finally:
        for number, act in held.items():
            signal.signal(number, act)
    for number in came[:1] if again else came:  # the later ones have acted
        held[number](number, None)


@contextmanager
def termination_interrupts() -> Iterator[None]:
    """SIGTERM inside is as Ctrl-C, where it would end the process without a word."""
    if not _on_main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _on_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
