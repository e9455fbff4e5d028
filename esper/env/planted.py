"""PlantedVectorEnv: simulated hosts whose accuracy follows a written-down law, with the API of hosts in training.

Spaces, masks, lifecycle, gates, rewards and info are those of GrowthVectorEnv; only training is replaced, by the law
(``planted_law``), and no host ever goes bad. Everything is an array over envs, so that a controller can be tried on
hundreds of thousands of steps in a minute, and the best return is known (``benchmarks/planted_best.py``).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from esper.config import TrainingConfig
from esper.config_resolved import ResolvedConfig
from esper.env.planted_law import Accuracies, Growth, Law
from esper.env.slot_env import SlotVectorEnv, copied
from esper.env.state import EnvState, Rules
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
    return ResolvedConfig.parse(
        config.tables_with(
            {
                "env": {"n_envs": env.n_envs or N_ENVS, "episode_length": env.episode_length or EPISODE_LENGTH},
                "run": {"rounds": run.rounds or (LEARNING_ROUNDS if run.learns else ROUNDS)},
            }
        )
    )


class SimulatedBackend:
    """E hosts under a law; see :class:`esper.env.backend.Backend`. No host ever goes bad.

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

    def drop(self, where: Bools) -> None:
        pass

    def train(self, active: Bools, state: EnvState) -> None:
        self.growth.train(state.slots, state.epoch, active)

    def measure(self, active: Bools, state: EnvState) -> None:
        places = len(self.law.slots)
        true = self.growth.measure(state.slots, state.epoch)
        errors = self.noise[np.arange(len(active)), state.epoch]
        trained = active & (state.epoch > 0)
        np.copyto(state.train_accuracy, true.accuracy, where=trained)
        np.copyto(state.train_loss, self.law.loss(true.accuracy), where=trained)
        for exact, accuracy, loss in (
            (true.accuracy, state.accuracy, state.loss),
            (true.committed, state.committed, state.committed_loss),
            (true.all_off, state.all_off, state.all_off_loss),
        ):
            measured = np.clip(exact + errors[:, 0], 0.0, 100.0)
            np.copyto(accuracy, measured, where=active)
            np.copyto(loss, self.law.loss(measured), where=active)
        self._measure_seeds(state, true, errors[:, 1 : 1 + places], errors[:, 1 + places :], active[:, None])

    def _measure_seeds(
        self, state: EnvState, true: Accuracies, errors: Floats, trial_errors: Floats, here: Bools
    ) -> None:
        seeds, paired = state.slots, self.law.paired_noise
        blended = here & IS_BLENDED[seeds.stage] & (seeds.alpha > 0)
        measured_before = ~np.isnan(seeds.contribution)
        contribution = true.contribution + errors
        change = contribution - np.where(measured_before, seeds.contribution, 0.0)
        seeds.epochs_since_measured += here & measured_before
        seeds.epochs_since_measured[blended] = 0
        # A seed that is blended alone interacts with nothing, which costs no measurement to know.
        due = state.epoch % self.counterfactual_every == 0
        costly = blended & (due | (blended.sum(axis=1) == 1))[:, None]
        incubating = here & (seeds.stage == SeedStage.TRAINING)
        learning = here & seeds.learning
        immaturity = 1 - self.growth.maturity
        for values, new, where in (
            (seeds.contribution_change, change, blended),
            (seeds.contribution, contribution, blended),
            (seeds.contribution_error, paired, blended),
            (seeds.interaction, true.interaction, costly),
            (seeds.trial, true.trial + trial_errors, incubating),
            (seeds.trial_error, paired, incubating),
            # A seed's gradient is large while it has much to learn, and it is always sound.
            (seeds.gradient_norm, immaturity, learning),
            (seeds.gradient_ratio, immaturity, learning),
            (seeds.gradient_health, 1.0, learning),
            (seeds.vanishing, 0.0, learning),
            (seeds.exploding, 0.0, learning),
        ):
            np.copyto(values, new, where=where)

    def begin(self, starting: Bools, state: EnvState) -> None:
        pass

    def govern(self, active: Bools, state: EnvState) -> Bools:
        return np.zeros_like(state.slots.gate_passed)

    def test_accuracy(self, state: EnvState) -> Floats:
        """Returns the accuracy of each committed network under the law, without noise, pp [E]."""
        return self.growth.measure(state.slots, state.epoch).committed

    def copies_held(self) -> list[Counter[str]]:
        return []

    def state_dict(self) -> Any:
        arrays = {name: getattr(self.growth, name) for name in self.growth.STATE}
        return {name: copied(values) for name, values in {**arrays, "noise": self.noise}.items()}

    def load_state_dict(self, saved: Any, state: EnvState) -> None:
        for name in self.growth.STATE:
            getattr(self.growth, name)[:] = saved[name].numpy()
        self.noise[:] = saved["noise"].numpy()

    def close(self) -> None:
        pass


class PlantedVectorEnv(SlotVectorEnv):
    """Simulated hosts under a law; see GrowthVectorEnv for the API.

    Args:
        config: 64 envs and 50 epochs where it does not say.
        law: what accuracy follows; ``config.env.blueprints`` selects from its blueprints, None for all.
        autoreset_mode: DISABLED or SAME_STEP, see SlotVectorEnv.
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
        self.simulated = SimulatedBackend(law, n_envs, horizon, config.env.counterfactual_every)
        spans = Spans(marks=config.run.mark_phases)
        super().__init__(config, ActionSpec(law.slots, law.blueprints), self.simulated, spans, autoreset_mode)
        self.baseline = law.baseline(self.horizon, config.env.baseline_episodes)

    def prepare(self) -> None:
        """Derives the rules from the law."""
        if self.rules is None:
            law = self.law
            gated = np.array(law.parameters) + law.gate_parameters
            self.rules = Rules(
                config=self.config,
                spec=self.action_spec,
                baseline=self.baseline or law.baseline(self.horizon, self.config.env.baseline_episodes),
                horizon=self.horizon,
                host_parameters=law.host_parameters,
                largest=np.tile(gated, (len(law.slots), 1)),
            )
