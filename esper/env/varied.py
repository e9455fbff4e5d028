"""VariedVectorEnv: hosts that differ, drawn anew for each episode.

Data, width, samples, epochs, label noise, optimizer, rate and price of an episode are those of a context
(``esper.exam.context``), so a policy that reads its observation can decide what none could that knows its task. Layers
can be widened before any epoch, and a doubling of the parameters costs what the context says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode

from esper.config import ConfigError, Durations, TrainingConfig
from esper.config.resolved import HostTrainingConfig, ResolvedConfig
from esper.core.action import SIZING, WIDENINGS, ActionSpec
from esper.core.arrays import Bools, Floats, Ints
from esper.core.blueprints import BLUEPRINTS, BlueprintRegistry
from esper.core.state import OF_FIRST, Baseline, Choices, EnvState, EpisodeRules, Setting
from esper.data.task import Task
from esper.data.task import resolve as resolve_task
from esper.env.catalog import BlueprintCatalog
from esper.env.merging import Merger
from esper.env.slot_env import SlotVectorEnv
from esper.env.training_backend import TrainingBackend
from esper.exam.context import VALIDATION, WIDEST, Context, Law, task_of
from esper.exam.sources import IMAGES, load_source, made_names
from esper.ops.torch_state import training_state
from esper.telemetry.event import ContextDrawn, Event
from esper.telemetry.score import ScoreUnit
from esper.telemetry.span import Spans
from esper.training.counterfactual import max_configurations
from esper.training.execution.multi_gpu import AUTO, devices_of
from esper.training.execution.tiers import make_executor, prepare_hosts
from esper.training.host_trainer import HostTrainer
from esper.training.host_training import HostTraining
from esper.training.metrics import make_metrics
from esper.training.rng import RngStream, derive_seed

NAME = "varied"
N_ENVS = 64
ROUNDS = 10
GROUP = 4
SLOTS = ("r2c0", "r2c1")
BLUEPRINTS_OFFERED = tuple(WIDENINGS.values())
MADE = 24
"""Number of made tables, and of made sets of images, among the sources."""
SOURCES = (
    *made_names(images=True)[:MADE],
    *made_names(images=False)[:MADE],
    *(name for name in IMAGES if name.startswith("digits")),
)
"""Data that needs no file of anybody's."""
LAW = Law(SOURCES)
"""The law that episodes are drawn from."""
RETURN = ScoreUnit("return", unit="pp")
"""Score of an episode: accuracy minus price."""
NEEDS: dict[str, dict[str, Any]] = {
    # Without a discount, rewards add up to what is judged: accuracy minus price.
    "reward": {"gamma": 1.0},
    "governor": {"snapshot_every": 5},  # each takes as long as the epoch of such a small host
    "run": {"evaluation_pairs": 64},
    "ppo": {
        "gamma": 1.0,
        "gae_lambda": 1.0,
        "prior": 0.0,
        "entropy_start": 0.01,
    },
}
"""Values in the place of defaults."""


def resolve(config: TrainingConfig, law: Law | None = None) -> ResolvedConfig:
    """Returns the config with this task's sizes and values in place of defaults.

    Episodes are drawn from ``law``; None: from ``LAW``. Raises ConfigError for values that such hosts cannot have.
    """
    law = law or LAW
    env = config.env
    longest = max(law.cnn_epochs[1], law.mlp_epochs[1])
    sizes: dict[str, Any] = {
        "n_envs": env.n_envs or N_ENVS,
        "episode_length": longest,
        "slots": SLOTS,
    }
    tables: dict[str, dict[str, Any]] = {
        "env": sizes,
        "task": {"precision": "float32"},
        "run": {
            "rounds": config.run.rounds or ROUNDS,
            "device": "cpu",
        },
    }
    if config.ppo.group is None:
        tables["ppo"] = {"group": GROUP if sizes["n_envs"] % GROUP == 0 else 1}
    resolved = ResolvedConfig.parse(config.with_defaults(**SIZING).with_defaults(**NEEDS).tables_with(tables))
    others = set(resolved.env.blueprints or ()) - set(BLUEPRINTS_OFFERED)
    if others or resolved.reward.mode != "priced":
        raise ConfigError(
            f"hosts of the task {NAME} are widened, by {', '.join(BLUEPRINTS_OFFERED)}, and pay their price "
            f"(reward.mode=priced); not {', '.join(others) or resolved.reward.mode}"
        )
    named = config.run.device
    if named != AUTO and any(device.type != "cpu" for device in devices_of(named)):
        raise ConfigError(f"run.device is {named}, but hosts of the task {NAME} train on the CPU: omit it")
    if env.episode_length not in (None, longest) or env.slots not in (None, SLOTS):
        raise ConfigError(f"env.episode_length and env.slots are drawn for each episode of the task {NAME}: omit them")
    return resolved


class DrawnHosts(TrainingBackend):
    """E hosts in training, each of the context of its episode.

    A context depends on the run seed and on the number of its episode among those of all envs.
    """

    def __init__(
        self,
        law: Law,
        config: ResolvedConfig,
        registry: BlueprintRegistry,
        spans: Spans,
    ) -> None:
        self.law = law
        self.config = config
        self.group = config.ppo.group or 1
        """Number of envs in a row whose episodes are of one context."""
        self.registry = registry
        self.spec = ActionSpec(SLOTS, config.env.blueprints or BLUEPRINTS_OFFERED)
        self._mergers: dict[tuple[Any, ...], Merger] = {}
        envs = config.env.n_envs
        self._totals = make_metrics(
            envs,
            torch.device("cpu"),
            max_configurations(len(SLOTS)),
            VALIDATION,
        )
        self.contexts = [self.context_of(config.run.seed, row, 0) for row in range(envs)]
        """The context of each env's episode."""
        hosts = [self._host(row) for row in range(envs)]
        executor = make_executor(config.run, torch.device("cpu"))
        self.execution = prepare_hosts(config.run, hosts, executor)
        first = self._merger(hosts[0], self.contexts[0])
        super().__init__(
            HostTrainer(hosts[0].task, hosts, executor),
            first.catalog,
            spans,
        )
        # So they are in all hosts, also if the first one is too wide for some.
        self.at_once = np.ones(len(self.spec.blueprints), dtype=np.bool_)
        self.only_added = np.ones(len(self.spec.blueprints), dtype=np.bool_)
        for row, host in enumerate(self.hosts):
            host.merger = self._merger(host.training, self.contexts[row])

    def context_of(
        self,
        run_seed: int,
        row: int,
        episode: int,
    ) -> Context:
        """Returns the context of an episode of env ``row``."""
        number = (episode * self.config.env.n_envs + row) // self.group
        seed = derive_seed(
            run_seed,
            0,
            number,
            RngStream.CONTEXT,
        )
        rng = np.random.default_rng(seed)
        return self.law.draw(rng)

    def sizes_of(self, row: int) -> Choices:
        """Returns the sizes of the new host of an env, and of its possible seeds."""
        host = self.hosts[row]
        return host.merger.sizes_of(host.training)

    def setting_of(self, row: int) -> Setting:
        """Returns what is known of the training of an env's host."""
        context = self.contexts[row]
        training = self.hosts[row].training
        source = load_source(context.source)
        return Setting(
            samples=context.samples,
            updates=context.samples // training.config.task.batch_size,
            inputs=source.x[0].size,
            classes=source.classes,
            learning_rate=training.config.task.learning_rate,
            price=context.price,
        )

    def reset(
        self,
        starting: Bools,
        run_seed: int,
        episodes: Ints,
    ) -> None:
        for row in np.flatnonzero(starting).tolist():
            self._draw(row, self.context_of(run_seed, row, int(episodes[row])))
        super().reset(starting, run_seed, episodes)

    def state_dict(self) -> Any:
        return {
            "contexts": [asdict(context) for context in self.contexts],
            "hosts": super().state_dict(),
        }

    def take_contexts(self, saved: Any) -> None:
        """Makes new hosts of the contexts in ``saved``."""
        for row, context in enumerate(saved["contexts"]):
            self._draw(row, Context(**context))

    def load_state_dict(self, saved: Any, state: EnvState) -> None:
        super().load_state_dict(saved["hosts"], state)

    def _draw(self, row: int, context: Context) -> None:
        """Makes the host of ``context`` that of env ``row``."""
        if context == self.contexts[row]:
            return
        self.contexts[row] = context
        training = self._host(row)
        self.trainer.replace(row, training)
        self.hosts[row] = self.host_of(training, row, self._merger(training, context))

    def _host(self, row: int) -> HostTraining:
        task = task_of(self.contexts[row])
        return HostTraining(row, task, self._config_of(task), self._totals[row])

    def _config_of(self, task: Task) -> HostTrainingConfig:
        """Returns the config of one env, with what the task says."""
        of_task = {
            "episode_length": task.episode_length,
            "slots": None,
        }
        config = self.config.with_values(env=of_task)
        return resolve_task(config, task)

    def _merger(self, training: HostTraining, context: Context) -> Merger:
        """Returns what knows the sizes of hosts of this architecture."""
        source = load_source(context.source)
        key = (context.width, source.classes, source.x[0].shape)
        if key not in self._mergers:
            host = training.host
            widest = WIDEST[context.topology]
            if source.images:
                widest *= 2  # the second block has twice the width of the first one
            self._mergers[key] = Merger(
                BlueprintCatalog(
                    host.topology,
                    host.sites,
                    self.registry,
                    self.spec,
                    widest,
                )
            )
        return self._mergers[key]


class VariedVectorEnv(SlotVectorEnv):
    """Hosts of contexts that are drawn for each episode from ``law``; see GrowthVectorEnv for the API.

    The score of an episode is its return: accuracy minus the price of what was grown, pp.
    """

    config: ResolvedConfig
    backend: DrawnHosts

    @training_state()
    def __init__(
        self,
        config: TrainingConfig | None = None,
        emit: Callable[[Event], None] | None = None,
        autoreset_mode: AutoresetMode | str = AutoresetMode.DISABLED,
        law: Law | None = None,
    ) -> None:
        law = law or LAW
        config = resolve(config or TrainingConfig(), law)
        spans = Spans(marks=config.telemetry.debug)
        backend = DrawnHosts(law, config, BLUEPRINTS.copy(), spans)
        envs = config.env.n_envs
        first = backend.sizes_of(0)
        zeros: dict[str, Any] = {field.name: np.zeros(envs) for field in fields(Setting)}
        super().__init__(
            config,
            backend.spec,
            backend,
            spans,
            first,
            Setting(**zeros),
            autoreset_mode,
            emit if config.telemetry.of_hosts else None,
        )
        self.choices = first.of_envs(envs, OF_FIRST)
        self.offers = first.of_envs(envs, OF_FIRST)
        self.execution = backend.execution

    def prepare(self) -> EpisodeRules:
        if self.rules is None:
            self.rules = replace(super().prepare(), horizon=self.loop.horizons)
        return self.rules

    def configure(
        self,
        *,
        learns: bool | None = None,
        **decided: Any,
    ) -> None:
        super().configure(**decided)
        if learns is False:  # each episode that is judged is of another context
            self.backend.group = 1

    def take_hosts(self, starting: Bools) -> None:
        for row in np.flatnonzero(starting).tolist():
            self._take(row)
            self._report_context(row)

    def _take(self, row: int) -> None:
        """Takes over what is known of the new host of an env."""
        sizes = self.backend.sizes_of(row)
        self.choices.put(row, sizes, OF_FIRST)
        self.offers.put(row, sizes, OF_FIRST)
        epochs = self.backend.contexts[row].epochs
        self.loop.horizons[row] = epochs
        self.loop.plateau_epochs[row] = Durations.of(self.config, epochs).plateau_epochs
        for name, value in asdict(self.backend.setting_of(row)).items():
            getattr(self.setting, name)[row] = value

    def _report_context(self, row: int) -> None:
        if self.loop.reporter is None:
            return
        context = self.backend.contexts[row]
        with self.spans("telemetry"):
            self.loop.reporter.emit(
                ContextDrawn(
                    env=row,
                    episode=int(self.state.episode[row]),
                    source=context.source,
                    width=context.width,
                    samples=context.samples,
                    epochs=context.epochs,
                    price=context.price,
                    noise=context.noise,
                    optimizer=context.optimizer,
                    learning_rate=float(self.setting.learning_rate[row]),  # type: ignore[index]
                )
            )

    def load_state_dict(self, state: dict[str, Any]) -> tuple[Any, Any]:
        self.prepare()
        self.backend.take_contexts(state["hosts"])
        for row in range(self.num_envs):
            self._take(row)
        return super().load_state_dict(state)

    def test_accuracy(self) -> Floats:
        """Returns the test accuracy of each committed network minus the price of what was grown, pp [E]."""
        rules = self.prepare()
        paid = rules.doubling * rules.doublings(self.state.slots.fossil_parameters)
        return np.asarray(super().test_accuracy() - paid)

    def _no_growth(self) -> Baseline:
        """Returns curves that say nothing: no other host is like that of an episode."""
        unknown = (float("nan"),) * (self.horizon + 1)
        return Baseline(
            accuracy=unknown,
            loss=(1.0,) * (self.horizon + 1),
            final_loss_std=1.0,
            episodes=0,
        )
