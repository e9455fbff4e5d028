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
from gymnasium.vector import AutoresetMode

from esper.config import ConfigError, Durations, TrainingConfig
from esper.config.resolved import ResolvedConfig
from esper.core.action import ActionSpec
from esper.core.arrays import Bools, Floats
from esper.core.sizing import WIDENINGS
from esper.core.state import OF_FIRST, Baseline, EpisodeRules, Setting
from esper.data.facts import N_ENVS, for_drawn
from esper.data.names import DRAWN_VALUES
from esper.env.drawn_hosts import Contexts, DrawnHosts, RankedDrawnHosts
from esper.env.slot_env import SlotVectorEnv
from esper.exam.context import Context, Law
from esper.exam.sources import IMAGES, load_source, made_names
from esper.ops.torch_state import training_state
from esper.telemetry.event import ContextDrawn, Event
from esper.telemetry.score import ScoreUnit
from esper.telemetry.span import Spans
from esper.training.execution.ranks import RunRanks
from esper.training.rng import RngStream, derive_seed

NAME = "varied"
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
RETURN = ScoreUnit("return", unit="pp", priced=True)
"""Score of an episode: accuracy minus price."""


def score_of(config: TrainingConfig) -> ScoreUnit:
    """Returns the display format of the score of episodes, and of rewards if they are in it."""
    if config.reward.mode != "priced":
        return RETURN
    return replace(RETURN, of_reward=config.reward.benefit_scale)


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
    resolved = ResolvedConfig.parse(for_drawn(config).tables_with(tables))
    if env.episode_length not in (None, longest) or env.slots not in (None, SLOTS):
        raise ConfigError(DRAWN_VALUES.format(task=NAME))
    return resolved


class VariedVectorEnv(SlotVectorEnv):
    """Hosts of contexts that are drawn for each episode from ``law``; see GrowthVectorEnv for the API.

    The score of an episode is its return: accuracy minus the price of what was grown, pp. ``ranks`` are those that
    hosts are spread over; None: all train in this process.
    """

    config: ResolvedConfig
    backend: DrawnHosts | RankedDrawnHosts

    @training_state()
    def __init__(
        self,
        config: TrainingConfig | None = None,
        emit: Callable[[Event], None] | None = None,
        autoreset_mode: AutoresetMode | str = AutoresetMode.DISABLED,
        law: Law | None = None,
        ranks: RunRanks | None = None,
    ) -> None:
        self.law = law or LAW
        config = resolve(config or TrainingConfig(), self.law)
        envs = config.env.n_envs
        self.group = config.ppo.group or 1
        """Number of envs in a row whose episodes are of one context."""
        self.num_envs = envs
        self.contexts: Contexts = np.full(envs, self.context_of(config.run.seed, 0, 0))
        """The context of each env's episode."""
        spec = ActionSpec(SLOTS, config.env.blueprints or BLUEPRINTS_OFFERED)
        spans = Spans(marks=config.telemetry.debug)
        mine = range(envs) if ranks is None else ranks.share(envs)
        local = DrawnHosts(
            self.contexts[0],
            mine,
            config.run if ranks is None else ranks.own(config.run),
            config,
            spec,
            spans,
        )
        backend = local if ranks is None else RankedDrawnHosts(ranks, local, self.contexts[0])
        first = local.first.sizes_of_new(local.hosts[0].training)
        zeros: dict[str, Any] = {field.name: np.zeros(envs) for field in fields(Setting)}
        super().__init__(
            config,
            spec,
            backend,
            spans,
            first,
            Setting(**zeros),
            autoreset_mode,
            emit if config.telemetry.of_hosts else None,
        )
        self.execution = local.execution
        self.choices = first.of_envs(envs, OF_FIRST)
        self.offers = first.of_envs(envs, OF_FIRST)

    def context_of(
        self,
        run_seed: int,
        row: int,
        episode: int,
    ) -> Context:
        """Returns the context of an episode of env ``row``.

        It depends on the run seed and on the number of the episode among those of all envs.
        """
        number = (episode * self.num_envs + row) // self.group
        seed = derive_seed(
            run_seed,
            0,
            number,
            RngStream.CONTEXT,
        )
        return self.law.draw(np.random.default_rng(seed))

    def prepare(self) -> EpisodeRules:
        if self.rules is None:
            self.rules = replace(super().prepare(), horizon=self.loop.horizons)
        return self.rules

    def configure(
        self,
        *,
        grouped: bool | None = None,
        **decided: Any,
    ) -> None:
        super().configure(**decided)
        if grouped is not None:
            self.group = (self.config.ppo.group or 1) if grouped else 1

    def take_hosts(self, starting: Bools) -> None:
        for row in np.flatnonzero(starting).tolist():
            episode = int(self.state.episode[row]) + 1
            self.contexts[row] = self.context_of(self.run_seed, row, episode)
            self._report_context(row, episode)
        self._draw(starting)

    def _draw(self, where: Bools) -> None:
        """Has the envs of ``where`` bool [E] get the hosts of their contexts, and takes over what is known of them."""
        rows = np.flatnonzero(where).tolist()
        for row, sizes in zip(rows, self.backend.draw(where, self.contexts), strict=True):
            self.choices.put(row, sizes, OF_FIRST)
            self.offers.put(row, sizes, OF_FIRST)
            context = self.contexts[row]
            self.loop.horizons[row] = context.epochs
            self.loop.plateau_epochs[row] = Durations.of(self.config, context.epochs).plateau_epochs
            for name, value in asdict(_setting_of(context)).items():
                getattr(self.setting, name)[row] = value

    def _report_context(self, row: int, episode: int) -> None:
        if self.loop.reporter is None:
            return
        context = self.contexts[row]
        with self.spans("telemetry"):
            self.loop.reporter.emit(
                ContextDrawn(
                    env=row,
                    episode=episode,
                    source=context.source,
                    width=context.width,
                    samples=context.samples,
                    epochs=context.epochs,
                    price=context.price,
                    noise=context.noise,
                    optimizer=context.optimizer,
                    learning_rate=context.learning_rate,
                )
            )

    def state_dict(self) -> dict[str, Any]:
        contexts = [asdict(context) for context in self.contexts]
        return {**super().state_dict(), "contexts": contexts}

    def load_state_dict(self, state: dict[str, Any]) -> tuple[Any, Any]:
        self.prepare()
        for row, saved in enumerate(state["contexts"]):
            self.contexts[row] = Context(**saved)
        self._draw(np.ones(self.num_envs, dtype=np.bool_))
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


def _setting_of(context: Context) -> Setting:
    """Returns what is known of the training of a host of ``context``."""
    source = load_source(context.source)
    return Setting(
        samples=context.samples,
        updates=context.samples // context.batch_size,
        inputs=source.x[0].size,
        classes=source.classes,
        learning_rate=context.learning_rate,
        price=context.price,
    )
