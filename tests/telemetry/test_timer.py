"""CUDATimer on the CPU and, with recorded calls, on other devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from esper.telemetry import timer as module
from esper.telemetry.timer import CUDATimer


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls in order; the clock is one of them, and returns 0, 1, 2, ... seconds."""
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
def test_mps_waits_for_the_device_at_both_ends(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.mps, "synchronize", lambda: log.append("wait"))
    timer = CUDATimer("mps")
    with timer:
        log.append("work")
    assert log == ["wait", "clock", "work", "wait", "clock"]
    assert timer.seconds == 1.0
    assert log.count("wait") == 2, "reading does not wait again"


class Gpus:
    """Streams of several GPUs, each with a clock in ms that work moves; events of torch.cuda on them."""

    def __init__(self) -> None:
        self.clocks = {torch.device("cuda:0"): 100.0, torch.device("cuda:1"): 7.0}
        self.waits: list[float] = []
        """Times of events that were waited for."""

    def event(self, enable_timing: bool) -> Event:
        assert enable_timing
        return Event(self)


class Event:
    """See torch.cuda.Event: it is recorded once, and can be read only after it was waited for."""

    def __init__(self, gpus: Gpus) -> None:
        self.gpus = gpus
        self.time: float | None = None

    def record(self, stream: torch.device) -> None:
        assert self.time is None
        self.time = self.gpus.clocks[stream]

    def synchronize(self) -> None:
        assert self.time is not None
        self.gpus.waits.append(self.time)

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds between two events that the device has passed."""
        assert self.time is not None
        assert end.time is not None
        assert max(self.time, end.time) <= max(self.gpus.waits), "not ready"
        return end.time - self.time


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    gpus = Gpus()
    monkeypatch.setattr(torch.cuda, "Event", gpus.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    return gpus


@pytest.mark.finding("L10")
def test_cuda_measures_the_work_between_two_events_of_its_device_and_waits_only_when_read(
    gpus: Gpus,
) -> None:
    device, other = torch.device("cuda:1"), torch.device("cuda:0")
    timer = CUDATimer("cuda:1")
    gpus.clocks[device] += 50
    for took in (2500.0, 40.0):
        with timer:
            gpus.clocks[device] += took
            gpus.clocks[other] += 9999
        gpus.clocks[device] += 10_000  # work after the block
        assert gpus.waits == [] or took == 40.0
        assert timer.seconds == pytest.approx(took / 1000)
        assert timer.seconds == pytest.approx(took / 1000)
    assert gpus.waits[0] == 7 + 50 + 2500


def test_a_block_that_raises_is_timed_as_far_as_it_came(log: list[str]) -> None:
    timer = CUDATimer("cpu")

    def broken() -> None:
        with timer:
            raise OSError("torn")

    with pytest.raises(OSError, match="torn"):
        broken()
    assert timer.seconds == 1.0


def test_reading_before_a_block_has_ended_raises() -> None:
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
    with (
        timer,
        pytest.raises(RuntimeError, match="use a separate timer for a nested block"),
    ):
        timer.__enter__()
    assert timer.seconds >= 0


def test_other_devices_are_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match="measures work on cuda, cpu, mps; not on meta"
    ):
        CUDATimer("meta")
