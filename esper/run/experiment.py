"""One run: a controller grows hosts for a number of rounds, then the result is compared on paired hosts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType

import numpy as np

from esper.config import ConfigError, TrainingConfig, read_toml
from esper.data.task import Task
from esper.data.user_task import confirmed_task
from esper.env.baseline import Baseline
from esper.env.make import EnvMaker
from esper.env.vector_env import GrowthVectorEnv
from esper.evaluation.comparison import against_each
from esper.files import checkpoint
from esper.files.grown_host import save_host
from esper.files.run_folder import CONFIG, EVENTS, RunFolder
from esper.files.system_info import check_device, check_devices
from esper.rollout.interrupt import interrupts_wait, termination_interrupts
from esper.rollout.threads import one_thread
from esper.run.summary import RunSummary, as_reported
from esper.run.tracking import check_trackers, tracking_sinks
from esper.run.trainer import LearningRounds, PairedRounds, Round, Rounds
from esper.telemetry.event import (
    BaselineMeasured,
    Event,
    RoundCompleted,
    RunCompleted,
    RunResumed,
    RunStarted,
)
from esper.telemetry.hub import Sink, TelemetryHub
from esper.telemetry.memory import memory_used
from esper.telemetry.sinks.jsonl import being_written
from esper.training.execution import workspaces
from esper.training.execution.multi_gpu import devices_of


class Experiment:
    """A run, validated on construction: a bad name, size or device raises ConfigError before anything is written.

    Args:
        config: what to run; sizes left to the task are filled in.
        folder: run folder; must be empty or not exist yet.
        callbacks: sinks that receive the run's events in addition to the files of the run folder.
        task: what hosts are trained on; None: the task named in the config.
    """

    def __init__(
        self, config: TrainingConfig, folder: Path | str, callbacks: Sequence[Sink] = (), task: Task | None = None
    ) -> None:
        self._set_up(config, Path(folder), callbacks, None, task)

    @classmethod
    def resume(cls, folder: Path | str, callbacks: Sequence[Sink] = (), task: Task | str | None = None) -> Experiment:
        """Returns a run that continues from its last checkpoint, with the same results as if it had never stopped.

        A user-defined task is code, and is never run just because a run folder names it: pass it again in ``task``, as
        the task itself or its name.

        Raises:
            ConfigError: there is no run folder or no checkpoint, the run is finished or still in progress, the task
                differs from the run's, or a user-defined task is not named.
        """
        folder = Path(folder)
        if being_written(folder / EVENTS):
            raise ConfigError(f"{folder} is being written by a run in progress: wait for it to end, or stop it")
        found = checkpoint.newest(folder)
        if found.state["finished"]:
            raise ConfigError(f"{folder} is finished: all {found.state['round']} rounds were played and compared")
        config = TrainingConfig.parse(read_toml(folder / CONFIG))
        given, name = (task, task.name) if isinstance(task, Task) else (None, task)
        config = config.with_values(task={"name": confirmed_task(config.task.name, name, str(folder))})
        experiment = cls.__new__(cls)
        experiment._set_up(config, folder, callbacks, found, given)
        return experiment

    @one_thread()  # the agent's initial weights depend on the number of threads
    def _set_up(
        self,
        config: TrainingConfig,
        folder: Path,
        callbacks: Sequence[Sink],
        found: checkpoint.CheckpointFile | None,
        task: Task | None,
    ) -> None:
        check_devices(config.run.device)
        check_device(config.ppo.device)
        check_trackers(config)
        self.folder = folder
        self.files = RunFolder(folder, resumed=found is not None)
        self.callbacks = callbacks
        self.hub: TelemetryHub | None = None
        maker = EnvMaker.of(config, task)
        self.config = maker.config
        name = config.run.controller
        self.rounds: Rounds = (
            LearningRounds(maker, self._emit)
            if config.run.learns
            else PairedRounds(maker, self._emit, name if found is None else self.files.follows(name))
        )
        self.env = self.rounds.env
        self.best = -np.inf
        self.done, self.finished = 0, False
        self._earlier_seconds = 0.0
        self._resumed_from = found
        self._unwritten: bytes | None = None
        """Encoded checkpoint that is not on disk yet."""
        self._last_is_sound = found is None or found.file.name == checkpoint.NAME
        """Whether the newest checkpoint on disk is intact, and may be kept as the previous one."""

    @one_thread()
    def run(self) -> RunSummary:
        """Plays all rounds and compares the controller with its baselines.

        Ctrl-C or SIGTERM stops the run at the end of the current step, and :meth:`resume` continues from there. A
        second signal stops at once; the run then continues from its last checkpoint.

        Raises:
            KeyboardInterrupt: the run was interrupted before its first round was complete; before a resumed run had
                loaded its checkpoint, in which case nothing is written; or while the final state was written, in which
                case the run is finished.
            RuntimeError: the experiment was run before.
        """
        if self.hub is not None:
            raise RuntimeError("an Experiment runs only once: create another one, with its own folder")
        self._start = self._written_at = time.perf_counter()
        total = int(self.config.run.rounds or 1)
        with self, termination_interrupts():
            try:
                self._begin()
                while self.done < total:
                    self._play(total)
                summary = self._conclude(interrupted=False)
            except KeyboardInterrupt:
                if self.finished:
                    raise
                with interrupts_wait():
                    if self.rounds.games and self.rounds.whole:
                        self._remember(finished=False)
                    self._write_checkpoint()
                if self.hub is None or not self.done:
                    raise
                summary = self._conclude(interrupted=True)
            finally:
                with interrupts_wait():
                    self._write_checkpoint()
        assert self.hub is not None
        # Sinks may still fail while the hub closes.
        return replace(summary, dropped_sinks={name: sink.words() for name, sink in self.hub.dropped.items()})

    def _begin(self) -> None:
        """Opens the folder and the log, then measures the baseline; a resumed run loads its checkpoint instead."""
        found = self._resumed_from
        if found is not None:
            self._go_on_from(found)
            return
        self.files.create(self.config)
        self._open_hub()
        self._announce()
        self.rounds.prepare(None)
        self._keep()
        self._practise()

    def _open_hub(self) -> None:
        shown = tracking_sinks(self.config, self.folder, resumed=self._resumed_from is not None)
        self.hub = TelemetryHub([*self.files.sinks(), *shown, *self.callbacks])

    def _practise(self) -> None:
        if not self.rounds.practised:
            self.rounds.practise(self._emit)
            self._keep()

    def _go_on_from(self, found: checkpoint.CheckpointFile) -> None:
        """Loads the whole checkpoint before anything in the folder is changed."""
        self.rounds.whole = False  # an interrupt must not save a half-loaded state, or one that precedes the log cut
        try:
            self._load(found.state)
        except checkpoint.MISFITS as error:
            raise ConfigError(f"{found.file} belongs to another run or was modified: {error}") from error
        warnings = [*found.refused, *self.files.cut_logs(found.state["logs"])]
        self._open_hub()
        sizes = (self.done, int(self.config.run.rounds or 1), self.env.num_envs, self.env.horizon)
        epochs = self.rounds.games[-1].steps if self.rounds.games else 0
        workspace = workspaces.of_run(self.config.run.device)
        self._emit(RunResumed(*sizes, *self._tier(), time.time(), tuple(warnings), epochs, workspace))
        self.rounds.whole = True
        self._practise()

    def _load(self, state: checkpoint.State) -> None:
        """Loads ``state``. Raises one of ``checkpoint.MISFITS`` if it does not belong to this run."""
        baseline, rounds = state["baseline"], int(self.config.run.rounds or 1)
        if not 0 <= state["round"] <= rounds or any(
            type(size) is not int or size < 0 for size in state["logs"].values()
        ):
            raise ValueError(f"it says round {state['round']} of {rounds}, with log sizes {state['logs']}")
        self.rounds.prepare(Baseline(**{**baseline, **{k: tuple(baseline[k]) for k in ("accuracy", "loss")}}))
        self.rounds.load_state_dict(state["rounds"])
        self.done, self.best = int(state["round"]), float(state["best"])
        self._earlier_seconds = float(state["seconds"])

    def _announce(self) -> None:
        config, spec = self.config, self.env.action_spec
        tier, refused = self._tier()
        self._emit(
            RunStarted(
                task=config.task.name,
                controller=config.run.controller,
                seed=config.run.seed,
                rounds=int(config.run.rounds or 1),
                n_envs=self.env.num_envs,
                episode_length=self.env.horizon,
                host_parameters=self.env.host_parameters,
                slots=spec.slots,
                blueprints=spec.blueprints,
                tier=tier,
                precision=None if tier is None else self.env.config.task.precision,
                micro_batches=config.task.micro_batches,
                tier_refused=refused,
                time=time.time(),
                folder=str(self.folder),
                cublas_workspace=workspaces.of_run(config.run.device),
                pinned_copies=tuple(copy.value for copy in self.env.pinned),
            )
        )

    def _tier(self) -> tuple[str | None, str | None]:
        """Name of the execution tier, and why the configured one was refused (None if it was not)."""
        return (None, None) if self.env.tier is None else (self.env.tier.name, self.env.tier.refused)

    def _play(self, total: int) -> None:
        """Plays one round. Learning, reporting and checkpointing happen for the whole round or not at all."""
        clock, before = time.perf_counter(), self.env.phase_seconds
        played = self.rounds.play(self._between_steps)
        with interrupts_wait():
            number = self.done + 1
            learned = self.rounds.take(number, played)
            self._keep_best(played)
            spent = {name: after - before.get(name, 0.0) for name, after in self.env.phase_seconds.items()}
            self._emit(self._report(number, total, played, time.perf_counter() - clock, spent))
            for event in learned:
                self._emit(event)
            self.done = number
            self._remember(finished=False)
            if number % self.config.run.checkpoint_every == 0:
                self._write_checkpoint()

    def _between_steps(self) -> None:
        """Writes a checkpoint every ``run.checkpoint_minutes``, so that a kill does not lose a long round."""
        if time.perf_counter() - self._written_at > 60 * self.config.run.checkpoint_minutes:
            self._keep()

    def _report(
        self, number: int, total: int, played: Round, seconds: float, phase_seconds: dict[str, float]
    ) -> RoundCompleted:
        here = played.played
        epochs = int(here.epochs.sum())
        samples = epochs * self._samples_per_epoch()
        copies = [host for env in self.rounds.envs for host in env.hosts.copies_held()]  # of hosts left alone, too
        return RoundCompleted(
            round=number,
            rounds=total,
            episodes=self.env.num_envs,
            mean_return=float(here.returns.mean()),
            committed_accuracy=float(here.committed.mean()),
            baseline_accuracy=float(here.baseline.mean()),
            test_accuracy=None if played.test is None else float(played.test.mean()),
            alone_test_accuracy=None if played.alone is None else float(played.alone.mean()),
            fossils=float(here.fossils.mean()),
            rollbacks=int(here.rollbacks.sum()),
            illegal_actions=int(here.illegal_actions.sum()),
            epochs=epochs,
            samples=samples,
            seconds=seconds,
            epochs_per_second=epochs / here.seconds,
            images_per_second=samples / here.seconds,
            phase_seconds=phase_seconds,
            memory=memory_used(copies, devices_of(self.config.run.device)),
        )

    def _samples_per_epoch(self) -> int:
        """Number of samples that one epoch trains on, full batches only; 0 if hosts are simulated."""
        task = self.config.task
        if task.samples_per_epoch is None or task.batch_size is None:
            return 0
        return task.samples_per_epoch // task.batch_size * task.batch_size

    def _keep_best(self, played: Round) -> None:
        """Saves the host with the best committed validation accuracy so far, without regard to the test split."""
        winner = int(played.played.committed.argmax())
        if not isinstance(self.env, GrowthVectorEnv) or played.played.committed[winner] <= self.best:
            return
        self.best = float(played.played.committed[winner])
        training = self.env.training[winner]
        facts = {"env": winner, "episode": training.episode, "seed": self.config.run.seed}
        test = self.env.test_accuracy() if played.test is None else played.test
        accuracies = {"validation_accuracy": self.best, "test_accuracy": float(test[winner])}
        save_host(training, self.folder / "best_host", {**facts, **accuracies})

    def _keep(self) -> None:
        """Writes a checkpoint of the current state."""
        with interrupts_wait():
            self._remember(finished=False)
            self._write_checkpoint()

    def _remember(self, finished: bool) -> None:
        """Encodes the current state as a checkpoint; :meth:`_write_checkpoint` writes it to disk."""
        assert self.env.baseline is not None
        policy = self.rounds.policy
        self._unwritten = checkpoint.encode(
            {
                "config": checkpoint.config_digest(self.folder),
                "round": self.done,
                "finished": finished,
                "best": self.best,
                "seconds": self._earlier_seconds + time.perf_counter() - self._start,
                "baseline": {name: _plain(value) for name, value in asdict(self.env.baseline).items()},
                "logs": self.files.log_sizes(),
                "rounds": self.rounds.state_dict(),
                "policy": None if policy is None else checkpoint.policy_state(policy),
            }
        )

    def _write_checkpoint(self) -> None:
        if self._unwritten is not None:
            self.files.write_checkpoint(self._unwritten, keep=self._last_is_sound)
            self._unwritten, self._written_at, self._last_is_sound = None, time.perf_counter(), True

    def _conclude(self, interrupted: bool) -> RunSummary:
        """Compares, unless an agent was interrupted, and emits the run's last event."""
        learns = self.config.run.learns
        arms = [] if interrupted and learns else self.rounds.conclude(self._emit, self._keep)
        comparisons = tuple(against_each(arms, arms[0].controller)) if arms else ()
        summary = RunSummary(
            folder=self.folder,
            controller=self.config.run.controller,
            comparisons=comparisons,
            host_parameters=self.env.host_parameters,
            grown_parameters=float(arms[0].parameters.mean()) if arms else 0.0,
            fossils=float(arms[0].fossils.mean()) if arms else 0.0,
            rounds=self.done,
            total_rounds=int(self.config.run.rounds or 1),
            interrupted=interrupted,
            seconds=self._earlier_seconds + time.perf_counter() - self._start,
            dropped_sinks={},
        )
        with interrupts_wait():
            self._tell_the_end(summary)
            if not interrupted:
                self._remember(finished=True)
                self._write_checkpoint()
                self.finished = True
        return summary

    def _tell_the_end(self, summary: RunSummary) -> None:
        if summary.comparisons:
            self._emit(
                RunCompleted(
                    controller=summary.controller,
                    pairs=summary.comparison.pairs,
                    comparisons=tuple(as_reported(c) for c in summary.comparisons),
                    host_parameters=summary.host_parameters,
                    parameters=summary.grown_parameters,
                    fossils=summary.fossils,
                    seconds=summary.seconds,
                )
            )

    def _emit(self, event: Event) -> None:
        with self.env.spans("telemetry"):
            if isinstance(event, BaselineMeasured):
                if self._resumed_from is not None:
                    return  # it was reported when the run first started
                self.files.keep_baseline(event)
            assert self.hub is not None
            self.hub.emit(event)

    def close(self) -> None:
        """Stops the lanes and closes the event log; a second call does nothing."""
        self.rounds.close()
        if self.hub is not None:
            self.hub.close()

    def __enter__(self) -> Experiment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
