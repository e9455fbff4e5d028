"""Sinks in the background never delay the run, and lost events are counted."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator

import pytest

from esper.telemetry.event import Event, SeedCut
from esper.telemetry.hub import TelemetryHub
from esper.telemetry.sink import EventsLost
from esper.telemetry.sinks.background import BackgroundSink
from tests.telemetry.sample_events import completed, cut

FOREVER = 60.0
"""Seconds until a test that hangs fails; nothing here waits for it."""


class Slow:
    """Handles nothing before ``go`` is set; raises at one epoch, or when it is closed, if asked."""

    def __init__(self, at_epoch: int | None = None, on_close: bool = False) -> None:
        self.go, self.inside = threading.Event(), threading.Event()
        self.at_epoch, self.on_close = at_epoch, on_close
        self.epochs: list[int] = []
        self.threads: set[int] = set()
        self.closed = 0

    def handle(self, event: Event) -> None:
        self.inside.set()
        assert self.go.wait(FOREVER)
        self.threads.add(threading.get_ident())
        assert isinstance(event, SeedCut)
        if event.epoch == self.at_epoch:
            raise OSError("the server is gone")
        self.epochs.append(event.epoch)

    def close(self) -> None:
        self.closed += 1
        self.threads.add(threading.get_ident())
        if self.on_close:
            raise OSError("cannot say goodbye")


class Ready(Slow):
    def __init__(self, at_epoch: int | None = None, on_close: bool = False) -> None:
        super().__init__(at_epoch, on_close)
        self.go.set()


@pytest.fixture
def slow() -> Iterator[Slow]:
    sink = Slow()
    yield sink
    sink.go.set()


def ended(sink: BackgroundSink) -> None:
    """Wait until the sink's thread has ended."""
    assert sink._thread is not None
    sink._thread.join(FOREVER)
    assert not sink._thread.is_alive()


def test_everything_comes_through_in_order_and_in_one_other_thread() -> None:
    inner = Ready()
    with TelemetryHub([BackgroundSink(inner, patience=FOREVER)]) as hub:
        for epoch in range(500):
            hub.emit(cut(epoch))
    assert inner.epochs == list(range(500))
    assert inner.closed == 1
    assert len(inner.threads) == 1
    assert threading.get_ident() not in inner.threads
    assert not hub.dropped


def test_a_hanging_sink_delays_nobody_and_is_reported(
    slow: Slow, caplog: pytest.LogCaptureFixture
) -> None:
    """It never returns; the run continues, ends, and reports the events that were not written."""
    other = Ready()
    with (
        caplog.at_level(logging.WARNING),
        TelemetryHub([BackgroundSink(slow, patience=0.01), other]) as hub,
    ):
        for epoch in range(100):
            hub.emit(cut(epoch))
        assert other.epochs == list(range(100))
    assert slow.epochs == []
    assert hub.dropped["Slow"].missed == 100
    assert (
        hub.dropped["Slow"].words()
        == "it had not finished 0.01 s after the end of the run; 100 events not written"
    )


def test_events_that_do_not_fit_in_the_queue_are_dropped_and_counted(
    slow: Slow, caplog: pytest.LogCaptureFixture
) -> None:
    background = BackgroundSink(slow, capacity=3, patience=FOREVER)
    hub = TelemetryHub([background])
    with caplog.at_level(logging.WARNING):
        hub.emit(cut(0))
        assert slow.inside.wait(FOREVER)  # it has taken the first, and stands
        for epoch in range(1, 10):
            hub.emit(cut(epoch))
        assert background.unwritten == 10
        slow.go.set()
        hub.close()
    assert slow.epochs == [0, 1, 2, 3]
    assert hub.dropped["Slow"].missed == 6
    assert (
        hub.dropped["Slow"].words()
        == "its queue of 3 events was full; 6 events not written"
    )
    assert (
        sum(
            "cannot keep up with the run" in record.getMessage()
            for record in caplog.records
        )
        == 1
    )


def test_a_sink_that_raises_at_the_third_event_is_dropped_with_the_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    inner, other = Ready(at_epoch=2), Ready()
    background = BackgroundSink(inner, patience=FOREVER)
    with caplog.at_level(logging.WARNING), TelemetryHub([background, other]) as hub:
        for epoch in range(3):
            hub.emit(cut(epoch))
        ended(background)
        assert not hub.dropped  # it is found out when it is used again
        for epoch in range(3, 10):
            hub.emit(cut(epoch))
        assert hub.dropped["Ready"].missed == 8
    assert inner.epochs == [0, 1]
    assert inner.closed == 1
    assert other.epochs == list(range(10))
    (lost,) = hub.dropped.values()
    assert lost.words() == "OSError: the server is gone; 8 events not written"
    assert isinstance(lost.error.__cause__, OSError)


def test_a_failure_in_the_last_events_is_found_when_it_is_closed() -> None:
    inner = Slow(at_epoch=2)
    background = BackgroundSink(inner, patience=FOREVER)
    for epoch in range(5):
        background.handle(cut(epoch))
    inner.go.set()
    with pytest.raises(EventsLost, match="the server is gone") as lost:
        background.close()
    assert lost.value.missed == 3
    background.close()  # does nothing


def test_a_sink_that_cannot_be_closed_is_reported_and_lost_nothing() -> None:
    with TelemetryHub([BackgroundSink(Ready(on_close=True), patience=FOREVER)]) as hub:
        hub.emit(cut(0))
    (lost,) = hub.dropped.values()
    assert lost.words() == "OSError: cannot say goodbye"


def test_a_library_that_wants_to_leave_ends_its_thread_only() -> None:
    class Leaves(Ready):
        def handle(self, event: Event) -> None:
            raise SystemExit("no licence")

    with TelemetryHub([BackgroundSink(Leaves(), patience=FOREVER)]) as hub:
        hub.emit(cut(0))
    assert (
        hub.dropped["Leaves"].words() == "SystemExit: no licence; 1 event not written"
    )


def test_kinds_that_mean_nothing_to_the_sink_take_no_room() -> None:
    inner = Ready()
    background = BackgroundSink(
        inner, capacity=1, patience=FOREVER, wants=frozenset({SeedCut})
    )
    for number in range(10):
        background.handle(completed(number))
    background.handle(cut(7))
    background.close()
    assert inner.epochs == [7]


def test_without_events_there_is_no_thread() -> None:
    before, inner = threading.active_count(), Ready()
    background = BackgroundSink(inner)
    background.close()
    assert inner.closed == 1
    assert inner.threads == {threading.get_ident()}
    assert threading.active_count() == before


def test_a_forked_child_writes_nothing_and_waits_for_nothing(
    slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the child, the thread does not exist, and its locks keep their state."""
    background = BackgroundSink(slow, capacity=1, patience=FOREVER)
    background.handle(cut(0))
    assert slow.inside.wait(FOREVER)
    parent = os.getpid()
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: parent + 1)
        for epoch in range(5):
            background.handle(cut(epoch))
        background.close()
    assert background.unwritten == 1
    slow.go.set()
    background.close()
    assert slow.epochs == [0]


def test_ctrl_c_while_one_is_waited_for_closes_the_others_first(
    slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Ready()
    background = BackgroundSink(slow, patience=FOREVER)
    hub = TelemetryHub([background, other])
    hub.emit(cut(0))

    def interrupted(_seconds: float) -> None:
        raise KeyboardInterrupt

    assert background._thread is not None
    monkeypatch.setattr(background._thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hub.close()
    assert other.closed == 1


@pytest.mark.parametrize(("capacity", "patience"), [(0, 1.0), (1, -1.0)])
def test_sizes_that_cannot_be_are_refused(capacity: int, patience: float) -> None:
    with pytest.raises(ValueError, match="must be at least 1 and patience at least 0"):
        BackgroundSink(Ready(), capacity, patience)


def test_an_inner_sink_gives_its_name() -> None:
    with TelemetryHub(
        [BackgroundSink(Ready(at_epoch=0), patience=FOREVER), Ready(at_epoch=0)]
    ) as hub:
        hub.emit(cut(0))
    assert set(hub.dropped) == {"Ready", "Ready#2"}
