"""Two threads, each with a device of its own, that need the same settings of the process."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from esper.training.execution.gpu import Gpu

waits = object.__new__(Gpu).waits  # no device is needed to watch for waits

A_WHILE = 0.1
"""Seconds that a thread waits for the other to come beside it, which must not happen."""


class SyncMode:
    """The sync debug mode of torch.cuda: one for the process, and a thread that waits is warned on itself."""

    def __init__(self) -> None:
        self.mode = 0

    def get(self) -> int:
        return self.mode

    def set(self, mode: int | str) -> None:
        self.mode = (
            {"default": 0, "warn": 1, "error": 2}[mode]
            if isinstance(mode, str)
            else mode
        )
        if self.mode:
            warnings.warn(
                "Synchronization debug mode is a prototype feature and does not yet detect all",
                stacklevel=1,
            )

    def wait(self) -> None:
        """Waits as .item() of a tensor on a GPU does."""
        assert self.mode != 2
        if self.mode == 1:
            warnings.warn(
                "called a synchronizing CUDA operation (Triggered internally at a.cpp:1.)",
                stacklevel=1,
            )


@pytest.fixture
def sync(monkeypatch: pytest.MonkeyPatch) -> SyncMode:
    mode = SyncMode()
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", mode.get)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", mode.set)
    return mode


def side_by_side(
    first: Callable[[], bool], second: Callable[[], bool]
) -> tuple[bool, bool]:
    with ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(first), threads.submit(second)]
        return futures[0].result(20), futures[1].result(20)


@pytest.mark.parametrize("waiting", [0, 1])
def test_each_of_two_devices_has_its_own_verdict_and_the_mode_is_put_back(
    sync: SyncMode, waiting: int
) -> None:
    """Without turns, the second begins while the first is inside, and ends after it."""
    inside, left = [threading.Event(), threading.Event()], threading.Event()

    def first() -> None:
        inside[0].set()
        inside[1].wait(A_WHILE)
        if waiting == 0:
            sync.wait()

    def second() -> None:
        inside[1].set()
        left.wait(A_WHILE)
        if waiting == 1:
            sync.wait()

    def watch_first() -> bool:
        found = waits(first)
        left.set()
        return found

    def watch_second() -> bool:
        assert inside[0].wait(20)
        return waits(second)

    assert side_by_side(watch_first, watch_second) == (waiting == 0, waiting == 1)
    assert sync.mode == 0


def test_waits_of_another_thread_are_not_counted(sync: SyncMode) -> None:
    watched, waited = threading.Event(), threading.Event()

    def watch() -> bool:
        return waits(lambda: (watched.set(), waited.wait(20)))

    def wait_beside() -> bool:
        assert watched.wait(20)
        sync.wait()
        waited.set()
        return True

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert side_by_side(watch, wait_beside) == (False, True)
    assert [str(warning.message) for warning in seen] == []


def test_other_warnings_reach_the_user_and_filters_are_put_back(sync: SyncMode) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        before, show = warnings.filters[:], warnings.showwarning
        assert waits(
            lambda: (warnings.warn("of the network", stacklevel=1), sync.wait())
        )
        assert (warnings.filters, warnings.showwarning) == (before, show)
    assert [str(warning.message) for warning in seen] == ["of the network"]


def test_a_user_who_asked_for_warnings_has_them(sync: SyncMode) -> None:
    sync.mode = 1
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert waits(sync.wait)
    assert len(seen) == 1
    assert sync.mode == 1
