"""One intra-op thread for hosts and agents in this folder's tests, which Ctrl-C interrupts."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.core_helpers import one_thread

__all__ = ["one_thread"]


@pytest.fixture(autouse=True)
def signals_interrupt() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, as in a program of the command line."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
