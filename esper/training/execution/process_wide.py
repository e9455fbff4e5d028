"""Settings of the whole process that work on one GPU changes for a moment.

PyTorch's mode of warning about synchronizing operations, the warning filters and the garbage collector belong to the
process, but every device has its own thread. So only one thread at a time changes them.
"""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

PROCESS_WIDE = threading.RLock()
"""Held by the thread that has changed a setting, until the setting is restored."""

WAITED = "called a synchronizing CUDA operation"
"""PyTorch's warning about an operation whose result the CPU waits for."""

PROTOTYPE = "Synchronization debug mode is a prototype feature"
"""PyTorch's warning when the mode is first set."""

OFF = 0
"""The sync debug mode that neither warns nor raises."""


def waits(work: Callable[[], object]) -> bool:
    """Does ``work`` and returns whether this thread waited for a GPU, as far as PyTorch reports.

    Warnings about other threads do not count, and are shown only if the user had turned the mode on.
    """
    watcher, waited = threading.get_ident(), False
    with PROCESS_WIDE, warnings.catch_warnings():
        before, show = torch.cuda.get_sync_debug_mode(), warnings.showwarning

        def note(message: Warning | str, *details: Any, **options: Any) -> None:
            nonlocal waited
            about_waiting = WAITED in str(message)
            waited |= about_waiting and threading.get_ident() == watcher
            if not about_waiting or before != OFF:
                show(message, *details, **options)

        warnings.filterwarnings("ignore", message=PROTOTYPE)
        warnings.filterwarnings("always", message=WAITED)
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return waited


@contextmanager
def without_collector() -> Iterator[None]:
    """Turns automatic garbage collection off: garbage may hold CUDA graphs, which a capture must not destroy."""
    with PROCESS_WIDE:
        enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if enabled:
                gc.enable()
