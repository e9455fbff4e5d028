"""TensorBoard's files read back, and what is said to wandb and trackio, for which modules of the tests stand in."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from esper.telemetry.event import AnomalyDetected, Comparison, Event, PracticeRound, RunCompleted
from esper.telemetry.sinks.scalars import KINDS, PRACTICE, Scalars
from esper.telemetry.sinks.tensorboard import TensorBoardSink
from esper.telemetry.sinks.tracker import TrackerSink
from tests.telemetry.sample_events import completed, cut, updated

CLEANRL = {
    "charts/episodic_return",
    "charts/episodic_length",
    "charts/learning_rate",
    "charts/SPS",
    "losses/value_loss",
    "losses/policy_loss",
    "losses/entropy",
    "losses/approx_kl",
    "losses/clipfrac",
    "losses/explained_variance",
}
ANOMALY = AnomalyDetected(2, "value_wrong", None, -3.0, -1.0, "off", "lower it")
END = RunCompleted("ppo", 4, (Comparison("none", 85.0, 82.5, 2.5, 1.0, 4.0, 0.01, "better"),), 277, 300.0, 1.0, 9.0)


def a_run(first: int = 1, last: int = 3) -> list[Event]:
    """Rounds of 240 env steps each, with an update after each."""
    events: list[Event] = []
    for number in range(first, last + 1):
        events += [cut(number), completed(number, rounds=last), updated(round=number, env_steps=240 * number)]
    return events


def read(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder))
    found.Reload()
    return found


def points(found: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    return [(point.step, pytest.approx(point.value)) for point in found.Scalars(tag)]


def write(sink: Any, events: list[Event]) -> None:
    for event in events:
        sink.handle(event)
    sink.close()


def test_tensorboard_has_the_names_of_cleanrl_over_env_steps(tmp_path: Path) -> None:
    write(TensorBoardSink(tmp_path / "tensorboard", config="[run]\nseed = 3"), [*a_run(), ANOMALY, END])
    found = read(tmp_path / "tensorboard")
    tags = set(found.Tags()["scalars"])
    assert tags >= CLEANRL
    assert points(found, "charts/episodic_return") == [(240, 0.5), (480, 1.0), (720, 1.5)]
    assert points(found, "charts/episodic_length") == [(240, 30.0), (480, 30.0), (720, 30.0)]
    assert points(found, "charts/SPS") == [(240, 41.5), (480, 41.5), (720, 41.5)]
    assert points(found, "charts/learning_rate") == [(240, 5e-4), (480, 5e-4), (720, 5e-4)]
    assert points(found, "losses/approx_kl") == [(240, 0.0123), (480, 0.0123), (720, 0.0123)]
    assert points(found, "losses/explained_variance") == [(240, -0.5), (480, -0.5), (720, -0.5)]
    assert points(found, "esper/committed_accuracy") == [(240, 81.0), (480, 82.0), (720, 83.0)]
    assert points(found, "esper/fossils") == [(240, 1.5), (480, 1.5), (720, 1.5)]
    assert points(found, "esper/rollbacks") == [(240, 1.0), (480, 2.0), (720, 3.0)]
    assert points(found, "entropy/blueprint") == [(240, 0.3), (480, 0.3), (720, 0.3)]
    assert points(found, "anomaly/value_wrong") == [(720, -3.0)]
    assert points(found, "comparison/against_none") == [(720, 2.5)]
    assert len(found.Tags()["tensors"]) == 1  # the configuration


def test_tensorboard_shows_no_step_twice_after_a_resume(tmp_path: Path) -> None:
    """Round 2 was written, then the run fell back to its checkpoint after round 1 and did it again, otherwise."""
    folder = tmp_path / "tensorboard"
    write(TensorBoardSink(folder), [PracticeRound(n, 3, float(n)) for n in (1, 2, 3)] + a_run(1, 3))
    again = [completed(2, mean_return=7.0), updated(round=2, env_steps=480)]
    write(TensorBoardSink(folder, steps=240, resumed=True), again)
    found = read(folder)
    assert points(found, "charts/episodic_return") == [(240, 0.5), (480, 7.0)]
    assert points(found, "losses/entropy") == [(240, 2.5), (480, 2.5)]
    assert points(read(folder / "practice"), PRACTICE) == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_tensorboard_writes_nothing_before_the_first_event(tmp_path: Path) -> None:
    TensorBoardSink(tmp_path / "tensorboard").close()
    assert not (tmp_path / "tensorboard").exists()


def test_a_round_is_readable_while_the_run_goes_on(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.handle(completed(1))
    assert points(read(tmp_path), "charts/episodic_return") == [(240, 0.5)]
    sink.close()


def test_what_was_not_measured_is_no_number() -> None:
    told = Scalars().of(completed(1, test_accuracy=None, alone_test_accuracy=None))
    assert "esper/committed_accuracy" in told
    assert not any("test_accuracy" in tag for tag in told)


def test_memory_has_a_number_for_each_kind_and_place() -> None:
    told = Scalars().of(completed(1, memory={"allocated/cuda:0": 1024, "resident/cpu": 5}))
    assert {tag: value for tag, value in told.items() if tag.startswith("memory/")} == {
        "memory/allocated/cuda:0": 1024.0,
        "memory/resident/cpu": 5.0,
    }


def test_every_kind_that_is_wanted_has_numbers() -> None:
    samples: list[Event] = [completed(1), updated(), PracticeRound(1, 2, 0.5), ANOMALY, END]
    assert {type(event) for event in samples} == KINDS
    assert all(Scalars().of(event) for event in samples if not isinstance(event, PracticeRound))


# --- wandb and trackio


class Library(ModuleType):
    """Stands in for a tracker: remembers what it is told."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.told: list[tuple[str, Any]] = []

    def init(self, **settings: Any) -> None:
        self.told.append(("init", settings))

    def log(self, numbers: dict[str, float]) -> None:
        self.told.append(("log", numbers))

    def finish(self) -> None:
        self.told.append(("finish", None))

    def logged(self) -> list[dict[str, float]]:
        return [what for name, what in self.told if name == "log"]


@pytest.fixture(params=["wandb", "trackio"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Library:
    found = Library(request.param)
    if request.param == "wandb":
        found.define_metric = lambda *_args, **_settings: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, request.param, found)
    return found


def test_a_tracker_is_told_the_numbers_with_their_step(library: Library, tmp_path: Path) -> None:
    folder = tmp_path / "first"
    folder.mkdir()
    sink = TrackerSink(library.__name__, folder, "esper", {"run": {"seed": 3}})
    assert library.told == []  # not before there is something to tell
    write(sink, [PracticeRound(1, 1, 0.25), *a_run(1, 2), ANOMALY])
    (settings,) = [what for name, what in library.told if name == "init"]
    assert settings["project"] == "esper"
    assert settings["config"] == {"run": {"seed": 3}}
    assert settings["resume"] == "allow"
    assert settings["name"].startswith("first")
    logged = library.logged()
    assert logged[0] == {PRACTICE: 0.25, "practice/round": 1}
    assert [row["global_step"] for row in logged[1:]] == [240, 240, 480, 480, 480]
    assert {tag for row in logged for tag in row} >= CLEANRL
    assert library.told[-1] == ("finish", None)


def test_a_tracker_goes_on_as_the_same_run_and_is_told_nothing_twice(library: Library, tmp_path: Path) -> None:
    write(TrackerSink(library.__name__, tmp_path, "esper", {}), a_run(1, 2))
    before = len(library.logged())
    write(TrackerSink(library.__name__, tmp_path, "esper", {}, steps=240), [*a_run(2, 3), END])
    after = library.logged()[before:]
    assert [row["global_step"] for row in after] == [720, 720, 720]  # round 2 was sent before
    assert "comparison/against_none" in after[-1]
    first, second = (what for name, what in library.told if name == "init")
    assert (first.get("id"), first["name"]) == (second.get("id"), second["name"])
    kept = json.loads((tmp_path / f"{library.__name__}.json").read_text())
    assert kept["sent"][0] == 720
    assert not list(tmp_path.glob("*.part"))


def test_an_interrupted_comparison_is_still_told(library: Library, tmp_path: Path) -> None:
    """The end of the run belongs to the same step as its last round."""
    write(TrackerSink(library.__name__, tmp_path, "esper", {}), a_run(1, 2))
    write(TrackerSink(library.__name__, tmp_path, "esper", {}, steps=480), [END])
    assert library.logged()[-1] == {"comparison/against_none": 2.5, "global_step": 480}


def test_two_runs_are_two_in_a_tracker(library: Library, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name / "run").mkdir(parents=True)
        write(TrackerSink(library.__name__, tmp_path / name / "run", "esper", {}), a_run(1, 1))
    first, second = (what for name, what in library.told if name == "init")
    assert (first.get("id"), first["name"]) != (second.get("id"), second["name"])


def test_an_unknown_tracker_is_refused_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="wandb, trackio"):
        TrackerSink("mlflow", tmp_path, "esper", {})


def test_a_run_that_was_cut_short_has_no_comparison_that_it_ends_with(tmp_path: Path) -> None:
    begun = TensorBoardSink(tmp_path)
    for event in (completed(1, rounds=2), END):  # what a controller that does not learn tells when it is interrupted
        begun.handle(event)
    begun.close()
    resumed = TensorBoardSink(tmp_path, steps=completed(1).epochs, resumed=True)
    for event in (completed(2, rounds=2), END):
        resumed.handle(event)
    resumed.close()
    shown = EventAccumulator(str(tmp_path))
    shown.Reload()
    assert [point.step for point in shown.Scalars("comparison/against_none")] == [2 * completed(1).epochs]
