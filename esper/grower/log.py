"""The run folder of a loop: config, environment and events, for `esper show` and `esper report`."""

from __future__ import annotations

import math
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from esper.agents.make import OwnController
from esper.agents.spec import ControllerSpec
from esper.config.resolved import ResolvedConfig
from esper.core.slots import mean_need
from esper.files.atomic import given_path
from esper.files.claim import claimed, require_empty
from esper.files.run_folder import EVENTS, RunFolder
from esper.grower.env import LoopEnv
from esper.telemetry.event import (
    BaselineMeasured,
    Event,
    RoundCompleted,
    RunCompleted,
    RunResumed,
    RunStarted,
    ScoreDefined,
)
from esper.telemetry.hub import TelemetryHub
from esper.telemetry.sinks.jsonl import JsonlSink


class LoopLog:
    """Writes the events of one loop, as the only round of a run with one host.

    Args:
        folder: a new or empty folder, or that of the loop that is resumed.
        task: name of what is trained.
        controller: what grows it.
        points: percentage points in a unit of the score.
    """

    def __init__(
        self,
        folder: str | Path,
        task: str,
        controller: str | OwnController,
        points: float,
    ) -> None:
        self.folder = RunFolder(given_path(folder), resumed=True)
        self.score = ScoreDefined("score", "", points)
        self.task = task
        self.controller = ControllerSpec.of(controller).name
        self.hub: TelemetryHub | None = None
        self.claim = ExitStack()
        """Holds the folder until the loop is over."""
        self.began = time.perf_counter()
        self.seconds_before = 0.0
        """Seconds before the loop was resumed."""

    def create(self, config: ResolvedConfig) -> None:
        """Makes the folder. Raises ConfigError if it is not empty: a loop is continued by its state only."""
        self.claim.enter_context(claimed(self.folder.path))
        require_empty(self.folder.path)
        self.folder.create(self._named(config))
        self._open()

    def start(self, env: LoopEnv, slots: tuple[str, ...]) -> None:
        """Reports the start, once the sites are known; ``slots`` are their names for users."""
        self.emit(
            RunStarted(
                task=self.task,
                controller=self.controller,
                seed=env.run_seed,
                rounds=1,
                n_envs=1,
                episode_length=env.horizon,
                host_parameters=env.host_parameters,
                host_flops=env.choices.host_flops,
                slots=slots,
                blueprints=env.action_spec.blueprints,
                tier=None,
                precision=None,
                micro_batches=1,
                tier_refused=None,
                time=time.time(),
                folder=str(self.folder.path),
            )
        )
        self.emit(self.score)
        if env.known is not None:
            # A curve of a loop without growth may lack the score of the untrained model.
            unmeasured = (math.nan,) * (env.horizon + 1 - len(env.known))
            self.emit(BaselineMeasured(1, unmeasured + env.known, (), math.nan))

    def state_dict(self) -> dict[str, Any]:
        return {"size": self.folder.log_sizes().get(EVENTS, 0), "seconds": self.seconds}

    def resume(
        self,
        saved: dict[str, Any],
        config: ResolvedConfig,
        epochs: int,
    ) -> None:
        """Continues the log where the state was taken, after ``epochs`` epochs; in a new folder, begins another."""
        new = not self.folder.path.exists()
        self.claim.enter_context(claimed(self.folder.path))
        if new:
            self.folder.create(self._named(config))
        lost = self.folder.cut_logs({EVENTS: saved["size"]})
        self.seconds_before = saved["seconds"]
        self._open()
        self.emit(
            RunResumed(
                round=0,
                rounds=1,
                n_envs=1,
                episode_length=config.env.episode_length,
                tier=None,
                tier_refused=None,
                time=time.time(),
                warnings=tuple(lost),
                epochs=epochs,
            )
        )
        self.emit(self.score)

    def emit(self, event: Event) -> None:
        if self.hub is not None:
            self.hub.emit(event)

    def finish(self, env: LoopEnv, parameters: int) -> None:
        """Reports the end, with the number of parameters of the grown model; closes the log."""
        state = env.state
        fossils = int(state.slots.kept[0])
        epochs = int(state.epoch[0])
        self.emit(
            RoundCompleted(
                round=1,
                rounds=1,
                episodes=1,
                mean_return=float(state.total_reward[0]),
                committed_accuracy=float(state.committed[0]),
                baseline_accuracy=float(env.rules.baseline_at(state.epoch)[0]),
                test_accuracy=None,
                alone_test_accuracy=None,
                fossils=fossils,
                rollbacks=int(state.rollbacks[0]),
                illegal_actions=int(env.illegal_actions[0]),
                epochs=epochs,
                samples=0,
                seconds=self.seconds,
                epochs_per_second=epochs / self.seconds,
                images_per_second=0.0,
                phase_seconds={} if self.seconds_before else env.phase_seconds,
                need=mean_need(state.slots),
            )
        )
        self.emit(
            RunCompleted(
                controller=self.controller,
                pairs=0,
                comparisons=(),
                host_parameters=env.host_parameters,
                parameters=parameters,
                fossils=fossils,
                seconds=self.seconds,
            )
        )
        if self.hub is not None:
            self.hub.close()
            self.hub = None
        self.claim.close()

    @property
    def seconds(self) -> float:
        return self.seconds_before + time.perf_counter() - self.began

    def _named(self, config: ResolvedConfig) -> ResolvedConfig:
        """Returns the config with the controller that plays."""
        return ResolvedConfig.parse(config.tables_with({"run": {"controller": self.controller}}))

    def _open(self) -> None:
        self.hub = TelemetryHub([JsonlSink(self.folder.path / EVENTS)])
