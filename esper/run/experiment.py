"""One run: a controller grows hosts for a number of rounds, then the result is compared on paired hosts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from esper.agents.make import OwnController
from esper.agents.needs import with_needs
from esper.agents.spec import ALONE, ControllerSpec
from esper.compare.analysis import corrected
from esper.compare.comparison import ArmResult
from esper.compare.runner import maker_of
from esper.config import ConfigError, TrainingConfig, read_toml
from esper.data.task import Task
from esper.data.user_code import confirmed
from esper.errors import MISFITS
from esper.files import checkpoint
from esper.files.atomic import given_path
from esper.files.claim import claimed
from esper.files.run_folder import CONFIG, EVENTS, RunFolder
from esper.files.system_info import check_device
from esper.run.interrupt import interrupts_wait, termination_interrupts
from esper.run.rollout import one_thread
from esper.run.telemetry import RunSummary, RunTelemetry
from esper.run.tracking import check_trackers
from esper.run.trainer import Stopped, Trainer
from esper.telemetry.hub import Sink
from esper.telemetry.sinks.jsonl import being_written
from esper.training.execution.ranks import RunRanks


class Experiment(AbstractContextManager["Experiment"]):
    """A run, validated on construction: a bad name, size or device raises ConfigError before anything is written.

    Args:
        config: what to run; sizes left to the task are filled in.
        folder: run folder; must be empty or not exist yet.
        callbacks: sinks that receive the run's events in addition to the files of the run folder.
        task: what hosts are trained on; None: the task named in the config.
        controller: a name, or a callable that makes a controller for an env; None: the controller named in the config.
        resumed_from: the checkpoint to continue from, see :meth:`resume`.
        ranks: the ranks that hosts are spread over, on rank 0; None: all train in this process.
    """

    @one_thread()  # the agent's initial weights depend on the number of threads
    def __init__(
        self,
        config: TrainingConfig,
        folder: Path | str,
        callbacks: Sequence[Sink] = (),
        task: Task | None = None,
        *,
        controller: str | OwnController | None = None,
        resumed_from: checkpoint.CheckpointFile | None = None,
        ranks: RunRanks | None = None,
    ) -> None:
        spec = ControllerSpec.of(config.run.controller if controller is None else controller)
        config = with_needs(spec.name, config.with_values(run={"controller": spec.name}))
        # What is quick to check comes first; loading the data is slow.
        check_device(config.ppo.device)
        check_trackers(config)
        self.folder = given_path(folder)
        self.resumed_from = resumed_from
        self.finished = False
        resumed = resumed_from is not None
        self.files = RunFolder(self.folder, resumed)
        maker = maker_of(config, task, ranks)
        self.config = maker.config
        self.telemetry = RunTelemetry(maker.config, self.files, callbacks, resumed, maker.score)
        # A resumed run follows the copies in its folder, of a schedule or a checkpoint.
        follows = spec.make or spec.name
        if resumed and spec.make is None:
            follows = self.files.follows(spec.name)
        self.trainer = Trainer(
            maker,
            self.telemetry,
            self.files,
            follows,
            last_is_intact=resumed_from is None or resumed_from.file.name == checkpoint.NAME,
        )

    @classmethod
    def resume(
        cls,
        folder: Path | str,
        callbacks: Sequence[Sink] = (),
        task: Task | str | None = None,
        controller: str | OwnController | None = None,
        ranks: RunRanks | None = None,
    ) -> Experiment:
        """Returns a run that continues from its last checkpoint, with the same results as if it had never stopped.

        Args:
            folder: the run folder.
            callbacks: sinks that receive the events of the run from here on.
            task: a user-defined task, or its name. It is code, and is never run just because a run folder names it.
            controller: a user-defined controller, or its name; likewise.
            ranks: the ranks that hosts are spread over, on rank 0; None: all train in this process.

        Raises:
            ConfigError: there is no run folder or no checkpoint, the run is finished or still in progress, the task or
                the controller differs from the run's, a user-defined one is not named, or the controller was a callable
                without a name, such as a lambda.
        """
        folder = given_path(folder)
        if being_written(folder / EVENTS):
            raise ConfigError(f"{folder} is being written by a run in progress: wait for it to end, or stop it")
        newest = checkpoint.newest(folder)
        if newest.state["finished"]:
            raise ConfigError(f"{folder} is finished: all {newest.state['round']} rounds were played and compared")
        config = TrainingConfig.parse(read_toml(folder / CONFIG))
        user_task = task if isinstance(task, Task) else None
        name = task.name if isinstance(task, Task) else task
        named = confirmed("task", config.task.name, name, str(folder))
        return cls(
            config.with_values(task={"name": named}),
            folder,
            callbacks,
            user_task,
            controller=confirmed("controller", config.run.controller, controller, str(folder)),
            resumed_from=newest,
            ranks=ranks,
        )

    @one_thread()
    def run(self, compared: bool = True) -> RunSummary:
        """Plays all rounds and compares the controller with its baselines, unless ``compared`` is False.

        Ctrl-C or SIGTERM stops the run at the end of the current step, and :meth:`resume` continues from there. A
        second signal stops at once, and the run then continues from its last checkpoint; a SIGTERM that comes shortly
        after another one counts as the same.

        Raises:
            KeyboardInterrupt: the run was interrupted before its first round was complete; before a resumed run had
                loaded its checkpoint, in which case nothing is written; or while the final state was written, in which
                case the run is finished.
            RuntimeError: the experiment was run before.
        """
        if self.telemetry.hub is not None:
            raise RuntimeError("an Experiment runs only once: create another one, with its own folder")
        trainer = self.trainer
        trainer.began = time.perf_counter()
        with claimed(self.folder), self, termination_interrupts():
            try:
                self._start()
                while trainer.done < self.config.run.rounds:
                    trainer.play_round()
                arms = trainer.evaluate() if compared else []
                summary = self._end(arms, interrupted=False)
            except KeyboardInterrupt as reason:
                if self.finished:
                    raise
                self._save_within_round()
                if self.telemetry.hub is None or not (trainer.done or isinstance(reason, Stopped)):
                    raise
                # A controller that does not learn has results of its complete rounds.
                arms = []
                if trainer.done and not self.config.run.learns:
                    arms = trainer.evaluate()
                summary = self._end(arms, interrupted=True)
            finally:
                trainer.checkpoints.write()
        # Sinks may still fail while the hub closes.
        return replace(summary, dropped_sinks=self.telemetry.dropped_sinks())

    def stop(self) -> None:
        """Ends the run at the end of the current step, as Ctrl-C does; callable from callbacks and from any thread.

        :meth:`run` then returns, also before the first round is complete, and :meth:`resume` continues.
        """
        self.trainer.stopping = True

    def _start(self) -> None:
        """Continues the run of the checkpoint, or begins a new one."""
        if self.resumed_from is not None:
            self._continue_from(self.resumed_from)
        else:
            self._begin()
        self.trainer.validate()

    def _begin(self) -> None:
        """Opens the folder and the log, and measures the baseline."""
        self.files.create(self.config)
        self.telemetry.open()
        self.telemetry.start(self.trainer.env)
        self.trainer.prepare()
        self.trainer.checkpoints.save()

    def _save_within_round(self) -> None:
        """Saves the state in the middle of a round, if a round was interrupted and its state is intact."""
        collector = self.trainer.collector
        if collector.running and collector.consistent:
            self.trainer.checkpoints.save()

    def _continue_from(self, saved: checkpoint.CheckpointFile) -> None:
        """Loads the whole checkpoint before anything in the folder is changed."""
        trainer = self.trainer
        collector = trainer.collector
        collector.consistent = False  # an interrupt must not save a half-loaded state, or one that precedes the log cut
        try:
            trainer.load_state_dict(saved.state)
        except MISFITS as error:
            raise ConfigError(f"{saved.file} belongs to another run or was modified: {error}") from error
        warnings = [*saved.refused, *self.files.cut_logs(saved.state["logs"])]
        self.telemetry.open()
        epochs = 0
        if collector.running:
            epochs = collector.running[-1].epochs
        self.telemetry.resume(trainer.env, trainer.done, epochs, warnings)
        collector.consistent = True

    def _end(self, arms: list[ArmResult], interrupted: bool) -> RunSummary:
        """Reports the comparison of the first of ``arms`` with the others, and saves the final state; ``interrupted``
        says whether the run was stopped early."""
        trainer = self.trainer
        grown_parameters = 0.0
        fossils = 0.0
        host_parameters = trainer.env.host_parameters
        if arms:
            grown_parameters = float(arms[0].parameters.mean())
            fossils = float(arms[0].fossils.mean())
        for arm in arms:
            if arm.controller == ALONE:  # hosts may differ, and those of the last round were others
                host_parameters = round(float(arm.parameters.mean()))
        pairs = [arms[0].against(other) for other in arms[1:]]
        summary = RunSummary(
            folder=self.folder,
            controller=self.config.run.controller,
            comparisons=tuple(corrected(pairs)),
            host_parameters=host_parameters,
            grown_parameters=grown_parameters,
            fossils=fossils,
            rounds=trainer.done,
            total_rounds=self.config.run.rounds,
            interrupted=interrupted,
            seconds=trainer.seconds,
            dropped_sinks={},
            score=trainer.maker.score,
        )
        with interrupts_wait():
            self.telemetry.end(summary)
            if not interrupted:
                trainer.checkpoints.save(finished=True)
                self.finished = True
        return summary

    def close(self) -> None:
        """Stops the workers and closes the event log; a second call does nothing."""
        self.trainer.close()
        self.telemetry.close()

    def __exit__(self, *_error: object) -> None:
        self.close()
