"""Values that wandb and trackio receive; modules of the tests stand in for them."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from esper.telemetry.event import PracticeRound
from esper.telemetry.sinks.scalars import PRACTICE
from esper.telemetry.sinks.tracker import TrackerSink
from tests.telemetry.sample_events import ANOMALY, CLEANRL, END, a_run, write


class Library(ModuleType):
    """Stands in for a tracker and records its calls."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, Any]] = []

    def init(self, **settings: Any) -> Library:
        self.calls.append(("init", settings))
        return self

    def log(self, numbers: dict[str, float]) -> None:
        self.calls.append(("log", numbers))

    def finish(self) -> None:
        self.calls.append(("finish", None))

    def logged(self) -> list[dict[str, float]]:
        return [what for name, what in self.calls if name == "log"]


@pytest.fixture(params=["wandb", "trackio"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Library:
    found = Library(request.param)
    if request.param == "wandb":
        found.define_metric = lambda *_args, **_settings: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, request.param, found)
    return found


def test_scalars_are_sent_with_their_step(library: Library, tmp_path: Path) -> None:
    folder = tmp_path / "first"
    folder.mkdir()
    sink = TrackerSink(library.__name__, folder, "esper", {"run": {"seed": 3}})
    assert library.calls == []  # not before the first event
    write(sink, [PracticeRound(1, 1, 0.25), *a_run(1, 2), ANOMALY])
    (settings,) = [what for name, what in library.calls if name == "init"]
    assert settings["project"] == "esper"
    assert settings["config"] == {"run": {"seed": 3}}
    assert settings["resume"] == "allow"
    assert settings["name"].startswith("first")
    logged = library.logged()
    assert logged[0] == {PRACTICE: 0.25, "practice/round": 1}
    assert [row["global_step"] for row in logged[1:]] == [240, 240, 480, 480, 480]
    assert {tag for row in logged for tag in row} >= CLEANRL
    assert library.calls[-1] == ("finish", None)


def test_a_resumed_run_continues_its_tracker_run_and_sends_nothing_twice(
    library: Library, tmp_path: Path
) -> None:
    write(TrackerSink(library.__name__, tmp_path, "esper", {}), a_run(1, 2))
    before = len(library.logged())
    write(
        TrackerSink(library.__name__, tmp_path, "esper", {}, steps=240),
        [*a_run(2, 3), END],
    )
    after = library.logged()[before:]
    assert [row["global_step"] for row in after] == [
        720,
        720,
        720,
    ]  # round 2 was sent before
    assert "comparison/against_none" in after[-1]
    first, second = (what for name, what in library.calls if name == "init")
    assert (first.get("id"), first["name"]) == (second.get("id"), second["name"])
    kept = json.loads((tmp_path / f"{library.__name__}.json").read_text())
    assert kept["sent"][0] == 720
    assert not list(tmp_path.glob("*.part"))


def test_the_comparison_of_a_resumed_run_is_sent(
    library: Library, tmp_path: Path
) -> None:
    """The end of the run belongs to the same step as its last round."""
    write(TrackerSink(library.__name__, tmp_path, "esper", {}), a_run(1, 2))
    write(TrackerSink(library.__name__, tmp_path, "esper", {}, steps=480), [END])
    assert library.logged()[-1] == {"comparison/against_none": 2.5, "global_step": 480}


def test_a_run_of_the_user_is_logged_to_and_never_finished(
    library: Library, tmp_path: Path
) -> None:
    theirs = Library("theirs")
    if library.__name__ == "wandb":
        library.run = theirs  # type: ignore[attr-defined]
    else:
        current = SimpleNamespace(get=lambda: theirs)
        library.context_vars = SimpleNamespace(current_run=current)  # type: ignore[attr-defined]
    write(TrackerSink(library.__name__, tmp_path, "esper", {}), a_run(1, 2))
    assert library.calls == []
    assert [name for name, _ in theirs.calls] == ["log"] * len(theirs.logged())
    assert theirs.logged()[-1]["global_step"] == 480


def test_runs_of_the_same_name_are_different_tracker_runs(
    library: Library, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        (tmp_path / name / "run").mkdir(parents=True)
        write(
            TrackerSink(library.__name__, tmp_path / name / "run", "esper", {}),
            a_run(1, 1),
        )
    first, second = (what for name, what in library.calls if name == "init")
    assert (first.get("id"), first["name"]) != (second.get("id"), second["name"])


def test_an_unknown_tracker_is_refused_and_the_known_ones_are_listed(
    tmp_path: Path,
) -> None:
    with pytest.raises(ValueError, match="wandb, trackio"):
        TrackerSink("mlflow", tmp_path, "esper", {})


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_tracker_has_no_terminal_to_ask_in(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a terminal, both libraries raise an error instead of a question; the terminal is there again after it."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdin", terminal)

    def init(**_settings: Any) -> None:
        assert not sys.stdin.isatty()
        raise RuntimeError("No API key configured")

    monkeypatch.setattr(library, "init", init)
    with pytest.raises(RuntimeError, match="No API key"):
        write(TrackerSink(library.__name__, tmp_path, "esper", {}), a_run(1, 2))
    assert sys.stdin is terminal
