"""TensorBoard's files, read back, and what an active run of wandb or trackio receives."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from esper.telemetry.event import RanksWaited
from esper.telemetry.sinks.trackers import (
    ActiveRunSink,
    Scalars,
    TensorBoardSink,
)
from tests.telemetry import sample_events as samples


def test_unmeasured_fields_have_no_scalar() -> None:
    event = samples.completed(1, test_accuracy=None, alone_test_accuracy=None)
    scalars = Scalars().of(event)
    assert "esper/committed_accuracy" in scalars
    assert not any("test_accuracy" in tag for tag in scalars)


def test_memory_and_ranks_have_scalars_of_their_places() -> None:
    used = {"allocated/cuda:0": 1024, "resident/cpu": 5}
    scalars = Scalars().of(samples.completed(1, memory=used))
    assert scalars["memory/allocated/cuda:0"] == 1024.0
    assert scalars["memory/resident/cpu"] == 5.0
    waited = RanksWaited(1, 4.0, (0.0, 1.0))
    assert Scalars().of(waited) == {"ranks/waited_0": 0.0, "ranks/waited_1": 0.25}


def test_need_and_gradients_are_means_over_the_epochs_of_a_round() -> None:
    scalars = Scalars()
    for number, need in enumerate((1.0, 3.0)):
        epoch = replace(
            samples.epoch(0, number),
            needs={"r2c0": need},
            gradients={"host": {"norm": 2 * need}, "r0c0": {"ratio": need}},
        )
        assert scalars.of(epoch) == {}
    found = scalars.of(samples.completed(1))
    assert found["need/r2c0"] == 2.0
    assert found["gradient_norm/host"] == 4.0
    assert found["gradient_ratio/r0c0"] == 2.0
    assert not any("need" in tag for tag in scalars.of(samples.completed(2)))


def test_accuracy_by_class_is_a_mean_over_the_hosts_of_a_round() -> None:
    scalars = Scalars()
    for of_host in ((50.0, math.nan), (70.0, math.nan), ()):
        assert scalars.of(replace(samples.EPISODE, class_accuracy=of_host)) == {}
    found = scalars.of(samples.completed(1))
    assert found["class_accuracy/0"] == 60.0
    assert "class_accuracy/1" not in found
    assert "class_accuracy/0" not in scalars.of(samples.completed(2))


# TensorBoard


def read(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder))
    found.Reload()
    return found


def points(found: EventAccumulator, tag: str) -> dict[int, float]:
    return {point.step: pytest.approx(point.value) for point in found.Scalars(tag)}


def test_tensorboard_has_the_names_of_cleanrl_over_env_steps(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path / "tensorboard", config="[run]\nseed = 3")
    samples.write(sink, [*samples.a_run(), samples.ANOMALY, samples.END])
    found = read(tmp_path / "tensorboard")
    assert set(found.Tags()["scalars"]) >= samples.CLEANRL
    growing = {
        "charts/episodic_return": (0.5, 1.0, 1.5),
        "esper/committed_accuracy": (81.0, 82.0, 83.0),
        "esper/rollbacks": (1.0, 2.0, 3.0),
    }
    same = {
        "charts/episodic_length": 30.0,
        "charts/SPS": 41.5,
        "charts/learning_rate": 5e-4,
        "losses/approx_kl": 0.0123,
        "losses/explained_variance": -0.5,
        "entropy/blueprint": 0.3,
    }
    for tag, values in growing.items():
        assert points(found, tag) == dict(zip((240, 480, 720), values, strict=True))
    for tag, value in same.items():
        assert points(found, tag) == dict.fromkeys((240, 480, 720), value)
    assert points(found, "anomaly/value_wrong") == {720: -3.0}
    assert points(found, "comparison/against_none") == {720: 2.5}
    assert len(found.Tags()["tensors"]) == 1  # the configuration


def test_tensorboard_shows_no_step_twice_after_a_resume(tmp_path: Path) -> None:
    """Round 2 was written; then the run resumed from its checkpoint after round 1 and played it differently."""
    folder = tmp_path / "tensorboard"
    samples.write(TensorBoardSink(folder), samples.a_run(1, 3))
    again = samples.completed(2, mean_return=7.0)
    samples.write(TensorBoardSink(folder, steps=240, resumed=True), [again])
    found = read(folder)
    assert points(found, "charts/episodic_return") == {240: 0.5, 480: 7.0}


def test_a_round_is_readable_during_the_run(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path / "tensorboard")
    assert not (tmp_path / "tensorboard").exists()  # not before the first event
    sink.handle(samples.completed(1))
    assert points(read(sink.folder), "charts/episodic_return") == {240: 0.5}
    sink.close()


def test_an_interrupted_run_writes_no_final_comparison(tmp_path: Path) -> None:
    """A controller that does not learn is compared when it is interrupted, too."""
    for number in (1, 2):
        before = 240 * (number - 1)
        sink = TensorBoardSink(tmp_path, steps=before, resumed=number > 1)
        samples.write(sink, [samples.completed(number, rounds=2), samples.END])
    assert points(read(tmp_path), "comparison/against_none") == {480: 2.5}


# wandb and trackio


class Library(ModuleType):
    """A library of trackers with an active run, which keeps what is logged to it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.logged: list[dict[str, float]] = []
        current = SimpleNamespace(log=self.logged.append)
        self.run: Any = current if name == "wandb" else None
        if name == "trackio":
            self.context_vars = SimpleNamespace(
                current_run=SimpleNamespace(get=lambda: current)
            )


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_scalars_are_logged_to_the_active_run_with_their_step(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Library(name)
    monkeypatch.setitem(sys.modules, name, library)
    events = [*samples.a_run(2, 3), samples.END]
    samples.write(ActiveRunSink(name, steps=240), events)
    rows = library.logged
    assert [row["global_step"] for row in rows] == [480, 480, 720, 720, 720]
    assert {tag for row in rows for tag in row} >= samples.CLEANRL
    assert rows[-1] == {"comparison/against_none": 2.5, "global_step": 720}


def test_without_an_active_run_it_is_said_how_to_begin_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = Library("wandb")
    library.run = None
    monkeypatch.setitem(sys.modules, "wandb", library)
    with pytest.raises(ValueError, match=r"call wandb.init\(\) first"):
        ActiveRunSink("wandb")
