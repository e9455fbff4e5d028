"""Runs with sinks that are slow, that fail, that are not there: none of them changes, slows or stops the run."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from esper.cli.run import closing_words
from esper.config import ConfigError, TrainingConfig
from esper.run import tracking
from esper.run.experiment import Experiment
from esper.telemetry.analytics import BlueprintAnalytics
from esper.telemetry.event import (
    AnomalyDetected,
    Event,
    PolicyUpdated,
    RoundCompleted,
    RunCompleted,
)
from tests.run.run_helpers import (
    Does,
    Recorder,
    learned_state,
    learning,
    play,
    round_ends,
    same_results,
    stable_log,
    stop,
    stopped,
    tiny,
)
from tests.selection import slow_except
from tests.telemetry.sample_events import CLEANRL
from tests.telemetry.test_trackers import Library


class BreaksAtTheThird:
    def __init__(self) -> None:
        self.seen = 0

    def handle(self, event: Event) -> None:
        self.seen += 1
        if self.seen == 3:
            raise OSError("the server is gone")

    def close(self) -> None:
        pass


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> dict[str, Library]:
    found = {name: Library(name) for name in ("wandb", "trackio")}
    for name, library in found.items():
        monkeypatch.setitem(sys.modules, name, library)
    return found


def tracked(config: TrainingConfig, *names: str, **track: Any) -> TrainingConfig:
    return config.with_values(track={"to": names, **track})


def steps(folder: Path, tag: str) -> list[int]:
    found = EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return [point.step for point in found.Scalars(tag)]


class Meddles(Recorder):
    """Draws random numbers, and fails in the end."""

    def handle(self, event: Event) -> None:
        torch.rand(3)
        np.random.rand(3)  # noqa: NPY002  the global generator
        if isinstance(event, RunCompleted):
            raise RuntimeError("the dashboard is gone")


@pytest.mark.trap(10)
@pytest.mark.parametrize("task", slow_except(["planted"], ["planted", "digits"]))
def test_no_sink_changes_a_learned_bit(
    task: str, tmp_path: Path, libraries: dict[str, Library]
) -> None:
    """A run with all sinks, among them ones that break and draw numbers, has the bits of a run without sinks."""
    config = learning(task)
    plain, bare = play(config, tmp_path / "plain")
    with_all = tracked(config, "tensorboard", "wandb", "trackio")
    more = [BreaksAtTheThird(), BlueprintAnalytics(), Meddles()]
    full, watched = play(with_all, tmp_path / "full", *more)
    assert learned_state(plain.folder) == learned_state(full.folder)
    assert bare.stable() == watched.stable()
    assert stable_log(plain.folder) == stable_log(full.folder)
    events = len(watched.events)
    lost = f"the server is gone; {events - 2} events not written"
    assert set(full.dropped_sinks) == {"BreaksAtTheThird", "Meddles"}
    assert full.dropped_sinks["BreaksAtTheThird"] == lost
    same_results(plain, dataclasses.replace(full, dropped_sinks={}))
    for library in libraries.values():
        assert {tag for row in library.logged for tag in row} >= CLEANRL
    words = closing_words(full, task)
    assert f"Telemetry lost: BreaksAtTheThird failed ({lost})." in words.splitlines()


def test_tensorboard_lies_in_the_run_folder(tmp_path: Path) -> None:
    config = tracked(learning("planted", n_envs=4), "tensorboard")
    summary, recorder = play(config, tmp_path / "r")
    updates = [
        event.env_steps for event in recorder.events if isinstance(event, PolicyUpdated)
    ]
    assert updates == [16, 32, 48]
    for tag in CLEANRL:
        assert steps(summary.folder, tag) == updates
    found = EventAccumulator(str(summary.folder / "tensorboard"))
    found.Reload()
    rounds = [event for event in recorder.events if isinstance(event, RoundCompleted)]
    reported = [point.value for point in found.Scalars("charts/episodic_return")]
    assert reported == pytest.approx([event.mean_return for event in rounds])


def test_a_controller_that_does_not_learn_has_charts_too(tmp_path: Path) -> None:
    summary, _ = play(
        tracked(tiny(task="planted", rounds=2), "tensorboard"), tmp_path / "r"
    )
    assert steps(summary.folder, "charts/episodic_return") == [8, 16]
    assert steps(summary.folder, "esper/test_accuracy") == [8, 16]


def test_a_killed_run_that_falls_back_to_its_checkpoint_shows_no_step_twice(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "r"
    config = tracked(
        learning("planted", checkpoint_every=5, evaluation_pairs=1),
        "tensorboard",
    )
    kept: list[bytes] = []
    first = Does(lambda event: True, lambda: None)
    keep = Does(
        round_ends(1), lambda: kept.append((folder / "checkpoint.pt").read_bytes())
    )
    play(config, folder, first, keep)
    (folder / "checkpoint.pt").write_bytes(kept[0])  # written before the first round
    Experiment.resume(folder).run()
    assert steps(folder, "charts/episodic_return") == [8, 16, 24]
    assert steps(folder, "comparison/against_none") == [24]


@pytest.mark.slow
def test_curves_cannot_continue_without_the_metrics_table(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    play(
        tracked(
            learning("planted", n_envs=4, evaluation_pairs=2),
            "tensorboard",
        ),
        folder,
        Does(round_ends(2), stop),
    )
    (folder / "metrics.csv").unlink()
    with pytest.raises(
        ConfigError,
        match="it is unknown at which step the trackers continue; restore the file, or",
    ):
        Experiment.resume(folder).run()
    (folder / "metrics.csv").write_text("")  # as the message advises
    assert Experiment.resume(folder).run().comparisons


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_tracker_that_is_not_installed_is_refused_before_anything_is_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        sys.modules, tracking.MODULES[name], None
    )  # which Python treats as not installed
    with pytest.raises(
        ConfigError, match=f"track.to names {name}, .* pip install {name}"
    ):
        Experiment(tracked(tiny(), name), tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_a_tracker_without_an_active_run_is_refused_before_anything_is_written(
    tmp_path: Path, libraries: dict[str, Library]
) -> None:
    libraries["wandb"].run = None
    with pytest.raises(ConfigError, match=r"call wandb.init\(\) in a Python program"):
        Experiment(tracked(tiny(), "wandb"), tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_without_trackers_nothing_of_them_is_imported_or_written(
    tmp_path: Path,
) -> None:
    summary, _ = play(tiny(task="planted"), tmp_path / "r")
    assert not (summary.folder / "tensorboard").exists()


# --- What became of blueprints


# --- Warnings about the agent


def test_a_run_that_learns_badly_warns_everywhere_and_does_not_change(
    tmp_path: Path,
) -> None:
    config = learning(
        "planted",
        n_envs=16,
        ppo={"learning_rate": 0.3, "update_epochs": 4, "n_minibatches": 4},
    )
    summary, recorder = play(config, tmp_path / "r")
    warned = [event for event in recorder.events if isinstance(event, AnomalyDetected)]
    assert {"ratio_collapsed"} <= {event.kind for event in warned}
    updates = {
        event.round: place
        for place, event in enumerate(recorder.events)
        if isinstance(event, PolicyUpdated)
    }
    assert all(updates[event.round] < recorder.events.index(event) for event in warned)
    log = [
        fields
        for fields in stable_log(summary.folder)
        if fields["event"] == "AnomalyDetected"
    ]
    assert [fields["advice"] for fields in log] == [event.advice for event in warned]

    deaf = config.with_values(
        anomaly={
            "ratio_high": 1e30,
            "ratio_low": 1e-300,
            "entropy": 0.0,
            "gradient_large": 1e30,
        }
    )
    quiet, unwarned = play(deaf, tmp_path / "quiet")
    assert not any(isinstance(event, AnomalyDetected) for event in unwarned.events)
    assert learned_state(quiet.folder) == learned_state(summary.folder)
    rest = [
        fields for fields in recorder.stable() if fields["event"] != "AnomalyDetected"
    ]
    assert rest == unwarned.stable()


def test_a_resumed_run_gives_the_warnings_that_it_would_have_given(
    tmp_path: Path,
) -> None:
    config = learning(
        "planted",
        n_envs=16,
        ppo={"learning_rate": 0.3, "update_epochs": 4, "n_minibatches": 4},
    )
    whole, recorder = play(config, tmp_path / "whole")
    assert any(isinstance(event, AnomalyDetected) for event in recorder.events)
    stopped(config, tmp_path / "r", 6)
    Experiment.resume(tmp_path / "r").run()
    assert stable_log(tmp_path / "r") == stable_log(whole.folder)
