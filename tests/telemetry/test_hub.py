"""The hub: routing, failing sinks, ownership."""

from __future__ import annotations

import logging
import threading
import warnings

import pytest

from esper.telemetry.event import Event, SeedCut
from esper.telemetry.hub import TelemetryHub


def event(epoch: int) -> SeedCut:
    return SeedCut(env=0, episode=0, epoch=epoch, slot="r0c0", blueprint="conv_light")


class Keeping:
    """Keeps the epochs of its events."""

    def __init__(self) -> None:
        self.epochs: list[int] = []
        self.closed = 0

    def handle(self, event: Event) -> None:
        assert isinstance(event, SeedCut)
        self.epochs.append(event.epoch)

    def close(self) -> None:
        self.closed += 1


class Failing(Keeping):
    """Raises at the event of one epoch, and on close if asked."""

    def __init__(self, at_epoch: int = -1, on_close: bool = False) -> None:
        super().__init__()
        self.at_epoch = at_epoch
        self.on_close = on_close

    def handle(self, event: Event) -> None:
        super().handle(event)
        if self.epochs[-1] == self.at_epoch:
            raise OSError("disk full")

    def close(self) -> None:
        super().close()
        if self.on_close:
            raise OSError("cannot flush")


def test_every_sink_gets_every_event_in_order() -> None:
    sinks = [Keeping(), Keeping()]
    with TelemetryHub(sinks) as hub:
        for epoch in range(5):
            hub.emit(event(epoch))
    assert [sink.epochs for sink in sinks] == [[0, 1, 2, 3, 4]] * 2
    assert [sink.closed for sink in sinks] == [1, 1]
    assert not hub.dropped


def test_a_failing_sink_is_dropped_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before, failing, after = Keeping(), Failing(at_epoch=2), Keeping()
    with (
        caplog.at_level(logging.WARNING),
        TelemetryHub([before, failing, after]) as hub,
    ):
        for epoch in range(5):
            hub.emit(event(epoch))
    assert before.epochs == after.epochs == [0, 1, 2, 3, 4]
    assert failing.epochs == [0, 1, 2]  # not asked again after it failed
    assert failing.closed == 1  # but closed, so that it lets go of its file
    dropped = hub.dropped["Failing"]
    assert isinstance(dropped.error, OSError)
    assert dropped.missed == 3  # epochs 2, 3 and 4
    assert [record.getMessage() for record in caplog.records] == [
        "telemetry sink Failing failed and was dropped: OSError: disk full"
    ]


def test_a_failing_sink_does_not_stop_a_run_that_turns_warnings_into_errors() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with TelemetryHub([Failing(at_epoch=0)]) as hub:
            hub.emit(event(0))
    assert list(hub.dropped) == ["Failing"]


def test_a_sink_that_fails_twice_is_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        caplog.at_level(logging.WARNING),
        TelemetryHub([Failing(at_epoch=0, on_close=True)]) as hub,
    ):
        hub.emit(event(0))
    assert len(caplog.records) == 1
    assert str(hub.dropped["Failing"].error) == "disk full"


def test_a_sink_that_fails_on_close_leaves_the_others_closed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    other = Keeping()
    hub = TelemetryHub([Failing(on_close=True), other])
    hub.emit(event(0))
    with caplog.at_level(logging.WARNING):
        hub.close()
    assert other.closed == 1
    assert hub.dropped["Failing"].missed == 0
    assert "cannot flush" in caplog.text


def test_sinks_of_one_class_have_names_of_their_own() -> None:
    with TelemetryHub(
        [Failing(at_epoch=9), Failing(at_epoch=1), Failing(at_epoch=0)]
    ) as hub:
        for epoch in range(3):
            hub.emit(event(epoch))
    assert {name: lost.missed for name, lost in hub.dropped.items()} == {
        "Failing#2": 2,
        "Failing#3": 3,
    }


def test_an_interrupt_is_not_a_failing_sink() -> None:
    class Interrupted(Keeping):
        def handle(self, event: Event) -> None:
            raise KeyboardInterrupt

    with TelemetryHub([Interrupted()]) as hub, pytest.raises(KeyboardInterrupt):
        hub.emit(event(0))
    assert not hub.dropped


def test_close_may_be_called_again_and_emit_may_not() -> None:
    sink = Keeping()
    hub = TelemetryHub([sink])
    hub.close()
    hub.close()
    assert sink.closed == 1
    with pytest.raises(RuntimeError, match="SeedCut cannot be emitted any more"):
        hub.emit(event(0))


@pytest.mark.finding("M17")
def test_events_come_from_the_owning_thread_only() -> None:
    sink = Keeping()
    hub = TelemetryHub([sink])
    errors: list[RuntimeError] = []

    def elsewhere() -> None:
        try:
            hub.emit(event(0))
        except RuntimeError as error:
            errors.append(error)
        try:
            hub.close()
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert ["thread" in str(error) for error in errors] == [True, True]
    assert sink.epochs == []
    assert sink.closed == 0
    hub.close()
