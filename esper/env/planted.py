"""PlantedVectorEnv: simulated hosts whose accuracy follows a written-down law, with the API of hosts in training.

Spaces, masks, lifecycle, gates, rewards and info are those of GrowthVectorEnv; only training is replaced, by the law
(``planted_law``), and no host ever goes bad. Everything is an array over envs, so that a controller can be tried on
hundreds of thousands of steps in a minute, and the best return is known (``planted_best``).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from esper.config import TrainingConfig
from esper.config_resolved import ResolvedConfig
from esper.env import lifecycle
from esper.env.fleet import IS_BLENDED, Bools, Fleet, Floats, Rules
from esper.env.lifecycle import STYLE_IS_GATED, SeedSlots
from esper.env.planted_law import Accuracies, Growth, Law
from esper.env.slot_env import Actions, Float32s, SlotVectorEnv, StepResult, copied
from esper.seeds.blueprints import choose
from esper.seeds.stage import SeedStage
from esper.spaces.action import ALPHA_SPEEDS, ALPHA_TARGETS, TEMPOS, ActionSpec, Op
from esper.training.rng import RngStream, derive_seed

NAME = "planted"
N_ENVS, EPISODE_LENGTH = 64, 50
ROUNDS, LEARNING_ROUNDS = 1, 60

_TEMPOS, _TARGETS, _SPEEDS = np.array(TEMPOS), np.array(ALPHA_TARGETS), np.array(ALPHA_SPEEDS)


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


class PlantedVectorEnv(SlotVectorEnv):
    """Simulated hosts under a law; see GrowthVectorEnv for the API.

    An env's noise depends on (run seed, env, episode) only, so that adding envs changes nothing for the others.

    Args:
        config: 64 envs and 50 epochs where it does not say.
        law: what accuracy follows; of its blueprints those of ``config.env.blueprints``, None for all.
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
        super().__init__(config, ActionSpec(law.slots, law.blueprints), autoreset_mode)
        self.law = law
        places = len(law.slots)
        self.growth = Growth(law, self.num_envs, self.horizon)
        self.seeds = SeedSlots.fresh(self.num_envs, places)
        self.fleet: Fleet = Fleet.fresh(self.num_envs, slots=self.seeds)
        self.baseline = law.baseline(self.horizon, config.env.baseline_episodes)
        self.best_by_epoch = np.zeros((self.num_envs, self.horizon + 1))
        """[E, T + 1]: the best accuracy measured until each epoch, which a plateau is seen by."""
        self.noise = np.zeros((self.num_envs, self.horizon + 1, 1 + 2 * places))
        """[E, T + 1, 1 + 2S], pp: errors of the accuracies, the contributions and the trials."""

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Float32s, dict[str, Any]]:
        """Start episodes: all, or those of ``options["reset_mask"]`` (bool [E]). ``seed`` sets the run seed."""
        starting = self._begin(seed, options, everyone=self.rules is None)
        if self.rules is None:
            self.rules = self._rules()
        self.fleet.clear(starting)
        self.seeds.clear(starting)
        self.growth.reset(starting)
        self._draw_noise(starting)
        self._validate(starting)
        for history, now in ((self.fleet.loss_ago, self.fleet.loss), (self.fleet.accuracy_ago, self.fleet.accuracy)):
            np.copyto(history, now[:, None], where=starting[:, None])
        np.copyto(self.fleet.best_accuracy, self.fleet.accuracy, where=starting)
        self.best_by_epoch[starting, 0] = self.fleet.accuracy[starting]
        return self._show(self.fleet), self._info()

    def _hosts_state(self) -> Any:
        return {
            "fleet": self.fleet.state_dict(),
            "seeds": self.seeds.state_dict(),
            "growth": {name: copied(getattr(self.growth, name)) for name in self.growth.STATE},
            "noise": copied(self.noise),
            "best_by_epoch": copied(self.best_by_epoch),
        }

    def _load_hosts(self, state: Any) -> Fleet:
        self.rules = self.rules or self._rules()
        self.fleet.load_state_dict(state["fleet"])
        self.seeds.load_state_dict(state["seeds"])
        for name in self.growth.STATE:
            getattr(self.growth, name)[:] = state["growth"][name].numpy()
        self.noise[:] = state["noise"].numpy()
        self.best_by_epoch[:] = state["best_by_epoch"].numpy()
        return self.fleet

    @property
    def host_parameters(self) -> int:
        return self.law.host_parameters

    def test_accuracy(self) -> Floats:
        """Accuracy of each committed network under the law, without noise, pp [E]."""
        return self.growth.measure(self.seeds, self.fleet.epoch).committed

    def _step(self, actions: Actions) -> StepResult:
        """One epoch of every host: act, train, validate, tick, reward."""
        actions = self._accepted(actions)
        idle = self.done.copy()
        active = ~idle
        self._act(actions, active)
        self.growth.train(self.seeds, self.fleet.epoch, active)
        self.fleet.epoch += active
        self._remember(active)
        self._validate(active)
        self._tick(active)
        ended = active & (self.fleet.epoch >= self.horizon)
        self.truncated |= active & ~ended & self._on_plateau()
        self.done = idle | ended | self.truncated
        rewards = self._pay(self.fleet, active)
        observation = self._show(self.fleet)
        terminated = self.done & ~self.truncated
        return observation, rewards, terminated, self.truncated.copy(), {**self._info(), "idle": idle}

    def _on_plateau(self) -> Bools:
        """Which envs ``env.stop_on`` cuts short, [E]; simulated hosts do not diverge."""
        config, epoch, everyone = self.config.env, self.fleet.epoch, np.arange(self.num_envs)
        self.best_by_epoch[everyone, epoch] = self.fleet.best_accuracy
        if "plateau" not in config.stop_on:
            return np.zeros(self.num_envs, dtype=np.bool_)
        assert self.rules is not None
        before = epoch - self.rules.durations.plateau_epochs
        risen = self.fleet.best_accuracy - self.best_by_epoch[everyone, np.maximum(before, 0)]
        growing = self.seeds.living.any(axis=1)
        return np.asarray((before >= 0) & (risen <= config.plateau_margin) & ~growing)

    def _rules(self) -> Rules:
        law = self.law
        gated = np.array(law.parameters) + law.gate_parameters
        return Rules(
            config=self.config,
            spec=self.action_spec,
            baseline=self.baseline or law.baseline(self.horizon, self.config.env.baseline_episodes),
            horizon=self.horizon,
            host_parameters=law.host_parameters,
            largest=np.tile(gated, (len(law.slots), 1)),
        )

    def _draw_noise(self, starting: Bools) -> None:
        """A whole episode's errors at once; an env's stream is its own."""
        law, places = self.law, len(self.law.slots)
        if law.noise == law.paired_noise == law.worth_std == 0:
            return
        scale = np.array([law.noise, *[law.paired_noise] * (2 * places)])
        for env in np.flatnonzero(starting):
            seed = derive_seed(self.run_seed, int(env), int(self.episode_numbers[env]), RngStream.NOISE)
            draw = np.random.default_rng(seed)
            self.noise[env] = draw.standard_normal(self.noise.shape[1:]) * scale
            self.growth.worth[env] = np.array(law.worth) + law.worth_std * draw.standard_normal(np.shape(law.worth))

    def _act(self, actions: Actions, active: Bools) -> None:
        """Apply the accepted actions; an ADVANCE or FOSSILIZE that its gate refuses changes nothing."""
        op, slot, blueprint, style, tempo, target, speed, curve = (actions[:, i, None] for i in range(8))
        seeds = self.seeds
        chosen = (slot == np.arange(len(self.law.slots))) & active[:, None]
        refused = ((op == Op.ADVANCE) | (op == Op.FOSSILIZE)) & chosen & ~seeds.gate_passed
        does = {kind: chosen & (op == kind) & ~refused for kind in Op}
        size = np.array(self.law.parameters)[blueprint] + self.law.gate_parameters * STYLE_IS_GATED[style]
        lifecycle.germinate(seeds, does[Op.GERMINATE], blueprint, style, _TEMPOS[tempo], _TARGETS[target], size)
        lifecycle.advance(seeds, does[Op.ADVANCE])
        lifecycle.fossilize(seeds, does[Op.FOSSILIZE])
        lifecycle.set_alpha_target(seeds, does[Op.SET_ALPHA_TARGET], _TARGETS[target], _SPEEDS[speed], curve)
        lifecycle.prune(seeds, does[Op.PRUNE], _SPEEDS[speed], curve)
        np.copyto(self.fleet.last_op, op[:, 0], where=active)
        np.copyto(self.fleet.succeeded, ~refused.any(axis=1), where=active)

    def _remember(self, active: Bools) -> None:
        """The epoch that has been the last one becomes the one before."""
        fleet, here = self.fleet, active[:, None]
        for history, now in ((fleet.loss_ago, fleet.loss), (fleet.accuracy_ago, fleet.accuracy)):
            np.copyto(history, np.column_stack((now, history[:, :-1])), where=here)

    def _validate(self, active: Bools) -> None:
        """Measure the envs of ``active`` with their noise, as GrowthVectorEnv's validation pass does."""
        fleet, seeds, places = self.fleet, self.seeds, len(self.law.slots)
        true = self.growth.measure(seeds, fleet.epoch)
        errors = self.noise[np.arange(self.num_envs), fleet.epoch]
        names = ("accuracy", "committed", "all_off")
        measured = {name: np.clip(getattr(true, name) + errors[:, 0], 0.0, 100.0) for name in names}
        trained = active & (fleet.epoch > 0)
        np.copyto(fleet.train_accuracy, true.accuracy, where=trained)
        np.copyto(fleet.train_loss, self.law.loss(true.accuracy), where=trained)
        losses = {"accuracy": fleet.loss, "committed": fleet.committed_loss, "all_off": fleet.all_off_loss}
        for name, values in measured.items():
            np.copyto(getattr(fleet, name), values, where=active)
            np.copyto(losses[name], self.law.loss(values), where=active)
        better = active & (fleet.accuracy > fleet.best_accuracy)
        fleet.epochs_since_best += active & (fleet.epoch > 0)
        fleet.epochs_since_best[better] = 0
        np.copyto(fleet.best_accuracy, fleet.accuracy, where=better)
        self._measure_seeds(true, errors[:, 1 : 1 + places], errors[:, 1 + places :], active[:, None])

    def _measure_seeds(self, true: Accuracies, errors: Floats, trial_errors: Floats, here: Bools) -> None:
        seeds, paired = self.seeds, self.law.paired_noise
        blended = here & IS_BLENDED[seeds.stage] & (seeds.alpha > 0)
        measured_before = ~np.isnan(seeds.contribution)
        contribution = true.contribution + errors
        change = contribution - np.where(measured_before, seeds.contribution, 0.0)
        seeds.epochs_since_measured += here & measured_before
        seeds.epochs_since_measured[blended] = 0
        # A seed that is blended alone interacts with nothing, which costs no measurement to know.
        due = self.fleet.epoch % self.config.env.counterfactual_every == 0
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

    def _tick(self, active: Bools) -> None:
        """Move every clock by one epoch, once; then see which gates are open."""
        rules, pending = self.rules, self.fleet.anomaly_pending
        assert rules is not None
        lifecycle.tick(self.seeds, active, rules.durations.embargo)
        lifecycle.automatic_gates(self.seeds, active, pending, rules)
        lifecycle.judge(self.seeds, pending, rules)
