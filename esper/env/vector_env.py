"""GrowthVectorEnv: many hosts in training as one ``gymnasium.vector.VectorEnv``.

One step trains every host for one epoch. What a controller needs travels through the Gymnasium API only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from esper.attribution.counterfactual import max_configurations
from esper.config import TrainingConfig
from esper.config_resolved import HostTrainingConfig
from esper.data.host_checks import check_hosts
from esper.data.task import Task, resolve
from esper.env.baseline import Baseline, measure_baseline
from esper.env.context import RunContext
from esper.env.device_time import TrainingTime
from esper.env.episode import Episode, transfer
from esper.env.fleet import Fleet, Floats, Rules
from esper.env.gather import gather, largest_sizes
from esper.env.slot_env import Actions, Float32s, SlotVectorEnv, StepResult
from esper.ops import _native
from esper.seeds.blueprints import BLUEPRINTS, BlueprintRegistry, choose
from esper.spaces.action import Action, ActionSpec
from esper.telemetry.event import BaselineMeasured, EpisodeCompleted, EpochCompleted, Event, StepsNotCaptured
from esper.training.execution.multi_gpu import device_index
from esper.training.execution.tiers import make_lanes, prepare_hosts
from esper.training.host_trainer import HostTrainer
from esper.training.host_training import HostTraining
from esper.training.metrics import make_metrics
from esper.training.micro_batching import Parts
from esper.training.placement import copies_to_pin
from esper.training.precision import casting, concrete, image_dtype
from esper.training.rng import seeded
from esper.training.validate import committed_configuration, evaluate


def ignore(_event: object) -> None:
    pass


def _hosts(tasks: Sequence[Task], config: HostTrainingConfig, count: int, configurations: int) -> list[HostTraining]:
    """So many, on the devices of ``tasks`` in turn; each device has one block of totals for all of its hosts."""
    blocks = [
        make_metrics(
            len(range(place, count, len(tasks))),
            task.device,
            configurations,
            samples=len(task.validation),
            language=task.validation.y.dim() == 2,
        )
        for place, task in enumerate(tasks)
    ]
    places = [(device_index(i, len(tasks)), i // len(tasks)) for i in range(count)]
    return [HostTraining(i, tasks[p], config, blocks[p][row]) for i, (p, row) in enumerate(places)]


class GrowthVectorEnv(SlotVectorEnv):
    """Hosts of one task, trained and grown together.

    Args:
        task: what hosts are trained on; its splits lie on the device that hosts train on.
        elsewhere: the same task on more devices of the same kind, which hosts take in turn.
        config: sizes left to the task are taken from it.
        emit: receives typed events, on the thread that calls ``step``.
        baseline: the no-growth curves; None measures them at the first reset.
        blueprints: what seeds can be; None takes the built-in registry as it is now. ``config.env.blueprints`` says
            which of the host's topology a controller may choose, None for all.
        autoreset_mode: DISABLED or SAME_STEP, see SlotVectorEnv.
        parts: what batches are computed in, for envs that share a machine; None: this env's own.

    Raises:
        ConfigError: sizes that the task's data cannot serve, a host that does not fit the task, or blueprints that are
            not known.
        ValueError: another autoreset mode.
    """

    config: HostTrainingConfig

    def __init__(
        self,
        task: Task,
        config: TrainingConfig,
        emit: Callable[[Event], None] = ignore,
        baseline: Baseline | None = None,
        blueprints: BlueprintRegistry | None = None,
        autoreset_mode: AutoresetMode | str = AutoresetMode.DISABLED,
        parts: Parts | None = None,
        elsewhere: Sequence[Task] = (),
    ) -> None:
        config = resolve(config, task)
        n_envs = config.env.n_envs
        precision = concrete(config.task.precision, task.device)
        config = config.with_values(task={"precision": precision})
        with seeded(0), casting(precision, task.device):
            sites = check_hosts(task, image_dtype(precision)).sites
        self.tasks = (task, *elsewhere)[:n_envs]
        self.training = _hosts(self.tasks, config, n_envs, max_configurations(len(sites)))
        self.blueprints = (blueprints or BLUEPRINTS).copy()
        host = self.training[0].host
        names = choose(config.env.blueprints, self.blueprints.names(host.topology), f"{host.topology} hosts")
        spec = ActionSpec(host.slot_names, names)
        super().__init__(config, spec, autoreset_mode)
        self.task = task
        self.emit = emit
        self.baseline = baseline
        self.lanes = make_lanes(config.run, *(each.device for each in self.tasks))
        self.tier = prepare_hosts(config.run, self.training, self.lanes)
        self.parts = parts or Parts(config)
        if emit is not ignore:
            self.parts.tell = self._tell
        if config.run.max_device_copies_mib is not None:
            self.pinned = copies_to_pin(config.run, self.training, self._most_seed_parameters())
        self.trainer = HostTrainer(task, self.training, self.lanes, self.parts, self.pinned)
        self.training_time = TrainingTime(self.spans, [each.device for each in self.tasks])
        self.episodes: list[Episode] = []
        self._not_captured: set[str] = set()
        """Reasons that have been told."""
        self.watch: Callable[[Episode], None] = ignore
        """Is told of an episode after each validation, while everything is as it was in the epoch before it."""
        if self.trainer.batches is not None:
            self.trainer.batches.spans = self.spans

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Float32s, dict[str, Any]]:
        """Start episodes: all, or those of ``options["reset_mask"]`` (bool [E]). ``seed`` sets the run seed.

        Raises ValueError for a list of seeds: envs derive their own from the run seed.
        """
        mask = self._begin(seed, options, everyone=not self.episodes)
        if not self.episodes:
            self.prepare()
        starting = [episode for episode, chosen in zip(self.episodes, mask, strict=True) if chosen]
        for episode in starting:
            episode.reset(self.run_seed, int(self.episode_numbers[episode.index]))
        if starting:
            with self.spans("validate"):
                self.trainer.repeatable(Episode.validate, starting)
                transfer(starting)
        for episode in starting:
            self.watch(episode)
            episode.begin()
        return self._show(gather(self.episodes)), self._info()

    def prepare(self) -> None:
        """Measure the baseline unless it was given."""
        if self.episodes:
            return
        if self.baseline is None:
            self.baseline = measure_baseline(self.tasks, self.config, self.lanes, self.run_seed, self.parts)
        self.baseline.check(self.horizon)
        b = self.baseline
        self._tell(BaselineMeasured(b.episodes, b.accuracy, b.loss, b.final_loss_std))
        training = self.training[0]
        self.rules = Rules(
            config=self.config,
            spec=self.action_spec,
            baseline=b,
            horizon=self.horizon,
            host_parameters=training.host_parameters,
            largest=largest_sizes(training, self.action_spec, self.blueprints),
        )
        world = RunContext(self.config, self.action_spec, self.blueprints, b, self._tell, self.pinned)
        self.episodes = [Episode(training, world) for training in self.training]

    def copies_held(self) -> list[Counter[str]]:
        return [episode.governor.held() + self.trainer.held(episode.training) for episode in self.episodes]

    def _most_seed_parameters(self) -> int:
        """The most parameters that seeds add to a host: the largest in every slot, within the budget."""
        largest = largest_sizes(self.training[0], self.action_spec, self.blueprints).max(axis=1).sum()
        return int(min(largest, self.config.env.parameter_budget * self.host_parameters))

    def _step(self, actions: Actions) -> StepResult:
        """One epoch of every host: act, train, validate, govern, tick, reward."""
        actions = self._accepted(actions)
        idle = self.done.copy()
        active = [episode for episode in self.episodes if not episode.done]
        with self.spans("decide"):
            for episode in active:
                episode.act(Action.decode(actions[episode.index]))
                episode.report_changes()
        with self.spans("train"), self.training_time:
            self.trainer.epoch([episode.training for episode in active])
        with self.spans("validate"):
            self.trainer.repeatable(Episode.validate, active)
            if active:
                transfer(active)
        self.training_time.settle()
        self._tell_what_is_not_captured()
        for episode in active:
            self.watch(episode)
        with self.spans("govern"):
            for episode in active:
                episode.govern()
        with self.spans("decide"):
            for episode in active:
                episode.tick()
                episode.close_epoch()
            fleet = gather(self.episodes)
            rewards = self._settle(active, fleet)
            observation = self._show(fleet)
        ended, truncated = self.done.copy(), self.truncated.copy()
        return observation, rewards, ended & ~truncated, ended & truncated, {**self._info(), "idle": idle}

    def _settle(self, active: list[Episode], fleet: Fleet) -> Floats:
        """Pay the rewards [E] of the measured transition, and report the epoch."""
        self.done = np.array([episode.done for episode in self.episodes])
        self.truncated = np.array([episode.truncated for episode in self.episodes])
        stepped = np.zeros(self.num_envs, dtype=np.bool_)
        stepped[[episode.index for episode in active]] = True
        rewards = self._pay(fleet, stepped)
        for episode in active:
            reward = episode.credit({name: float(term[episode.index]) for name, term in self.reward_terms.items()})
            with self.spans("telemetry"):
                self._report(episode, reward)
        return rewards

    def _hosts_state(self) -> Any:
        return {"episodes": [episode.state_dict() for episode in self.episodes], "told": sorted(self._not_captured)}

    def _load_hosts(self, state: Any) -> Fleet:
        for episode, saved in zip(self.episodes, state["episodes"], strict=True):
            episode.load_state_dict(saved)
        self._not_captured = set(state["told"])
        return gather(self.episodes)

    @property
    def host_parameters(self) -> int:
        return self.training[0].host_parameters

    def test_accuracy(self) -> NDArray[np.float64]:
        """Accuracy of each committed network (fossils only) on the test split, pp [E]. For reports only."""
        accuracy = np.zeros(self.num_envs)

        def measure(training: HostTraining) -> None:
            result = evaluate(training, training.task.test, [committed_configuration(training)])
            accuracy[training.index] = float(result.accuracy[0])

        self.trainer.repeatable(measure, self.training)
        return accuracy

    def close_extras(self, **_kwargs: Any) -> None:
        try:
            self.lanes.close()
        finally:  # a GPU that failed
            self.trainer.close()

    def _tell(self, event: Event) -> None:
        with self.spans("telemetry"):
            self.emit(event)

    def _tell_what_is_not_captured(self) -> None:
        """Each reason once. Raises RuntimeError with ``ESPER_REQUIRE_NATIVE=1`` where the config names the tier."""
        for reason in self.lanes.reasons():
            if reason not in self._not_captured:
                self._not_captured.add(reason)
                self._tell(StepsNotCaptured(reason))
                if self.config.run.tier == "graph":
                    _native.refuse_fallback("steps are queued by Python, and not captured", reason)

    def _report(self, episode: Episode, reward: float) -> None:
        """Stage changes, the epoch, and the episode when it ended, as events."""
        episode.report_changes()
        training, now = episode.training, episode.measurement
        fossils = {slot.name: slot.blueprint.name for slot in training.fossils() if slot.blueprint}
        contributions = [
            (slot.name, slot.measured.contribution, slot.measured.contribution_error)
            for slot in episode.slots
            if slot.blended and slot.measured.contribution is not None
        ]
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
                contributions={name: value for name, value, _ in contributions},
                contribution_errors={name: error for name, _, error in contributions if error is not None},
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
                    stopped=episode.stopped,
                    shapley={
                        slot: (value.difference, value.error)
                        for slot, value in episode.counterfactual.shapley().items()
                    },
                )
            )
