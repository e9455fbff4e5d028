"""Reports of a run: the events of its start, its rounds and its end, and the summary that it returns."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from esper.agents.ppo.update import UpdateStats
from esper.compare.analysis import ArmComparison
from esper.compare.runner import name_score
from esper.compare.statistics import PairedComparison
from esper.config.resolved import ResolvedConfig
from esper.env.slot_env import SlotVectorEnv
from esper.env.training_backend import copies_held
from esper.files.run_folder import RunFolder
from esper.run.rollout import Round
from esper.run.tracking import tracking_sinks
from esper.telemetry.anomaly import AnomalyDetector, illegal_actions
from esper.telemetry.event import (
    BaselineMeasured,
    Comparison,
    Event,
    PolicyUpdated,
    RoundCompleted,
    RunCompleted,
    RunResumed,
    RunStarted,
)
from esper.telemetry.hub import Sink, TelemetryHub
from esper.telemetry.memory import memory_used
from esper.telemetry.score import ACCURACY, ScoreUnit
from esper.telemetry.span import Spans
from esper.telemetry.text import count
from esper.training.execution.capabilities import workspace_setting
from esper.training.execution.multi_gpu import devices_of


@dataclass(frozen=True)
class RunSummary:
    """Result of a run; accuracies are those of committed networks on the test split, in pp."""

    folder: Path
    controller: str
    comparisons: tuple[ArmComparison, ...]
    """The run's controller against each baseline, hosts left alone (``none``) first. Empty if an agent was interrupted
    before it finished learning, or the run was stopped in its first round."""
    host_parameters: int
    """Mean number of parameters of the compared hosts left alone."""
    grown_parameters: float
    """Mean number of parameters of the compared hosts."""
    fossils: float
    """Mean number of fossils of the compared hosts."""
    rounds: int
    total_rounds: int
    interrupted: bool
    seconds: float
    dropped_sinks: dict[str, str]
    score: ScoreUnit = ACCURACY
    """Display format of the score of hosts; ``comparisons`` have it in percentage points."""

    def __repr__(self) -> str:
        verdict = self.comparison.verdict() if self.comparisons else "nothing was compared"
        return f"RunSummary({self.folder}, {count(self.rounds, 'round')}: {verdict})"

    @property
    def comparison(self) -> PairedComparison:
        """The comparison with hosts left alone. Raises ValueError if nothing was compared."""
        if not self.comparisons:
            raise ValueError("nothing was compared: the run was interrupted before there was a result")
        return self.comparisons[0].pair


class RunTelemetry:
    """Emits the events of a run.

    Args:
        callbacks: sinks in addition to the files of the run folder and the trackers.
        resumed: whether the run continues from a checkpoint.
        score: the display format of the score of hosts.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        files: RunFolder,
        callbacks: Sequence[Sink],
        resumed: bool,
        score: ScoreUnit,
    ) -> None:
        self.config = config
        self.files = files
        self.callbacks = callbacks
        self.resumed = resumed
        self.score = score
        self.hub: TelemetryHub | None = None
        """Passes events on to the sinks; None until :meth:`open`."""
        self.spans = Spans(marks=False)
        """Times the reports; the run replaces it with that of its env."""
        self.detector = AnomalyDetector(
            config.anomaly,
            config.ppo.max_grad_norm,
            config.run.rounds,
            grouped=(config.ppo.group or 1) > 1,
        )

    def open(self) -> None:
        """Opens the files and the trackers; when resuming, the logs must have been cut to the checkpoint before."""
        trackers = tracking_sinks(self.config, self.files.path, self.resumed)
        self.hub = TelemetryHub([*self.files.sinks(), *trackers, *self.callbacks])

    def emit(self, event: Event) -> None:
        """Passes an event on. Raises RuntimeError before :meth:`open`."""
        with self.spans("telemetry"):
            if self.resumed and isinstance(event, BaselineMeasured):
                return  # it was reported when the run first started
            if self.hub is None:
                raise RuntimeError(f"{type(event).__name__} was emitted before the log of the run was opened")
            self.hub.emit(event)

    def start(self, env: SlotVectorEnv) -> None:
        """Reports the start of a new run."""
        config = self.config
        spec = env.action_spec
        precision = None
        if env.execution is not None:
            precision = env.config.task.precision
        self.emit(
            RunStarted(
                task=config.task.name,
                controller=config.run.controller,
                seed=config.run.seed,
                host_parameters=env.host_parameters,
                host_flops=float(np.mean(env.choices.host_flops)),
                slots=spec.slots,
                blueprints=spec.blueprints,
                precision=precision,
                micro_batches=config.task.micro_batches,
                folder=str(self.files.path),
                **self._session(env),
            )
        )
        name_score(self.score, self.emit)

    def resume(
        self,
        env: SlotVectorEnv,
        done: int,
        epochs: int,
        warnings: Sequence[str],
    ) -> None:
        """Reports that the run continues after ``done`` rounds and ``epochs`` of the next one."""
        self.emit(RunResumed(round=done, warnings=tuple(warnings), epochs=epochs, **self._session(env)))
        name_score(self.score, self.emit)

    def _session(self, env: SlotVectorEnv) -> dict[str, Any]:
        """Returns the fields that the events of a start and of a resumption share."""
        tier: str | None = None
        refused: str | None = None
        if env.execution is not None:
            tier = env.execution.tier
            refused = env.execution.refused
        on_gpu = any(device.type == "cuda" for device in devices_of(self.config.run.device))
        return {
            "rounds": self.config.run.rounds,
            "n_envs": env.num_envs,
            "episode_length": env.horizon,
            "tier": tier,
            "tier_refused": refused,
            "time": time.time(),
            "cublas_workspace": workspace_setting() if on_gpu else None,
        }

    def round(
        self,
        number: int,
        envs: Sequence[SlotVectorEnv],
        played: Round,
        update: UpdateStats | None,
        env_steps: int,
    ) -> None:
        """Reports round ``number``, from 1, then the agent's update and any warnings about it.

        Args:
            envs: all envs of the run, its controller's first.
            env_steps: env steps of all rounds so far.
        """
        env = envs[0]
        stats = played.stats
        test: float | None = None
        alone: float | None = None
        if played.tests:
            tests, tests_alone = played.tests
            test = float(tests.mean())
            alone = float(tests_alone.mean())
        # Epochs and samples are those of the controller's envs only.
        epochs = int(stats.epochs.sum())
        samples = epochs * self.config.trained_samples
        before = played.phases_before
        completed = RoundCompleted(
            round=number,
            rounds=self.config.run.rounds,
            episodes=env.num_envs,
            mean_return=float(stats.returns.mean()),
            committed_accuracy=float(stats.committed.mean()),
            baseline_accuracy=float(stats.baseline.mean()),
            test_accuracy=test,
            alone_test_accuracy=alone,
            fossils=float(stats.fossils.mean()),
            rollbacks=int(stats.rollbacks.sum()),
            illegal_actions=int(stats.illegal_actions.sum()),
            epochs=epochs,
            samples=samples,
            seconds=time.perf_counter() - played.began,
            epochs_per_second=epochs / stats.seconds,
            images_per_second=samples / stats.seconds,
            phase_seconds={name: after - before.get(name, 0.0) for name, after in env.phase_seconds.items()},
            memory=self._memory(envs),
            need=stats.need,
        )
        for event in (completed, *illegal_actions(completed, env.first_illegal)):
            self.emit(event)
        if update is not None:
            updated = PolicyUpdated(round=number, env_steps=env_steps, **vars(update))
            warnings = self.detector.look(updated)
            for event in (updated, *warnings):
                self.emit(event)

    def _memory(self, envs: Sequence[SlotVectorEnv]) -> dict[str, int]:
        """Returns the memory that the run uses, with the copies of all hosts, of those left alone, too."""
        copies: list[Mapping[str, int]] = []
        for env in envs:
            copies += env.backend.map_hosts(copies_held)
        return memory_used(copies, devices_of(self.config.run.device))

    def end(self, summary: RunSummary) -> None:
        """Reports the end of the run with its comparisons; nothing if it was interrupted before there were any."""
        if summary.interrupted and not summary.comparisons:
            return
        self.emit(
            RunCompleted(
                controller=summary.controller,
                pairs=summary.comparison.pairs if summary.comparisons else 0,
                comparisons=tuple(map(_comparison, summary.comparisons)),
                host_parameters=summary.host_parameters,
                parameters=summary.grown_parameters,
                fossils=summary.fossils,
                seconds=summary.seconds,
            )
        )

    def dropped_sinks(self) -> dict[str, str]:
        """Returns why sinks were dropped, by name."""
        if self.hub is None:
            return {}
        return {name: sink.words() for name, sink in self.hub.dropped.items()}

    def close(self) -> None:
        if self.hub is not None:
            self.hub.close()


def _comparison(result: ArmComparison) -> Comparison:
    pair = result.pair
    return Comparison(
        reference=pair.name_b,
        accuracy=pair.mean_a,
        reference_accuracy=pair.mean_b,
        difference=pair.difference,
        low=pair.interval.low,
        high=pair.interval.high,
        p_value=result.adjusted_p,
        verdict=result.verdict,
    )
