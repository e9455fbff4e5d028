"""One run: a controller grows hosts for some rounds, and the same hosts are trained alone beside them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from esper.config import ConfigError, TrainingConfig
from esper.control.controller import NoGrowth
from esper.control.names import make_controller, schedule_file
from esper.data.task import resolve
from esper.data.tasks import load_task
from esper.env.vector_env import GrowthVectorEnv
from esper.experiment.environment import check_device, describe_environment
from esper.experiment.export import save_host
from esper.experiment.files import write_atomic, write_json
from esper.experiment.interrupt import interrupts_wait
from esper.experiment.play import Played, play_round
from esper.experiment.statistics import PairedComparison, compare_pairs
from esper.telemetry.event import BaselineMeasured, Event, RoundCompleted, RunCompleted, RunStarted
from esper.telemetry.hub import Sink, TelemetryHub
from esper.telemetry.sinks.jsonl import JsonlSink
from esper.telemetry.sinks.metrics_csv import MetricsCsvSink

Accuracies = NDArray[np.float64]


@dataclass(frozen=True)
class RunSummary:
    """What a run ends with; accuracies are those of committed networks on the test split, pp."""

    folder: Path
    comparison: PairedComparison
    """Grown against alone, one pair a host."""
    host_parameters: int
    grown_parameters: float
    """Mean over hosts."""
    fossils: float
    """Mean over hosts."""
    rounds: int
    interrupted: bool
    seconds: float
    dropped_sinks: dict[str, str]


class Experiment:
    """A run that is set up completely before anything is written: every wrong name, size or device raises ConfigError.

    Args:
        config: what to run; sizes left to the task are filled in.
        folder: where the run is kept; must not exist yet, or be empty.
        callbacks: sinks that receive the run's events beside the files of the run folder.
    """

    def __init__(self, config: TrainingConfig, folder: Path, callbacks: Sequence[Sink] = ()) -> None:
        device = check_device(config.run.device)
        self.task = load_task(config.task.name).to(device)
        self.config = resolve(config, self.task)
        self.folder = folder = Path(folder)
        self.hub: TelemetryHub | None = None
        self.callbacks = callbacks
        self.best = -np.inf
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder} already holds something; give --out a new or empty folder")
        self.env = GrowthVectorEnv(self.task, self.config, self._emit)
        # The same hosts left alone: same run seed, env indices and episode numbers, so the same weights and batches.
        self.twins = GrowthVectorEnv(self.task, self.config)
        run = self.config.run
        try:
            self.controller = make_controller(
                run.controller, self.task.name, self.env.action_spec, self.env.layout, self.env.num_envs, run.seed
            )
        except ConfigError:
            self.close()
            raise
        self.alone = NoGrowth(self.env.action_spec, self.env.layout, self.env.num_envs)

    def run(self) -> RunSummary:
        """Play all rounds; Ctrl-C ends after the last whole round, and what was measured until then is kept.

        Raises:
            KeyboardInterrupt: interrupted before the first round was done.
        """
        if self.hub is not None:
            raise RuntimeError("an Experiment is run once; make another one, with a folder of its own")
        start = time.perf_counter()
        grown: list[Played] = []
        alone: list[Accuracies] = []
        rounds = int(self.config.run.rounds or 1)
        with self:
            self._open_folder()
            self.env.prepare()
            self.twins.baseline = self.env.baseline
            try:
                for number in range(1, rounds + 1):
                    self._play(number, rounds, grown, alone)
            except KeyboardInterrupt:
                if not grown:
                    raise
            interrupted = len(grown) < rounds
            summary = self._summarise(grown, alone, interrupted, time.perf_counter() - start)
        assert self.hub is not None
        # Only a closed hub knows of every sink that failed.
        return replace(summary, dropped_sinks={name: str(sink.error) for name, sink in self.hub.dropped.items()})

    def _play(self, number: int, rounds: int, grown: list[Played], alone: list[Accuracies]) -> None:
        """One round and its twins; added to ``grown`` and ``alone`` if, and only if, it is written down too."""
        clock, phases = time.perf_counter(), dict(self.env.phase_seconds)
        played = play_round(self.env, self.controller, seed=self.config.run.seed if number == 1 else None)
        seconds = time.perf_counter() - clock
        twins = play_round(self.twins, self.alone, seed=self.config.run.seed if number == 1 else None)
        with interrupts_wait():
            self._keep_best(played)
            samples = int(played.epochs.sum()) * self._samples_per_epoch()
            self._emit(
                RoundCompleted(
                    round=number,
                    rounds=rounds,
                    episodes=self.env.num_envs,
                    mean_return=float(played.returns.mean()),
                    committed_accuracy=float(played.committed.mean()),
                    test_accuracy=float(played.test.mean()),
                    alone_test_accuracy=float(twins.test.mean()),
                    fossils=float(played.fossils.mean()),
                    rollbacks=int(played.rollbacks.sum()),
                    illegal_actions=int(played.illegal_actions.sum()),
                    samples=samples,
                    seconds=time.perf_counter() - clock,
                    images_per_second=samples / seconds,
                    phase_seconds={name: spent - phases[name] for name, spent in self.env.phase_seconds.items()},
                )
            )
            grown.append(played)
            alone.append(twins.test)

    def _samples_per_epoch(self) -> int:
        """Samples that one epoch really trains on: full batches only."""
        task = self.config.task
        assert task.samples_per_epoch is not None
        assert task.batch_size is not None
        return task.samples_per_epoch // task.batch_size * task.batch_size

    def _keep_best(self, played: Played) -> None:
        """Save the host with the best committed validation accuracy so far; the test split takes no part in it."""
        winner = int(played.committed.argmax())
        if played.committed[winner] <= self.best:
            return
        self.best = float(played.committed[winner])
        training = self.env.training[winner]
        facts = {"env": winner, "episode": training.episode, "seed": self.config.run.seed}
        accuracies = {"validation_accuracy": self.best, "test_accuracy": float(played.test[winner])}
        save_host(training, self.folder / "best_host", {**facts, **accuracies})

    def _summarise(self, grown: list[Played], alone: list[Accuracies], interrupted: bool, seconds: float) -> RunSummary:
        test = np.concatenate([p.test for p in grown])
        comparison = compare_pairs(test, np.concatenate(alone), name_a="grown", name_b="alone")
        assert self.hub is not None
        summary = RunSummary(
            folder=self.folder,
            comparison=comparison,
            host_parameters=self.env.training[0].host_parameters,
            grown_parameters=float(np.concatenate([p.parameters for p in grown]).mean()),
            fossils=float(np.concatenate([p.fossils for p in grown]).mean()),
            rounds=len(grown),
            interrupted=interrupted,
            seconds=seconds,
            dropped_sinks={},
        )
        self._emit(
            RunCompleted(
                grown_accuracy=comparison.mean_a,
                alone_accuracy=comparison.mean_b,
                difference=comparison.difference,
                low=comparison.interval.low,
                high=comparison.interval.high,
                pairs=comparison.pairs,
                host_parameters=summary.host_parameters,
                grown_parameters=summary.grown_parameters,
                seconds=seconds,
            )
        )
        return summary

    def _open_folder(self) -> None:
        """Make the run folder with its config and environment, and start the event log."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"run folder {self.folder} cannot be made: {error.strerror}; give another --out"
            ) from None
        write_atomic(self.folder / "config.toml", self.config.to_toml().encode())
        write_json(self.folder / "env.json", describe_environment())
        files: list[Sink] = [JsonlSink(self.folder / "events.jsonl"), MetricsCsvSink(self.folder / "metrics.csv")]
        self.hub = TelemetryHub([*files, *self.callbacks])
        config = self.config
        schedule = schedule_file(config.run.controller, self.task.name)
        if schedule is not None:
            write_atomic(self.folder / "schedule.toml", schedule.read_bytes())
        self._emit(
            RunStarted(
                task=self.task.name,
                controller=config.run.controller,
                seed=config.run.seed,
                rounds=int(config.run.rounds or 1),
                n_envs=self.env.num_envs,
                episode_length=self.env.horizon,
                host_parameters=self.env.training[0].host_parameters,
                slots=self.env.action_spec.slots,
                blueprints=self.env.action_spec.blueprints,
                time=time.time(),
                folder=str(self.folder),
            )
        )

    def _emit(self, event: Event) -> None:
        """To the hub; the baseline also goes into a file of its own, for later runs and reports."""
        assert self.hub is not None
        self.hub.emit(event)
        if isinstance(event, BaselineMeasured):
            write_json(self.folder / "baseline.json", asdict(event))

    def close(self) -> None:
        """Stop the lanes and close the event log; a second call does nothing."""
        self.env.close()
        self.twins.close()
        if self.hub is not None:
            self.hub.close()

    def __enter__(self) -> Experiment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
