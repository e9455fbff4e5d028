"""TensorBoard's files, read back."""

from __future__ import annotations

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from esper.telemetry.event import PracticeRound
from esper.telemetry.sinks.scalars import PRACTICE
from esper.telemetry.sinks.tensorboard import TensorBoardSink
from tests.telemetry.sample_events import (
    ANOMALY,
    CLEANRL,
    END,
    a_run,
    completed,
    updated,
    write,
)


def read(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder))
    found.Reload()
    return found


def points(found: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    return [(point.step, pytest.approx(point.value)) for point in found.Scalars(tag)]


def test_tensorboard_has_the_names_of_cleanrl_over_env_steps(tmp_path: Path) -> None:
    write(
        TensorBoardSink(tmp_path / "tensorboard", config="[run]\nseed = 3"),
        [*a_run(), ANOMALY, END],
    )
    found = read(tmp_path / "tensorboard")
    tags = set(found.Tags()["scalars"])
    assert tags >= CLEANRL
    assert points(found, "charts/episodic_return") == [
        (240, 0.5),
        (480, 1.0),
        (720, 1.5),
    ]
    assert points(found, "charts/episodic_length") == [
        (240, 30.0),
        (480, 30.0),
        (720, 30.0),
    ]
    assert points(found, "charts/SPS") == [(240, 41.5), (480, 41.5), (720, 41.5)]
    assert points(found, "charts/learning_rate") == [
        (240, 5e-4),
        (480, 5e-4),
        (720, 5e-4),
    ]
    assert points(found, "losses/approx_kl") == [
        (240, 0.0123),
        (480, 0.0123),
        (720, 0.0123),
    ]
    assert points(found, "losses/explained_variance") == [
        (240, -0.5),
        (480, -0.5),
        (720, -0.5),
    ]
    assert points(found, "esper/committed_accuracy") == [
        (240, 81.0),
        (480, 82.0),
        (720, 83.0),
    ]
    assert points(found, "esper/fossils") == [(240, 1.5), (480, 1.5), (720, 1.5)]
    assert points(found, "esper/rollbacks") == [(240, 1.0), (480, 2.0), (720, 3.0)]
    assert points(found, "entropy/blueprint") == [(240, 0.3), (480, 0.3), (720, 0.3)]
    assert points(found, "anomaly/value_wrong") == [(720, -3.0)]
    assert points(found, "comparison/against_none") == [(720, 2.5)]
    assert len(found.Tags()["tensors"]) == 1  # the configuration


def test_tensorboard_shows_no_step_twice_after_a_resume(tmp_path: Path) -> None:
    """Round 2 was written; then the run resumed from its checkpoint after round 1 and played it differently."""
    folder = tmp_path / "tensorboard"
    write(
        TensorBoardSink(folder),
        [PracticeRound(n, 3, float(n)) for n in (1, 2, 3)] + a_run(1, 3),
    )
    again = [completed(2, mean_return=7.0), updated(round=2, env_steps=480)]
    write(TensorBoardSink(folder, steps=240, resumed=True), again)
    found = read(folder)
    assert points(found, "charts/episodic_return") == [(240, 0.5), (480, 7.0)]
    assert points(found, "losses/entropy") == [(240, 2.5), (480, 2.5)]
    assert points(read(folder / "practice"), PRACTICE) == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_tensorboard_writes_nothing_before_the_first_event(tmp_path: Path) -> None:
    TensorBoardSink(tmp_path / "tensorboard").close()
    assert not (tmp_path / "tensorboard").exists()


def test_a_round_is_readable_during_the_run(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.handle(completed(1))
    assert points(read(tmp_path), "charts/episodic_return") == [(240, 0.5)]
    sink.close()


def test_an_interrupted_run_writes_no_final_comparison(tmp_path: Path) -> None:
    begun = TensorBoardSink(tmp_path)
    for event in (
        completed(1, rounds=2),
        END,
    ):  # as emitted when a controller that does not learn is interrupted
        begun.handle(event)
    begun.close()
    resumed = TensorBoardSink(tmp_path, steps=completed(1).epochs, resumed=True)
    for event in (completed(2, rounds=2), END):
        resumed.handle(event)
    resumed.close()
    shown = EventAccumulator(str(tmp_path))
    shown.Reload()
    assert [point.step for point in shown.Scalars("comparison/against_none")] == [
        2 * completed(1).epochs
    ]
