"""Small runs for tests, sinks that record or break them, and comparisons of two runs."""

from __future__ import annotations

import csv
import dataclasses
import functools
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from esper.config import TrainingConfig
from esper.env.slot_env import SlotVectorEnv
from esper.files import checkpoint
from esper.run.experiment import Experiment
from esper.run.telemetry import RunSummary
from esper.telemetry import event as events
from esper.telemetry.event import EpochCompleted, Event, RoundCompleted
from esper.telemetry.hub import Sink
from esper.telemetry.record import stable_record
from esper.training.host_training import HostTraining
from tests.telemetry.sample_events import read_events

CLOCKS = {"seconds", "epochs_per_second", "images_per_second"}


GATES = {
    "min_training_epochs": 1,
    "min_gradient_health": 0.0,
    "trial_standard_errors": 1000.0,
}


def task_of(name: str) -> dict[str, Any]:
    """Hosts train on 128 images an epoch unless they are simulated."""
    return (
        {"name": name}
        if name == "planted"
        else {"name": name, "samples_per_epoch": 128}
    )


def tiny(
    controller: str = "random", task: str = "digits", **run: Any
) -> TrainingConfig:
    """Two hosts of four epochs for a controller that does not learn."""
    return TrainingConfig.parse(
        {
            "run": {"rounds": 1, "controller": controller, **run},
            "task": task_of(task),
            "env": {"n_envs": 2, "episode_length": 4, "baseline_episodes": 1},
        }
    )


def learning(
    task: str = "digits", n_envs: int = 2, ppo: dict[str, Any] | None = None, **run: Any
) -> TrainingConfig:
    """A small agent that learns for three rounds from hosts of four epochs; not compared unless
    ``run`` says so."""
    return TrainingConfig.parse(
        {
            "run": {"rounds": 3, "evaluation_pairs": 0, "seed": 7, **run},
            "task": task_of(task),
            "env": {"n_envs": n_envs, "episode_length": 4, "baseline_episodes": 1},
            "ppo": {
                "width": 16,
                "update_epochs": 2,
                "n_minibatches": 1,
                **(ppo or {}),
            },
        }
    )


def growing(config: TrainingConfig) -> TrainingConfig:
    """The config with seeds that reach late stages in few epochs."""
    return config.with_values(env={"episode_length": 6, "gates": GATES, "embargo": 1})


class Recorder:
    """Keeps every event."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.closed = 0

    def handle(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        self.closed += 1

    def stable(self) -> list[dict[str, Any]]:
        return [stable_record(event) for event in self.events]


class Does(Recorder):
    """Acts at the first event that fits, before it is kept."""

    def __init__(self, when: Callable[[Event], bool], what: Callable[[], Any]) -> None:
        super().__init__()
        self.when, self.what, self.did = when, what, False

    def handle(self, event: Event) -> None:
        if not self.did and self.when(event):
            self.did = True
            self.what()
        super().handle(event)


def births(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """(run seed, env, episode) of every host that begins an episode from now on."""
    born: list[tuple[int, int, int]] = []
    reset = HostTraining.reset

    def watching(training: HostTraining, run_seed: int, episode: int) -> None:
        born.append((run_seed, training.index, episode))
        reset(training, run_seed, episode)

    monkeypatch.setattr(HostTraining, "reset", watching)
    return born


def stop() -> None:
    """Sends a Ctrl-C to this process."""
    raise KeyboardInterrupt


def round_ends(number: int) -> Callable[[Event], bool]:
    return lambda event: isinstance(event, RoundCompleted) and event.round == number


def within_round(number: int) -> Callable[[Event], bool]:
    """An event in the second epoch of a round, counted from 1."""
    return lambda event: (
        isinstance(event, EpochCompleted)
        and event.episode == number - 1
        and event.epoch == 2
    )


def of_kind(recorder: Recorder, kind: type[Event]) -> list[Any]:
    return [event for event in recorder.events if isinstance(event, kind)]


def play(
    config: TrainingConfig, folder: Path, *more: Sink
) -> tuple[RunSummary, Recorder]:
    recorder = Recorder()
    return Experiment(config, folder, [recorder, *more]).run(), recorder


def kinds(folder: Path) -> list[str]:
    """Names of the logged events."""
    return [fields["event"] for fields in read_events(folder / "events.jsonl")]


def stable_log(folder: Path) -> list[dict[str, Any]]:
    """The logged events without clock times and paths; that a run was resumed, or ranks waited, is left out."""
    found = []
    for fields in read_events(folder / "events.jsonl"):
        kind = getattr(events, fields["event"])
        clocks = {
            field.name
            for field in dataclasses.fields(kind)
            if "volatile" in field.metadata
        }
        # A resumed run names its score again.
        if fields["event"] not in ("RunResumed", "RanksWaited", "ScoreDefined"):
            found.append(
                {name: value for name, value in fields.items() if name not in clocks}
            )
    return found


def metrics(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def stable_metrics(folder: Path) -> list[dict[str, str]]:
    """The metrics table without the columns of clocks and memory."""
    return [
        {
            name: cell
            for name, cell in row.items()
            if name not in CLOCKS and not name.startswith(("phase/", "memory/"))
        }
        for row in metrics(folder)
    ]


def flat(value: Any, place: str = "") -> dict[str, Any]:
    """Nested dicts and lists as one dict by path; tensors as their bytes, and NaN as a word: it is not equal to
    itself."""
    if isinstance(value, torch.Tensor):
        return {
            place: (
                value.dtype,
                tuple(value.shape),
                value.contiguous().numpy().tobytes(),
            )
        }
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, list | tuple):
        parts = enumerate(value)  # type: ignore[assignment]
    else:
        return {place: "nan" if value != value else value}
    return {
        path: leaf
        for key, part in parts
        for path, leaf in flat(part, f"{place}/{key}").items()
    }


def assert_same_bits(one: list[Any], other: list[Any]) -> None:
    """Arrays and the leaves of :func:`flat`, one after the other."""
    assert len(one) == len(other)
    for mine, its in zip(one, other, strict=True):
        if isinstance(mine, np.ndarray):
            np.testing.assert_array_equal(mine, its)
        else:
            assert mine == its


def learned_state(folder: Path) -> dict[str, Any]:
    """All bits that the rounds to come would depend on, the agent's among them."""
    state = checkpoint.read(folder)
    return flat(
        {
            name: state[name]
            for name in (
                "round",
                "finished",
                "best",
                "baseline",
                "collector",
                "agent",
                "policy",
                "env_steps",
            )
        }
    )


def same_results(one: RunSummary, other: RunSummary) -> None:
    """Summaries are equal except for folder and time."""
    places = {"folder": Path(), "seconds": 0.0}
    first, second = (dataclasses.replace(summary, **places) for summary in (one, other))
    # As text: NaN, of one pair, is not equal to itself.
    assert repr(dataclasses.astuple(first)) == repr(dataclasses.astuple(second))


def same_run(one: Path, other: Path) -> None:
    """Two run folders have the same events, tables and files, to the last bit."""
    # As texts, in which a number that is not known equals itself.
    assert repr(stable_log(one)) == repr(stable_log(other))
    assert repr(stable_metrics(one)) == repr(stable_metrics(other))
    assert learned_state(one) == learned_state(other)
    # The picture is drawn by the command, and only by one that completes the run.
    names, others = (
        {path.name for path in folder.iterdir()} - {"life.svg"}
        for folder in (one, other)
    )
    assert names == others
    for name in names & {"config.toml", "best_host.json", "best_host.safetensors"}:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


class Runs:
    """Runs of some configs that were never stopped, played once each."""

    def __init__(
        self, folder: Path, configs: dict[str, Callable[[], TrainingConfig]]
    ) -> None:
        self.folder, self.configs = folder, configs

    @functools.cache  # noqa: B019  lives as long as the module's tests
    def __call__(self, name: str) -> tuple[Path, RunSummary]:
        summary, _ = play(self.configs[name](), self.folder / name)
        return summary.folder, summary

    def resumed(self, name: str, folder: Path) -> None:
        """Resumes the run in ``folder``, which ends as the one that was never stopped."""
        summary = Experiment.resume(folder).run()
        uncut, results = self(name)
        same_run(folder, uncut)
        same_results(summary, results)


def interrupted(config: TrainingConfig, folder: Path, sink: Does) -> RunSummary | None:
    """The run until its Ctrl-C; None when that came before there was anything to sum up."""
    try:
        summary = Experiment(config, folder, [sink]).run()
    except KeyboardInterrupt:
        summary = None
    assert sink.did
    assert summary is None or summary.interrupted
    return summary


def stopped(
    config: TrainingConfig | None,
    folder: Path,
    step: int,
    what: Callable[[], Any] = stop,
) -> RunSummary | None:
    """Runs simulated hosts, which report no epochs; within a step, counted through all envs of the run, acts.

    Without a config, resumes the run in the folder.
    """
    steps, inner = [], SlotVectorEnv.step

    def stepping(env: SlotVectorEnv, actions: Any) -> Any:
        found = inner(env, actions)
        steps.append(1)
        if len(steps) == step:
            what()
        return found

    with (
        mock.patch.object(SlotVectorEnv, "step", stepping),
        suppress(KeyboardInterrupt),
    ):
        experiment = Experiment(config, folder) if config else Experiment.resume(folder)
        return experiment.run()
    assert len(steps) == step
    return None
