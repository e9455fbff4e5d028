"""A GPU's time for training is booked under "train", with timers of stated times in place of a GPU's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from esper.env import training_backend
from esper.env.training_backend import PhaseClock
from esper.telemetry import span
from esper.telemetry.span import Spans
from esper.training.host_trainer import HostTrainer
from tests.core_helpers import Rig, rig

CPU, FIRST, SECOND = (torch.device(name) for name in ("cpu", "cuda:0", "cuda:1"))


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


class StandIn:
    """A CUDATimer with given seconds of its device, which records its calls."""

    stated: dict[torch.device, float]
    log: list[str]

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __enter__(self) -> None:
        self.log.append(f"{self.device} begins")

    def __exit__(self, *_error: object) -> None:
        self.log.append(f"{self.device} ends")

    @property
    def seconds(self) -> float:
        self.log.append(f"{self.device} is read")
        return self.stated[self.device]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(span, "perf_counter", made)
    monkeypatch.setattr(training_backend, "perf_counter", made)
    monkeypatch.setattr(training_backend, "CUDATimer", StandIn)
    StandIn.stated, StandIn.log = {}, []
    return made


def steps(
    clock: Clock,
    spans: Spans,
    devices: list[torch.device],
    queue: float,
    wait: float,
    count: int = 1,
) -> None:
    time = PhaseClock(spans, devices)
    for _ in range(count):
        with spans("train"), time.queueing():
            clock.now += queue
        with spans("validate"):
            clock.now += wait
        time.move_gpu_seconds()


@pytest.mark.parametrize(
    ("seconds", "train", "validate"),
    [
        (5.0, 5.0, 4.0),  # 1 s to queue, 8 s of waiting, of which 4 were for training
        (1.0, 1.0, 8.0),  # done when the last step was queued
        (0.25, 1.0, 8.0),
        (100.0, 9.0, 0.0),  # never more than the wait that was measured
    ],
)
def test_the_wait_for_training_moves_to_the_training_phase(
    clock: Clock, seconds: float, train: float, validate: float
) -> None:
    StandIn.stated[FIRST] = seconds
    spans = Spans()
    steps(clock, spans, [FIRST], queue=1.0, wait=8.0)
    assert spans.seconds == {"train": train, "validate": validate}


def test_the_slowest_of_several_devices_counts(clock: Clock) -> None:
    StandIn.stated = {FIRST: 3.0, SECOND: 6.0}
    spans = Spans()
    steps(clock, spans, [FIRST, SECOND], queue=1.0, wait=8.0)
    assert spans.seconds == {"train": 6.0, "validate": 3.0}


def test_time_from_before_the_step_is_not_moved(clock: Clock) -> None:
    """Phases hold earlier steps and resets; a step moves at most its own wait."""
    StandIn.stated[FIRST] = 100.0
    spans = Spans()
    with spans("validate"):
        clock.now += 30.0
    steps(clock, spans, [FIRST], queue=1.0, wait=2.0, count=3)
    assert spans.seconds == {"validate": 30.0, "train": 9.0}


def test_nothing_is_timed_on_a_cpu(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans = Spans()
    monkeypatch.setattr(
        training_backend, "perf_counter", None
    )  # not even the clock is read
    steps(clock, spans, [CPU], queue=1.0, wait=8.0)
    assert spans.seconds == {"train": 1.0, "validate": 8.0}
    assert StandIn.log == []


@pytest.fixture
def on_a_gpu(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """An env in step, that seems to train on a GPU: 1 s to queue, 8 s of waiting."""

    def takes(
        seconds: float, name: str, inner: Callable[..., Any]
    ) -> Callable[..., Any]:
        def work(*arguments: Any) -> Any:
            StandIn.log.append(name)
            clock.now += seconds
            return inner(*arguments)

        return work

    with rig(n_envs=2) as world:
        world.env.backend.clock = PhaseClock(world.env.spans, [FIRST])
        world.env.backend.at_one_go = False  # as on a GPU
        monkeypatch.setattr(
            HostTrainer, "epoch", takes(1.0, "train", HostTrainer.epoch)
        )
        monkeypatch.setattr(
            training_backend,
            "_transfer",
            takes(8.0, "transfer", training_backend._transfer),
        )
        yield world


def test_a_step_reads_the_timer_after_its_transfer_and_keeps_the_sum(
    on_a_gpu: Rig, clock: Clock
) -> None:
    StandIn.stated[FIRST] = 5.0
    before, began = on_a_gpu.env.phase_seconds, clock.now
    StandIn.log.clear()
    on_a_gpu.step()
    spent = {
        name: now - before.get(name, 0.0)
        for name, now in on_a_gpu.env.phase_seconds.items()
    }
    assert StandIn.log == [
        "cuda:0 begins",
        "train",
        "cuda:0 ends",
        "transfer",
        "cuda:0 is read",
    ]
    assert (spent["train"], spent["validate"]) == (5.0, 4.0)
    assert sum(spent.values()) == clock.now - began == 9.0
