"""PlantedVectorEnv: simulated hosts whose accuracy follows a written-down law, with the API of hosts in training.

Spaces, masks, lifecycle, gates, rewards and info are those of GrowthVectorEnv; only training is replaced, by the law
(``planted_law``), and no host ever goes bad. Everything is an array over envs, so that a controller can be tried on
hundreds of thousands of steps in a minute, and the best return is known (``benchmarks/planted_best.py``).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from esper.config import TrainingConfig
from esper.config_resolved import ResolvedConfig
from esper.env.backend import Backend
from esper.env.baseline import Baseline
from esper.env.planted_law import Accuracies, Growth, Law
from esper.env.slot_env import SlotVectorEnv, copied
from esper.env.state import EnvState
from esper.lifecycle.ramps import STYLE_IS_GATED
from esper.lifecycle.slots import IS_BLENDED, Bools, Floats, Ints
from esper.lifecycle.stage import SeedStage
from esper.seeds.blueprints import choose
from esper.spaces.action import ActionSpec
from esper.telemetry.span import Spans
from esper.training.rng import RngStream, derive_seed

NAME = "planted"
N_ENVS, EPISODE_LENGTH = 64, 50
ROUNDS, LEARNING_ROUNDS = 1, 60


def resolve(config: TrainingConfig) -> ResolvedConfig:
    """Returns the config with the planted task's sizes in place of None."""
    env, run = config.env, config.run
    sizes = {"n_envs": env.n_envs or N_ENVS, "episode_length": env.episode_length or EPISODE_LENGTH}
    rounds = run.rounds or (LEARNING_ROUNDS if run.learns else ROUNDS)
    return ResolvedConfig.parse(config.tables_with({"env": sizes, "run": {"rounds": rounds}}))


class PlantedBackend(Backend):
    """E hosts under a law.

    A host's noise depends on (run seed, env, episode) only, so that adding hosts changes nothing for the others.
    """

    def __init__(self, law: Law, n_envs: int, horizon: int, counterfactual_every: int) -> None:
        self.law, self.counterfactual_every = law, counterfactual_every
        self.host_parameters = law.host_parameters
        self.growth = Growth(law, n_envs, horizon)
        self.noise = np.zeros((n_envs, horizon + 1, 1 + 2 * len(law.slots)))
        """[E, T + 1, 1 + 2S], pp: errors of the accuracies, the contributions and the trials."""

    def reset(self, starting: Bools, run_seed: int, episodes: Ints) -> None:
        """Starts episodes; draws a whole episode's errors at once, from each env's own stream."""
        self.growth.reset(starting)
        law = self.law
        if law.noise == law.paired_noise == law.worth_std == 0:
            return
        scale = np.array([law.noise, *[law.paired_noise] * (2 * len(law.slots))])
        for env in np.flatnonzero(starting):
            seed = derive_seed(run_seed, int(env), int(episodes[env]), RngStream.NOISE)
            draw = np.random.default_rng(seed)
            self.noise[env] = draw.standard_normal(self.noise.shape[1:]) * scale
            self.growth.worth[env] = np.array(law.worth) + law.worth_std * draw.standard_normal(np.shape(law.worth))

    def plant(self, where: Bools, blueprint: Ints, style: Ints) -> tuple[Ints, dict[int, str]]:
        return np.array(self.law.parameters)[blueprint] + self.law.gate_parameters * STYLE_IS_GATED[style], {}

    def train(self, active: Bools, state: EnvState) -> None:
        self.growth.train(state.slots, state.epoch, active)

    def measure(self, active: Bools, state: EnvState) -> None:
        true, places = self.growth.measure(state.slots, state.epoch), len(self.law.slots)
        errors = self.noise[np.arange(len(active)), state.epoch]
        trained = active & (state.epoch > 0)
        state.write(trained, train_accuracy=true.accuracy, train_loss=self.law.loss(true.accuracy))
        for name, loss in (("accuracy", "loss"), ("committed", "committed_loss"), ("all_off", "all_off_loss")):
            measured = np.clip(getattr(true, name) + errors[:, 0], 0.0, 100.0)
            state.write(active, **{name: measured, loss: self.law.loss(measured)})
        self._measure_seeds(state, true, errors[:, 1 : 1 + places], errors[:, 1 + places :], active[:, None])

    def _measure_seeds(
        self, state: EnvState, true: Accuracies, errors: Floats, trial_errors: Floats, here: Bools
    ) -> None:
        seeds, paired = state.slots, self.law.paired_noise
        blended = here & IS_BLENDED[seeds.stage] & (seeds.alpha > 0)
        contribution = true.contribution + errors
        seeds.epochs_since_measured += here & ~np.isnan(seeds.contribution)
        seeds.write(blended, contribution_change=contribution - np.nan_to_num(seeds.contribution))
        seeds.write(blended, contribution=contribution, contribution_error=paired, epochs_since_measured=0)
        # A seed that is blended alone interacts with nothing, which costs no measurement to know.
        due = state.epoch % self.counterfactual_every == 0
        seeds.write(blended & (due | (blended.sum(axis=1) == 1))[:, None], interaction=true.interaction)
        incubating = here & (seeds.stage == SeedStage.TRAINING)
        seeds.write(incubating, trial=true.trial + trial_errors, trial_error=paired)
        # A seed's gradient is large while it has much to learn, and it is always sound.
        immaturity, sound = 1 - self.growth.maturity, {"gradient_health": 1.0, "vanishing": 0.0, "exploding": 0.0}
        seeds.write(here & seeds.learning, gradient_norm=immaturity, gradient_ratio=immaturity, **sound)

    def test_accuracy(self, state: EnvState) -> Floats:
        """Returns the accuracy of each committed network under the law, without noise, pp [E]."""
        return self.growth.measure(state.slots, state.epoch).committed

    def state_dict(self) -> Any:
        arrays = {name: getattr(self.growth, name) for name in self.growth.STATE}
        return {name: copied(values) for name, values in {**arrays, "noise": self.noise}.items()}

    def load_state_dict(self, saved: Any, state: EnvState) -> None:
        for name in self.growth.STATE:
            getattr(self.growth, name)[:] = saved[name].numpy()
        self.noise[:] = saved["noise"].numpy()


class PlantedVectorEnv(SlotVectorEnv):
    """Simulated hosts under ``law``; see GrowthVectorEnv for the API.

    By default, ``config`` has 64 envs and 50 epochs; its ``env.blueprints`` selects from those of the law.
    """

    def __init__(
        self,
        config: TrainingConfig | None = None,
        law: Law | None = None,
        autoreset_mode: AutoresetMode | str = AutoresetMode.DISABLED,
    ) -> None:
        config, law = resolve(config or TrainingConfig()), law or Law()
        law = law.only(choose(config.env.blueprints, law.blueprints, "simulated hosts"))
        n_envs, horizon = config.env.n_envs, config.env.episode_length
        self.law = law
        self.hosts: PlantedBackend = PlantedBackend(law, n_envs, horizon, config.env.counterfactual_every)
        spec, spans = ActionSpec(law.slots, law.blueprints), Spans(marks=config.run.mark_phases)
        largest = np.tile(np.array(law.parameters) + law.gate_parameters, (len(law.slots), 1))
        super().__init__(config, spec, self.hosts, spans, largest, autoreset_mode)
        self.baseline = self._no_growth()

    def _no_growth(self) -> Baseline:
        return self.baseline or self.law.baseline(self.horizon, self.config.env.baseline_episodes)
