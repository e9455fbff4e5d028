"""GrowthVectorEnv: many hosts in training as one ``gymnasium.vector.VectorEnv``.

One step trains every host for one epoch. What a controller needs travels through the Gymnasium API only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from esper.config import TrainingConfig
from esper.data.task import Task, resolve
from esper.env.baseline import Baseline, measure_baseline
from esper.env.episode import Episode, World, transfer
from esper.env.legal import legal_actions
from esper.env.observe import observe
from esper.seeds.blueprints import BLUEPRINTS, BlueprintRegistry
from esper.spaces.action import HEADS, Action, ActionSpec, Op
from esper.spaces.mask import ActionMask
from esper.spaces.observation import LIMIT, ObservationLayout
from esper.telemetry.event import BaselineMeasured, EpisodeCompleted, EpochCompleted, Event
from esper.training.env_state import ParallelEnvState, make_accumulators
from esper.training.evaluate import committed_configuration, evaluate
from esper.training.lanes import Lanes

Float32s = NDArray[np.float32]
Bools = NDArray[np.bool_]
StepResult = tuple[Float32s, NDArray[np.float64], Bools, Bools, dict[str, Any]]

WAIT = np.zeros(len(HEADS), dtype=np.int64)


def _ignore(_event: Event) -> None:
    pass


class GrowthVectorEnv(VectorEnv[Float32s, NDArray[np.int64], NDArray[Any]]):
    """Hosts of one task, trained and grown together.

    Autoreset is DISABLED: an env whose episode ended idles (its action is ignored, its reward is 0, ``info["idle"]`` is
    True) until ``reset(options={"reset_mask": mask})`` with a bool mask [E] starts it again.

    Observations are float32 [E, layout.size]; actions int64 [E, 8] in the order of ``esper.spaces.action.HEADS``;
    ``info["action_mask"]`` holds the legal ones. An illegal action is executed as WAIT and counted in
    ``info["illegal_actions"]``.

    Args:
        task: what hosts are trained on; its splits lie on the device that hosts train on.
        config: sizes left to the task are taken from it.
        emit: receives typed events, on the thread that calls ``step``.
        baseline: the no-growth curves; None measures them at the first reset.
        blueprints: what seeds can be; None takes the built-in registry as it is now.

    Raises:
        ConfigError: sizes that the task's data cannot serve.
    """

    metadata = {"autoreset_mode": AutoresetMode.DISABLED, "render_modes": []}  # noqa: RUF012  Gymnasium's declaration

    def __init__(
        self,
        task: Task,
        config: TrainingConfig,
        emit: Callable[[Event], None] = _ignore,
        baseline: Baseline | None = None,
        blueprints: BlueprintRegistry | None = None,
    ) -> None:
        self.config = resolve(config, task)
        self.task = task
        self.emit = emit
        self.baseline = baseline
        self.lanes = Lanes(self.config.run.lanes)
        self.blueprints = (blueprints or BLUEPRINTS).copy()
        self.num_envs = int(self.config.env.n_envs or 1)
        self.horizon = int(self.config.env.episode_length or 1)
        rows = make_accumulators(self.num_envs, task.train.x.device)
        self.training = [ParallelEnvState(i, task, self.config, rows[i]) for i in range(self.num_envs)]
        host = self.training[0].host
        self.action_spec = ActionSpec(host.slot_names, self.blueprints.names(host.topology))
        self.layout = ObservationLayout(host.slot_names, self.horizon)
        self.single_observation_space = gymnasium.spaces.Box(-LIMIT, LIMIT, (self.layout.size,), np.float32)
        self.single_action_space = gymnasium.spaces.MultiDiscrete(np.array(self.action_spec.sizes))
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.episodes: list[Episode] = []
        self.run_seed = self.config.run.seed
        self.illegal_actions = np.zeros(self.num_envs, dtype=np.int64)
        self.phase_seconds = {"train": 0.0, "validate": 0.0, "govern": 0.0, "decide": 0.0}
        """Wall time spent in the phases of steps since the env was made."""
        self._episode_numbers = np.full(self.num_envs, -1)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Float32s, dict[str, Any]]:
        """Start episodes: all, or those of ``options["reset_mask"]`` (bool [E]). ``seed`` sets the run seed.

        Raises ValueError for a list of seeds: envs derive their own from the run seed.
        """
        if isinstance(seed, list):
            raise ValueError("GrowthVectorEnv takes one run seed, from which each env derives its own; pass an int")
        if seed is not None:
            self.run_seed = seed
            self._episode_numbers[:] = -1
        mask = np.ones(self.num_envs, dtype=np.bool_)
        if options and "reset_mask" in options:
            mask = np.array(options["reset_mask"], dtype=np.bool_)
        if not self.episodes:
            self.prepare()
            mask[:] = True
        starting = [episode for episode, chosen in zip(self.episodes, mask, strict=True) if chosen]
        self._episode_numbers[mask] += 1
        self.illegal_actions[mask] = 0
        for episode in starting:
            episode.reset(self.run_seed, int(self._episode_numbers[episode.index]))
        if starting:
            with self._phase("validate"):
                self.lanes.run(Episode.validate, starting)
                transfer(starting)
        for episode in starting:
            episode.begin()
        return self._observe(), self._info()

    def prepare(self) -> None:
        """Measure the baseline unless it was given; the first reset does this where it was not done before."""
        if self.episodes:
            return
        if self.baseline is None:
            self.baseline = measure_baseline(self.task, self.config, self.lanes, self.run_seed)
        self.baseline.check(self.horizon)
        b = self.baseline
        self.emit(BaselineMeasured(b.episodes, b.accuracy, b.loss, b.final_loss_std))
        world = World(self.config, self.action_spec, self.blueprints, b, self.emit)
        self.episodes = [Episode(training, world) for training in self.training]

    def step(self, actions: NDArray[np.int64]) -> StepResult:
        """One epoch of every host: act, train, validate, govern, tick, reward."""
        actions = self._checked(actions)
        active = [episode for episode in self.episodes if not episode.done]
        idle = np.array([episode.done for episode in self.episodes])
        for episode in self.episodes:
            episode.terms = {}
        rewards = np.zeros(self.num_envs)
        with self._phase("decide"):
            for episode in active:
                row = actions[episode.index]
                if not self.mask.legal(episode.index, row):
                    self.illegal_actions[episode.index] += 1
                    row = WAIT
                episode.act(Action.decode(row))
                episode.report_changes()
        with self._phase("train"):
            self.lanes.run(Episode.train, active)
        with self._phase("validate"):
            self.lanes.run(Episode.validate, active)
            if active:
                transfer(active)
        with self._phase("govern"):
            for episode in active:
                episode.govern()
        with self._phase("decide"):
            for episode in active:
                episode.tick()
                rewards[episode.index] = episode.settle()
                self._report(episode, rewards[episode.index])
            observation = self._observe()
        ended = np.array([episode.done for episode in self.episodes])
        truncated = np.array([episode.truncated for episode in self.episodes])
        return observation, rewards, ended & ~truncated, ended & truncated, {**self._info(), "idle": idle}

    def action_masks(self) -> Bools:
        """The per-head masks side by side, bool [E, sum of head sizes], as sb3-contrib reads them."""
        masks = self.mask.heads(self.action_spec)
        return np.concatenate([masks[head] for head in HEADS], axis=1)

    def test_accuracy(self) -> NDArray[np.float64]:
        """Accuracy of each committed network (fossils only) on the test split, pp [E]. For reports only."""
        accuracy = np.zeros(self.num_envs)

        def measure(training: ParallelEnvState) -> None:
            result = evaluate(training, self.task.test, [committed_configuration(training)])
            accuracy[training.index] = 100 * float(result.correct.double().mean())

        self.lanes.run(measure, self.training)
        return accuracy

    def close_extras(self, **_kwargs: Any) -> None:
        self.lanes.close()

    def _checked(self, actions: NDArray[np.int64]) -> NDArray[np.int64]:
        if not self.episodes:
            raise gymnasium.error.ResetNeeded("call reset() before step()")
        actions = np.asarray(actions, dtype=np.int64)
        if actions.shape != (self.num_envs, len(HEADS)):
            raise ValueError(f"actions have shape {actions.shape}, wanted {(self.num_envs, len(HEADS))}")
        for head, size, column in zip(HEADS, self.action_spec.sizes, actions.T, strict=True):
            if column.min() < 0 or column.max() >= size:
                raise ValueError(f"{head} is one of 0 to {size - 1}, not {column.tolist()}")
        return actions

    def _observe(self) -> Float32s:
        self.mask: ActionMask = legal_actions(self.episodes, self.action_spec)
        return np.stack([observe(episode, self.layout) for episode in self.episodes])

    def _info(self) -> dict[str, Any]:
        episodes = self.episodes
        names = episodes[0].reward.names
        return {
            "action_mask": self.mask.heads(self.action_spec),
            "reward_terms": {name: np.array([e.terms.get(name, 0.0) for e in episodes]) for name in names},
            "illegal_actions": self.illegal_actions.copy(),
            "idle": np.array([e.done for e in episodes]),
            "validation_accuracy": np.array([e.measurement.accuracy for e in episodes]),
            "committed_accuracy": np.array([e.measurement.committed for e in episodes]),
            "baseline_accuracy": np.array([e.baseline_accuracy() for e in episodes]),
        }

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.phase_seconds[name] += time.perf_counter() - start

    def _report(self, episode: Episode, reward: float) -> None:
        """Stage changes, the epoch, and the episode when it ended, as events."""
        episode.report_changes()
        training, now = episode.training, episode.measurement
        fossils = {slot.name: slot.blueprint.name for slot in training.fossils() if slot.blueprint}
        self.emit(
            EpochCompleted(
                env=episode.index,
                episode=training.episode,
                epoch=episode.epoch,
                train_loss=now.train_loss,
                train_accuracy=now.train_accuracy,
                validation_loss=now.loss,
                validation_accuracy=now.accuracy,
                committed_accuracy=now.committed,
                baseline_accuracy=episode.baseline_accuracy(),
                parameters=training.host_parameters + training.seed_parameters,
                fossil_parameters=training.fossil_parameters,
                contributions={
                    slot.name: slot.measured.contribution
                    for slot in episode.slots
                    if slot.blended and slot.measured.contribution is not None
                },
                stages={slot.name: slot.stage.name for slot in episode.slots},
                reward=float(reward),
                reward_terms=episode.terms,
            )
        )
        if episode.done:
            self.emit(
                EpisodeCompleted(
                    env=episode.index,
                    episode=training.episode,
                    epochs=episode.epoch,
                    total_reward=episode.total_reward,
                    validation_accuracy=now.accuracy,
                    committed_accuracy=now.committed,
                    baseline_accuracy=episode.baseline_accuracy(),
                    host_parameters=training.host_parameters,
                    fossil_parameters=training.fossil_parameters,
                    fossils=fossils,
                    rollbacks=episode.governor.rollbacks,
                    terminated=not episode.truncated,
                )
            )


def wait_actions(n_envs: int) -> NDArray[np.int64]:
    """WAIT for every env, int64 [E, 8]."""
    return np.full((n_envs, len(HEADS)), Op.WAIT, dtype=np.int64)
