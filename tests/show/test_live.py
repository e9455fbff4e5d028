"""The progress below the lines of a run: its contents, and that it always restores the terminal."""

from __future__ import annotations

import io
import re
import sys
from typing import Any

import pytest
from rich.console import Console

from esper.show import live
from esper.show.console import ConsoleSink
from esper.show.live import LiveSink, progress, progress_sink
from esper.show.view import RunView
from esper.telemetry.event import (
    ArmPlayed,
    BaselineMeasured,
    GovernorRollback,
    RunCompleted,
)
from esper.telemetry.hub import TelemetryHub
from tests.show.page_helpers import viewed
from tests.telemetry.sample_events import completed, cut, epoch, started, updated

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
BACK = GovernorRollback(
    env=3,
    episode=11,
    epoch=17,
    reason="loss spike",
    value=8.5,
    threshold=4.25,
    restored_epoch=12,
    rollbacks=1,
)


def terminal(
    term: str = "xterm", force: bool | None = True, width: int = 100
) -> Console:
    return Console(
        file=io.StringIO(), force_terminal=force, width=width, _environ={"TERM": term}
    )


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def plain(text: str) -> list[str]:
    """Lines without colours and movements of the cursor."""
    return [
        line.strip()
        for line in CONTROL.sub("", text).replace("\r", "\n").splitlines()
        if line.strip()
    ]


def test_the_progress_tells_the_round_and_the_time_left() -> None:
    """All eight hosts have done 15 of 30 epochs in round 4 of 10."""
    begun = [started(rounds=10), completed(3)]
    shown = progress(viewed(*begun, *(epoch(env, 15, episode=3) for env in range(8))))
    assert shown.startswith("round 4/10  35%")
    assert "about 3m15s left" in shown  # a round took 30 s, 6.5 to come
    assert shown.endswith("\n")  # the echo of an interrupt has a line of its own
    assert "0s so far, estimating the rest" in progress(viewed(started(rounds=10)))


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every event redraws the picture."""
    monkeypatch.setattr(live, "REFRESH_SECONDS", 0.0)


def ended() -> RunCompleted:
    return RunCompleted("ppo", 16, (), 277, 700.0, 1.5, seconds=1.0)


@pytest.mark.usefixtures("eager")
def test_lasting_information_is_printed_above_the_progress() -> None:
    """The header, rollbacks, cut seeds, rounds and the comparison remain after the progress is removed."""
    console = terminal()
    sink = LiveSink(console)
    baseline = BaselineMeasured(8, (10.0, 82.5), (2.3, 0.6), 0.1)
    events = [
        started(),
        baseline,
        epoch(0, 5, r0c0="TRAINING"),
        BACK,
        cut(5),
        completed(1),
        ArmPlayed("none", 1, 2, 83),
    ]
    for event in [*events, ended()]:
        sink.handle(event)
    sink.close()
    lines = plain(written(console))
    for wanted in (
        "ppo will grow 96 hosts on digits: 12 rounds of 8, 30 epochs each",
        "baseline: 8 hosts left alone, final validation accuracy 82.5 %",
        "rollback: round 12, host 3, epoch 17: loss spike (8.5000, limit 4.2500), back to epoch 12",
        "seed cut: round 1, host 1, epoch 5: conv_light in r0c1 became non-finite",
        "comparing, round 1/2: none, test accuracy 83.0 %",
    ):
        assert wanted in lines
    assert any(
        line.startswith("round 1/10  test accuracy: grown 80.0 %  alone 83.5 %")
        for line in lines
    )
    assert any(
        "so far, estimating the rest" in line for line in lines
    )  # and drawn over


def test_the_progress_is_not_drawn_for_every_event() -> None:
    """Redrawing at each of hundreds of events per second would cost too much."""
    console = terminal()
    sink = LiveSink(console)
    sink.handle(started())
    sink.handle(epoch(0, 30, r0c0="TRAINING"))
    before = len(written(console))
    sink._drawn += 1000.0  # as if the next picture were due much later
    for number in range(200):
        sink.handle(epoch(0, number, r0c0="TRAINING"))
    assert len(written(console)) == before
    sink.handle(completed(1))  # the end of a round is always shown
    assert len(written(console)) > before
    sink.close()


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_the_terminal_is_given_back_when_the_run_breaks(
    error: type[BaseException],
) -> None:
    console, stdout, stderr = terminal(), sys.stdout, sys.stderr

    def run() -> None:
        with TelemetryHub([LiveSink(console)]) as hub:
            hub.emit(started())
            hub.emit(epoch(0, 1, r0c0="TRAINING"))
            assert sys.stdout is not stdout  # what others print goes above the picture
            raise error

    with pytest.raises(error):
        run()
    assert (sys.stdout, sys.stderr) == (stdout, stderr)
    text = written(console)
    assert text.count(HIDE) == text.count(SHOW) == 1
    assert text.rindex(SHOW) > text.rindex(HIDE)


@pytest.mark.usefixtures("eager")
def test_the_terminal_is_given_back_when_the_progress_breaks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def breaks(_view: RunView) -> Any:
        raise ZeroDivisionError

    console, stdout = terminal(), sys.stdout
    with TelemetryHub([LiveSink(console)]) as hub:
        hub.emit(started())
        monkeypatch.setattr(live, "progress", breaks)
        hub.emit(epoch(0, 1, r0c0="TRAINING"))
        assert list(hub.dropped) == ["LiveSink"]
        assert sys.stdout is stdout
    assert written(console).rindex(SHOW) > written(console).rindex(HIDE)


def test_a_sink_that_saw_nothing_can_be_closed() -> None:
    console = terminal()
    LiveSink(console).close()
    assert plain(written(console)) == []


@pytest.mark.parametrize(
    ("console", "kind"),
    [
        (terminal(), LiveSink),
        (terminal(term="dumb"), ConsoleSink),
        (terminal(force=None), ConsoleSink),
    ],
    ids=["terminal", "one that cannot redraw", "file"],
)
def test_the_progress_only_where_it_can_be_redrawn(
    console: Console, kind: type[ConsoleSink], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "TerminalConsole", lambda: console)
    sink = progress_sink()
    assert type(sink) is kind
    for event in (started(), updated(), completed(1), ended()):
        sink.handle(event)
    sink.close()
    assert any(
        line.startswith("round 1/10  test accuracy: grown")
        for line in plain(written(console))
    )
    assert ("\x1b" in written(console)) == (kind is LiveSink)
