"""Simulated hosts as a backend of the phase loop: they follow the law of the planted task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from esper.env.backend import Backend
from esper.env.planted_law import Law
from esper.env.state import EnvState, copied
from esper.lifecycle.ramps import STYLE_IS_GATED, STYLE_OPERATOR
from esper.lifecycle.slots import IS_ON, Bools, Floats, Ints, Slots
from esper.lifecycle.stage import SeedStage
from esper.training.rng import RngStream, derive_seed


@dataclass(frozen=True)
class Accuracies:
    """Accuracies without noise, [E] unless noted, pp."""

    accuracy: Floats
    committed: Floats
    all_off: Floats
    contribution: Floats
    """Contributions of blended seeds, [E, S]."""
    interaction: Floats
    """Interactions of blended seeds with their neighbours, [E, S]."""
    trial: Floats
    """Accuracy that a seed would add at its incubation target, [E, S]."""


class PlantedBackend(Backend):
    """E hosts under a law.

    A host's noise depends on (run seed, env, episode) only, so that adding hosts changes nothing for the others.
    """

    STATE = (
        "worth",
        "experience",
        "trained_alpha",
        "scar",
        "noise",
        "seed_time",
        "reliance",
        "paired_noise",
        "overlap",
    )
    """Names of the arrays that change."""

    def __init__(self, law: Law, n_envs: int, horizon: int, counterfactual_every: int) -> None:
        self.law, self.counterfactual_every = law, counterfactual_every
        self.horizon = horizon
        self.only_added = np.zeros(len(law.blueprints), dtype=np.bool_)
        self.at_once = np.array(law.at_once or (False,) * len(law.blueprints), dtype=np.bool_)
        self.worth = np.tile(np.array(law.worth), (n_envs, 1, 1))
        """Worths of seeds, [E, S, B], pp."""
        self.share = np.array(law.share)
        self.seed_time, self.reliance, self.paired_noise, self.overlap = (
            np.full((n_envs, 1), value) for value in (law.seed_time, law.reliance, law.paired_noise, 0.0)
        )
        """The unknowns of each env's world, [E, 1]."""
        self.experience = np.zeros((n_envs, len(law.slots)))
        self.trained_alpha = np.zeros_like(self.experience)
        """Alpha in the last trained epoch, [E, S]."""
        self.scar = np.zeros(n_envs)
        """Accuracy lost to shocks and not healed yet, [E], pp."""
        self.noise = np.zeros((n_envs, horizon + 1, 1 + 2 * len(law.slots)))
        """[E, T + 1, 1 + 2S], pp: errors of the accuracies, the contributions and the trials."""

    def reset(self, starting: Bools, run_seed: int, episodes: Ints) -> None:
        """Starts episodes; draws a whole episode's errors at once, from each env's own stream."""
        law = self.law
        self.experience[starting] = self.trained_alpha[starting] = self.scar[starting] = 0.0
        if law.noise == law.paired_noise == law.worth_std == 0:
            return
        scale = np.array([law.noise, *[law.paired_noise] * (2 * len(law.slots))])
        for env in np.flatnonzero(starting).tolist():
            draw = np.random.default_rng(derive_seed(run_seed, env, int(episodes[env]), RngStream.NOISE))
            self.noise[env] = draw.standard_normal(self.noise.shape[1:]) * scale
            if law.world_envs is not None:  # all envs and episodes of a world draw the same
                world = env // law.world_envs
                number = (int(episodes[env]) + world) // law.world_episodes if law.world_episodes else 0
                draw = np.random.default_rng(derive_seed(run_seed, world, number, RngStream.EXPERIENCE, 1))
            self._draw_unknowns(env, draw)

    def _draw_unknowns(self, env: int, draw: np.random.Generator) -> None:
        law = self.law
        worth = np.array(law.worth) + law.worth_std * draw.standard_normal(np.shape(law.worth))
        worths, noise, paired, reliance, seed_time = law.unknown ** draw.uniform(-1, 1, 5)
        self.worth[env] = worth * worths
        self.noise[env, :, 0] *= noise
        self.noise[env, :, 1:] *= paired
        self.paired_noise[env] = law.paired_noise * paired
        self.reliance[env], self.seed_time[env] = law.reliance * reliance, law.seed_time * seed_time
        self.overlap[env] = law.overlap * draw.uniform(-1, 1)

    def plant(self, where: Bools, blueprint: Ints, style: Ints) -> tuple[Ints, dict[int, str]]:
        self.experience[where] = 0.0
        self.trained_alpha[where & self.at_once[blueprint]] = 1.0  # nothing changes when they are on: no shock
        return np.array(self.law.parameters)[blueprint] + self.law.gate_parameters * STYLE_IS_GATED[style], {}

    @property
    def maturity(self) -> Floats:
        """Maturity m of seeds, [E, S]."""
        return np.asarray(1 - np.exp(-self.experience / (self.seed_time * self.horizon)))

    def train(self, active: Bools, state: EnvState) -> None:
        law, slots, here = self.law, state.slots, active[:, None]
        plasticity = (1 + np.cos(np.pi * state.epoch / self.horizon)) / 2
        alpha, maturity = slots.alpha_on, self.maturity
        change = np.where(here, alpha - self.trained_alpha, 0.0)
        shock = np.where(change > 0, law.rising_shock * (1 - maturity), law.falling_shock * maturity)
        self.scar *= 1 - law.healing * plasticity * active
        self.scar += (shock * change**2).sum(axis=1)
        rate = np.where(slots.stage == SeedStage.TRAINING, law.incubation_rate, alpha)
        self.experience += np.where(here & slots.learning, rate * plasticity[:, None], 0.0)
        np.copyto(self.trained_alpha, alpha, where=here)

    def measure(self, active: Bools, state: EnvState) -> None:
        true, places = self.true_accuracies(state.slots, state.epoch), len(self.law.slots)
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
        seeds, paired = state.slots, self.paired_noise
        blended = here & IS_ON[seeds.stage] & (seeds.alpha > 0)
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
        immaturity, sound = 1 - self.maturity, {"gradient_health": 1.0, "vanishing": 0.0, "exploding": 0.0}
        seeds.write(here & seeds.learning, gradient_norm=immaturity, gradient_ratio=immaturity, **sound)

    def test_accuracy(self, state: EnvState) -> Floats:
        """Returns the accuracy of each committed network under the law, without noise, pp [E]."""
        return self.true_accuracies(state.slots, state.epoch).committed

    def state_dict(self) -> Any:
        return {name: copied(getattr(self, name)) for name in self.STATE}

    def load_state_dict(self, saved: Any, state: EnvState) -> None:
        for name in self.STATE:
            getattr(self, name)[:] = saved[name].numpy()

    def true_accuracies(self, slots: Slots, epoch: Ints) -> Accuracies:
        """Returns the accuracies under the law after ``epoch`` epochs [E], for all configurations."""
        worth = np.take_along_axis(self.worth, np.maximum(slots.blueprint, 0)[:, :, None], axis=2)[:, :, 0]
        worth = np.where(slots.blueprint >= 0, worth * self.share[STYLE_OPERATOR[slots.style]], 0.0)
        helpful, maturity = worth > 0, self.maturity
        realised = slots.alpha_on * maturity
        pull = self.law.synergy * _neighbours(realised * helpful)
        interaction = realised * helpful * pull
        on_trial = slots.incubation_target * maturity
        alone = self.law.host_accuracy(epoch, self.horizon) - self.scar
        leaning = self.reliance * realised
        shared = self._shared(leaning)
        kept, unkept = np.where(slots.fossil, realised, 0.0), np.where(slots.fossil, 0.0, leaning)
        return Accuracies(
            accuracy=np.clip(alone + self._effect(worth, realised), 0.0, 100.0),
            committed=np.clip(alone + self._effect(worth, kept) - self._lost(unkept), 0.0, 100.0),
            all_off=np.clip(alone - self._lost(leaning), 0.0, 100.0),
            contribution=worth * realised + interaction + leaning,
            interaction=interaction + shared,
            trial=worth * on_trial + helpful * on_trial * pull,
        )

    def _shared(self, leaning: Floats) -> Floats:
        """Returns the part of each seed's ``leaning`` [E, S] that overlaps with that of the other seeds, [E, S], pp."""
        pairs = np.minimum(leaning[:, :, None], leaning[:, None, :])
        return np.asarray(self.overlap * (pairs.sum(axis=2) - leaning))

    def _lost(self, leaning: Floats) -> Floats:
        """Returns the accuracy lost by switching off seeds that are leaned on by ``leaning`` [E, S]; [E], pp."""
        return np.asarray(leaning.sum(axis=1) - self._shared(leaning).sum(axis=1) / 2)

    def _effect(self, worth: Floats, realised: Floats) -> Floats:
        """Returns the accuracy that all seeds add together, [E], pp."""
        helping = realised * (worth > 0)
        synergy = self.law.synergy * (helping[:, :-1] * helping[:, 1:]).sum(axis=1)
        return np.asarray((worth * realised).sum(axis=1) + synergy)


def _neighbours(values: Floats) -> Floats:
    """Returns the sum of the values of both neighbouring slots, [E, S]."""
    padded = np.pad(values, ((0, 0), (1, 1)))
    return np.asarray(padded[:, :-2] + padded[:, 2:])
