"""Phase spans: nested time is counted once, and profilers see the names if marks are on."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from esper.telemetry import span
from esper.telemetry.span import Spans


class Clock:
    """A clock that moves only when set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    made = Clock()
    monkeypatch.setattr(span, "perf_counter", made)
    return made


def test_seconds_add_up_by_phase(clock: Clock) -> None:
    spans = Spans()
    for seconds in (1.0, 2.0):
        with spans("train"):
            clock.now += seconds
        clock.now += 50.0  # between spans: nobody's
    with spans("govern"):
        clock.now += 0.5
    assert spans.seconds == {"train": 3.0, "govern": 0.5}


def test_the_time_of_an_inner_span_is_not_counted_twice(clock: Clock) -> None:
    spans = Spans()
    with spans("train"):
        clock.now += 1.0
        with spans("stage"):
            clock.now += 10.0
            with spans("telemetry"):
                clock.now += 100.0
            clock.now += 20.0
        clock.now += 2.0
    assert spans.seconds == {"train": 3.0, "stage": 30.0, "telemetry": 100.0}


def test_a_span_within_one_of_the_same_name_counts_once(clock: Clock) -> None:
    spans = Spans()
    with spans("telemetry"):
        clock.now += 1.0
        with spans("telemetry"):
            clock.now += 2.0
        clock.now += 4.0
    assert spans.seconds == {"telemetry": 7.0}


def test_a_block_that_raises_is_counted_and_closed(clock: Clock) -> None:
    spans = Spans()

    def broken() -> None:
        with spans("train"), spans("stage"):
            clock.now += 2.0
            raise OSError("torn")

    with pytest.raises(OSError, match="torn"):
        broken()
    clock.now += 50.0
    with spans("govern"):
        clock.now += 1.0
    assert spans.seconds == {"train": 0.0, "stage": 2.0, "govern": 1.0}


def test_seconds_that_move_to_another_phase_leave_the_sum_as_it_is(
    clock: Clock,
) -> None:
    spans = Spans()
    with spans("validate"):
        clock.now += 5.0
    spans.move("validate", "train", 2.0)
    assert spans.seconds == {"validate": 3.0, "train": 2.0}
    spans.move("validate", "train", 3.0)
    assert spans.seconds == {"validate": 0.0, "train": 5.0}
    spans.move("govern", "update", 0.0)  # nothing moves, and no phase appears
    assert set(spans.seconds) == {"validate", "train"}


@pytest.mark.parametrize("seconds", [-0.5, 5.5, float("nan")])
def test_no_more_seconds_move_than_a_phase_has(clock: Clock, seconds: float) -> None:
    spans = Spans()
    with spans("validate"):
        clock.now += 5.0
    with pytest.raises(
        ValueError, match=r"cannot move .* s from validate to train: validate has 5.0 s"
    ):
        spans.move("validate", "train", seconds)
    with pytest.raises(ValueError, match="unknown phase 'lunch'"):
        spans.move("validate", "lunch", 1.0)
    assert spans.seconds == {"validate": 5.0}


def test_an_unknown_phase_lists_the_known_ones() -> None:
    with pytest.raises(
        ValueError,
        match=r"unknown phase 'lunch'; known: act, stage, train, .*telemetry",
    ):
        Spans()("lunch")


def test_another_thread_is_refused_while_a_span_is_open() -> None:
    spans, errors = Spans(), []

    def open_span() -> None:
        try:
            with spans("stage"):
                pass
        except RuntimeError as error:
            errors.append(str(error))

    def in_a_thread() -> None:
        thread = threading.Thread(target=open_span)
        thread.start()
        thread.join()

    with spans("train"):
        in_a_thread()
    assert errors == [
        "phase stage began in a different thread than the open phase train"
    ]
    in_a_thread()  # nothing is open: the object was handed on
    assert len(errors) == 1
    assert set(spans.seconds) == {"train", "stage"}


def ranges_of(spans: Spans) -> list[str]:
    """Names of Esper's ranges in a trace of two nested spans."""
    with (
        profile(activities=[ProfilerActivity.CPU]) as trace,
        spans("train"),
        spans("stage"),
    ):
        torch.ones(2).add_(1)
    return sorted(
        event.name for event in trace.events() if event.name.startswith("esper/")
    )


def test_a_trace_has_the_phases_when_they_are_asked_for() -> None:
    assert ranges_of(Spans(marks=True)) == ["esper/stage", "esper/train"]
    assert ranges_of(Spans()) == []


def test_with_cuda_the_phases_are_nvtx_ranges_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(
        torch.cuda.nvtx, "range_push", lambda name: told.append(f"push {name}")
    )
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: told.append("pop"))
    spans = Spans(marks=True)
    with spans("train"), spans("stage"):
        told.append("work")
    assert told == ["push esper/train", "push esper/stage", "work", "pop", "pop"]
    spans.marks = False
    with spans("train"):
        pass
    assert len(told) == 5
