"""CUDATimer on devices that are here and, by their calls, on devices that are not."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import pytest
import torch

from esper.telemetry import timer as module
from esper.telemetry.timer import CUDATimer


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens, in order; each call of the clock is one, and says 0, 1, 2, ... seconds."""
    calls: list[str] = []

    def clock() -> float:
        calls.append("clock")
        return float(calls.count("clock") - 1)

    monkeypatch.setattr(module, "perf_counter", clock)
    return calls


@pytest.mark.finding("L10")
def test_the_cpu_is_timed_by_the_clock(log: list[str]) -> None:
    timer = CUDATimer("cpu")
    with timer as entered:
        log.append("work")
    assert entered is timer
    assert log == ["clock", "work", "clock"]
    assert timer.seconds == timer.seconds == 1.0
    assert log == ["clock", "work", "clock"]


@pytest.mark.finding("L10")
def test_on_the_cpu_a_block_takes_what_lies_between_its_ends() -> None:
    """With the real clock, read inside and outside the block."""
    timer, x = CUDATimer(torch.device("cpu")), torch.ones(64, 64)
    before = perf_counter()
    with timer:
        begun = perf_counter()
        x.matmul(x)
        done = perf_counter()
    after = perf_counter()
    assert 0 < done - begun <= timer.seconds <= after - before


@pytest.mark.finding("L10")
def test_mps_waits_for_the_device_at_both_ends(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.mps, "synchronize", lambda: log.append("wait"))
    timer = CUDATimer("mps")
    with timer:
        log.append("work")
    assert log == ["wait", "clock", "work", "wait", "clock"]
    assert timer.seconds == 1.0
    assert log.count("wait") == 2


@pytest.mark.finding("L10")
def test_cuda_waits_only_when_it_is_read(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: str) -> None:
            log.append(f"record on {stream}")

        def synchronize(self) -> None:
            log.append("wait")

        def elapsed_time(self, end: Event) -> float:
            assert end is not self
            return 2500.0  # ms

    streams = {torch.device("cuda:1"): "stream of 1"}
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", streams.__getitem__)
    timer = CUDATimer("cuda:1")
    with timer:
        log.append("work")
    assert log == ["record on stream of 1", "work", "record on stream of 1"]
    assert timer.seconds == 2.5
    assert log[3:] == ["wait"]


def test_a_block_that_raises_is_timed_as_far_as_it_came(log: list[str]) -> None:
    timer = CUDATimer("cpu")

    def broken() -> None:
        with timer:
            raise OSError("torn")

    with pytest.raises(OSError, match="torn"):
        broken()
    assert timer.seconds == 1.0


def test_there_is_nothing_to_read_before_a_block_has_ended() -> None:
    timer = CUDATimer("cpu")
    with pytest.raises(RuntimeError, match="no block has ended"):
        _ = timer.seconds
    with timer:
        pass
    with timer, pytest.raises(RuntimeError, match="no block has ended"):
        _ = timer.seconds  # the time of the block before is not this one's
    assert timer.seconds >= 0


def test_a_timer_does_not_run_twice_at_once() -> None:
    timer: Any = CUDATimer("cpu")
    with timer, pytest.raises(RuntimeError, match="use a separate timer for a nested block"):
        timer.__enter__()
    assert timer.seconds >= 0


def test_other_devices_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="measures work on cuda, cpu, mps; not on meta"):
        CUDATimer("meta")
