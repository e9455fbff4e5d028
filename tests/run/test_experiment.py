"""A run: the files in its folder, its repetition to the last bit, and its isolation from other runs."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
import weakref
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from esper.config import TrainingConfig, read_toml
from esper.data.tasks import load_task
from esper.env.make import EnvMaker
from esper.env.vector_env import GrowthVectorEnv
from esper.files import checkpoint
from esper.files.system_info import describe_environment
from esper.run.experiment import Experiment
from esper.run.telemetry import RunSummary
from esper.telemetry.event import (
    BaselineMeasured,
    EpochCompleted,
    Event,
    RoundCompleted,
    RunCompleted,
)
from esper.telemetry.record import SCHEMA_VERSION, record
from esper.training.rng import HELD_OUT, seeded
from tests.run.run_helpers import Recorder, learning, metrics, of_kind, play, tiny
from tests.telemetry.sample_events import read_events

FILES = {
    "best_host.json",
    "best_host.safetensors",
    "checkpoint.previous.pt",
    "checkpoint.pt",
    "config.toml",
    "env.json",
    "events.jsonl",
    "metrics.csv",
}


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Experiment, RunSummary, Recorder]:
    """A run of two rounds, read by the tests of its folder."""
    recorder = Recorder()
    experiment = Experiment(
        tiny(rounds=2, seed=7), tmp_path_factory.mktemp("runs") / "a" / "b", [recorder]
    )
    return experiment, experiment.run(), recorder


Finished = tuple[Experiment, RunSummary, Recorder]


def test_the_folder_holds_these_files_and_no_part_of_one(finished: Finished) -> None:
    assert {path.name for path in finished[1].folder.iterdir()} == FILES


def test_config_toml_reads_back_as_the_config_of_the_run(finished: Finished) -> None:
    experiment, summary, _ = finished
    again = TrainingConfig.parse(read_toml(summary.folder / "config.toml"))
    assert again.model_dump() == experiment.config.model_dump()
    assert EnvMaker.of(again).config == experiment.config
    assert (again.task.batch_size, again.task.learning_rate) == (
        64,
        0.4,
    )  # what was left to the task is written out


def test_env_json_describes_the_machine(finished: Finished) -> None:
    written = json.loads((finished[1].folder / "env.json").read_text())
    assert written == json.loads(json.dumps(describe_environment()))
    assert written["packages"]["torch"] == torch.__version__


def test_events_jsonl_holds_every_event_in_order(finished: Finished) -> None:
    _, summary, recorder = finished
    read = list(read_events(summary.folder / "events.jsonl"))
    assert read == [json.loads(json.dumps(record(event))) for event in recorder.events]
    assert {fields["schema"] for fields in read} == {SCHEMA_VERSION}
    names = [fields["event"] for fields in read]
    assert names[:2] == ["RunStarted", "BaselineMeasured"]
    assert names[-3:] == ["EpisodeCompleted", "RoundCompleted", "RunCompleted"]
    assert (
        names.count("EpochCompleted") == 2 * 2 * 4
    )  # rounds, hosts, epochs: the control hosts are not in the log
    assert names.count("EpisodeCompleted") == 2 * 2
    assert names.count("BaselineMeasured") == 1


def test_metrics_csv_has_one_row_a_round(finished: Finished) -> None:
    _, summary, recorder = finished
    rows = metrics(summary.folder)
    rounds = [event for event in recorder.events if isinstance(event, RoundCompleted)]
    assert [row["round"] for row in rows] == ["1", "2"]
    assert [float(row["committed_accuracy"]) for row in rows] == [
        event.committed_accuracy for event in rounds
    ]
    assert [int(row["samples"]) for row in rows] == [2 * 4 * 128] * 2


def test_the_baseline_of_the_log_is_the_one_that_rewards_were_measured_against(
    finished: Finished,
) -> None:
    _, _, recorder = finished
    (measured,) = [
        event for event in recorder.events if isinstance(event, BaselineMeasured)
    ]
    assert len(measured.accuracy) == 4 + 1
    last = [
        e.baseline_accuracy
        for e in recorder.events
        if isinstance(e, EpochCompleted) and e.epoch == 4
    ]
    assert last == [measured.accuracy[4]] * 4


def test_the_summary_is_what_the_last_event_says(finished: Finished) -> None:
    _, summary, recorder = finished
    end = recorder.events[-1]
    assert isinstance(end, RunCompleted)
    found = summary.comparison
    (sent,) = end.comparisons
    assert (
        (found.name_a, found.name_b)
        == (end.controller, sent.reference)
        == ("random", "none")
    )
    assert (sent.accuracy, sent.reference_accuracy, sent.difference) == (
        found.mean_a,
        found.mean_b,
        found.difference,
    )
    assert (sent.low, sent.high, sent.p_value) == (
        found.interval.low,
        found.interval.high,
        found.p_value,
    )
    assert sent.verdict == "inconclusive: under 10 pairs"
    assert (end.pairs, found.pairs, summary.rounds, summary.interrupted) == (
        4,
        4,
        2,
        False,
    )
    assert (end.host_parameters, end.parameters, end.fossils) == (
        277,
        summary.grown_parameters,
        summary.fossils,
    )
    assert summary.host_parameters == 277
    assert summary.dropped_sinks == {}
    assert recorder.closed == 1


@pytest.mark.finding("C1")
def test_same_seed_same_events_whatever_the_workers(
    finished: Finished, tmp_path: Path
) -> None:
    """No generator of the process is touched."""

    def states() -> tuple[list[int], str]:
        return torch.get_rng_state().tolist(), str(np.random.get_state(legacy=False))  # noqa: NPY002  the global one

    before = states()
    _, again = play(tiny(rounds=2, seed=7, lanes=3), tmp_path / "again")
    assert again.stable() == finished[2].stable()
    assert states() == before


class RunsAnother(Recorder):
    """A sink that plays a whole other run in the middle of a run."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.inner: Recorder | None = None

    def handle(self, event: Event) -> None:
        super().handle(event)
        if self.inner is None and isinstance(event, EpochCompleted):
            self.inner = Recorder()
            Experiment(tiny(rounds=2, seed=7), self.folder, [self.inner]).run()


@pytest.mark.slow
@pytest.mark.finding("M17")
def test_two_runs_in_one_process_do_not_see_each_other(
    finished: Finished, tmp_path: Path
) -> None:
    outer = RunsAnother(tmp_path / "inner")
    Experiment(tiny(rounds=2, seed=7), tmp_path / "outer", [outer]).run()
    assert outer.inner is not None
    assert outer.stable() == outer.inner.stable() == finished[2].stable()
    log = read_events(tmp_path / "outer" / "events.jsonl")
    assert [fields["event"] for fields in log] == [
        type(event).__name__ for event in finished[2].events
    ]


def test_a_run_is_played_once(finished: Finished) -> None:
    """A second call must not write into the folder of the first."""
    log = (finished[1].folder / "events.jsonl").read_bytes()
    with pytest.raises(RuntimeError, match="runs only once"):
        finished[0].run()
    assert (finished[1].folder / "events.jsonl").read_bytes() == log


def test_rounds_play_fresh_hosts(finished: Finished) -> None:
    episodes = [
        (e.env, e.episode)
        for e in finished[2].events
        if isinstance(e, EpochCompleted) and e.epoch == 4
    ]
    assert sorted(episodes) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_a_host_left_alone_is_its_own_twin(tmp_path: Path) -> None:
    summary, _ = play(tiny("none"), tmp_path / "none")
    assert (summary.comparison.ties, summary.comparison.pairs) == (2, 2)
    assert summary.comparison.difference == 0.0
    assert summary.grown_parameters == summary.host_parameters == 277
    assert summary.fossils == 0


@pytest.mark.finding("M17")
def test_runs_in_two_threads_draw_their_own_numbers() -> None:
    """torch has one generator for the whole process: while one run draws a host's weights, the other has to wait."""
    wanted = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    inside, drawn = threading.Event(), threading.Event()
    found: dict[int, list[float]] = {}

    def other() -> None:
        with seeded(2):
            inside.set()
            drawn.wait(10)
            found[2] = torch.rand(4).tolist()

    thread = threading.Thread(target=other)
    with seeded(1):
        thread.start()
        inside.wait(0.3)
        found[1] = torch.rand(4).tolist()
        drawn.set()
    thread.join()
    assert found == {
        seed: torch.rand(4, generator=wanted[seed - 1]).tolist() for seed in (1, 2)
    }


@pytest.mark.slow
@pytest.mark.finding("M17")
def test_a_closed_run_holds_neither_hosts_nor_data(tmp_path: Path) -> None:
    def run(name: str) -> list[weakref.ref[Any]]:
        experiment = Experiment(tiny(), tmp_path / name)
        experiment.run()
        env = experiment.trainer.env
        assert isinstance(env, GrowthVectorEnv)
        held = [
            experiment,
            env,
            env.executor,
            env.training[0].host,
            env.task.train.x,
            env.training[0].totals.training,
        ]
        return [weakref.ref(thing) for thing in held]

    things = run("r")
    gc.collect()
    assert [thing() for thing in things] == [None] * 6


@pytest.mark.finding("T1")
def test_a_run_of_one_host_and_one_epoch(tmp_path: Path) -> None:
    """A single step to learn from, which has no standard deviation."""
    config = learning("planted", n_envs=1, rounds=2, evaluation_pairs=1)
    summary, recorder = play(
        config.with_values(env={"episode_length": 1}), tmp_path / "r"
    )
    assert (summary.rounds, summary.interrupted) == (2, False)
    assert len(of_kind(recorder, RoundCompleted)) == 2
    assert np.isfinite(summary.comparison.difference)
    policy = checkpoint.read(summary.folder)["policy"]
    assert all(bool(tensor.isfinite().all()) for tensor in policy["network"].values())


def test_making_an_experiment_writes_nothing(tmp_path: Path) -> None:
    Experiment(tiny(), tmp_path / "r").close()
    assert not (tmp_path / "r").exists()


def test_preparing_a_run_twice_is_preparing_it_once(tmp_path: Path) -> None:
    tables = {
        "task": {"name": "planted"},
        "run": {"controller": "random", "seed": 7},
        "env": {"n_envs": 2},
    }
    with closing(
        Experiment(TrainingConfig.parse(tables), tmp_path / "r")
    ) as experiment:
        trainer = experiment.trainer
        trainer.agent.seed_offset = HELD_OUT  # as of one that follows a trained agent
        trainer.prepare()
        trainer.prepare()
        assert [env.run_seed for env in trainer.collector.envs] == [7 + HELD_OUT] * 2


@pytest.mark.finding("M17")
def test_a_task_is_loaded_for_each_run() -> None:
    assert (
        load_task("digits").train.x.data_ptr() != load_task("digits").train.x.data_ptr()
    )


@pytest.mark.slow
def test_a_run_imports_no_compiler(tmp_path: Path) -> None:
    """It would cost each process of a run a second and 70 MB."""
    code = """
import sys
from esper import Experiment, TrainingConfig
sections = {
    "task": {"name": "digits", "samples_per_epoch": 64},
    "run": {"rounds": 1, "evaluation_pairs": 1},
    "env": {"n_envs": 1, "episode_length": 2, "baseline_episodes": 1},
}
summary = Experiment(TrainingConfig.parse(sections), sys.argv[1]).run()
assert summary.rounds == 1 and summary.comparison.pairs == 1
assert "torch._dynamo" not in sys.modules
"""
    found = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "r")],
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
